# A launcher on each node, which meet at the first, starts a process for each GPU.
rank=${NODE_RANK:-${SLURM_NODEID:-${PET_NODE_RANK:-${JOB_COMPLETION_INDEX:-${RANK:?which of the nodes is this one}}}}}
head=${HEAD_NODE:-${PET_MASTER_ADDR:-${MASTER_ADDR:?where is the first node}}}
host=false
[ "$rank" != 0 ] || host=true
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that are started anew would find the addresses of those before
# The ranks are asked, all those of other nodes stop with them, and the launchers end together. One that was asked itself
# would leave the others waiting for 5 minutes.
ask() { pkill -TERM -P "$1" || kill -TERM "$1" || true; }
launch=("$python" -m torch.distributed.run --nnodes @@{nodes} --nproc-per-node @@{gpus} --max-restarts @@{restarts}
    --rdzv-backend c10d --rdzv-endpoint "$head:${HEAD_PORT:-29400}" --rdzv-conf "is_host=$host,read_timeout=600"
    --rdzv-id "${SLURM_JOB_ID:-medlab}" -m medlab)

#!/usr/bin/env bash
# Begins the run, or goes on with it where it is there: what one node does. TERM and USR1 ask it to save and to stop.
# shellcheck disable=SC2016  # a path may hold a $
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=@@{python}
recipe=@@{recipe}
run=@@{run}
steps=@@{steps}
gpus=@@{gpus}
nodes=@@{nodes}
[ ! -e "$here/${recipe%%:*}" ] || recipe=$here/$recipe

# With several nodes the choice is made before any of them trains; a launcher that chose for all of them sets GO_ON.
go_on=${GO_ON-$([ ! -e "$run/run.db" ] || echo yes)}
if [ -n "$go_on" ]; then
    words=(train "$recipe" --resume "$run")
else
    words=(train "$recipe" --config "$here/config.yml" --run "$run")
fi
words+=(--steps "$steps"@@{extra} "$@")

# One process for each GPU. The launcher takes --run for its own --run-path unless -- ends its options.
launch=("$python" -m medlab)
if [ $((gpus * nodes)) -gt 1 ]; then
    rank=${SLURM_NODEID:-${PET_NODE_RANK:-${JOB_COMPLETION_INDEX:-${RANK:-0}}}}
    head=${HEAD_NODE:-${PET_MASTER_ADDR:-${MASTER_ADDR:-localhost}}}
    host=false
    [ "$rank" != 0 ] || host=true
    launch=("$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$gpus" --max-restarts 0
        --rdzv-backend c10d --rdzv-endpoint "$head:${HEAD_PORT:-29400}" --rdzv-conf "is_host=$host"
        --rdzv-id "${SLURM_JOB_ID:-medlab}" -m -- medlab)
fi

# A signal may reach every process of the job, and a second one interrupts training without saving: so only this shell
# listens to USR1, and it asks once.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
asked=
(
    trap '' USR1
    exec "${launch[@]}" "${words[@]}"
) &
process=$!
trap 'asked=${asked:-USR1}; kill -TERM "$process" 2>/dev/null || true' USR1
trap 'asked=${asked:-TERM}; kill -TERM "$process" 2>/dev/null || true' TERM
trap : INT
status=0
wait "$process" || status=$?
while kill -0 "$process" 2>/dev/null; do
    status=0
    wait "$process" || status=$?
done
case $asked in
    USR1) exit 0 ;; # Slurm ends all nodes where one fails, and others may be saving still
    TERM) exit 143 ;;
esac
exit "$status"

#!/usr/bin/env bash
#SBATCH --job-name=@@{job}
#SBATCH --nodes=@@{nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@@{gpus}
#SBATCH --cpus-per-task=@@{cpus}
#SBATCH --mem=@@{memory}
#SBATCH --time=@@{time}
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@@{job}-%j.log@@{place}
# shellcheck disable=SC2016  # a path may hold a $
set -euo pipefail

folder=@@{folder}
@@{asks}
GO_ON=@@{go_on}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HEAD_PORT=$((20000 + SLURM_JOB_ID % 10000))
export GO_ON HEAD_NODE HEAD_PORT

# 120 s before the time is over this shell is told, and asks the nodes to save. So does Slurm itself, by TERM, where a
# more urgent job takes them and is content to wait.
trap 'scancel --signal=USR1 "$SLURM_JOB_ID.0" || true' USR1
srun --cpus-per-task=@@{cpus} --kill-on-bad-exit=1 bash "$folder/train.sh" &
process=$!
while wait "$process" || true; kill -0 "$process" 2>/dev/null; do :; done
status=0
wait "$process" || status=$?

# What was saved goes on when it is its turn; after scancel this shell is gone as well.
if [ "$status" = 0 ] && ! is ended "$steps"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

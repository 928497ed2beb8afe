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
run=@@{run}
GO_ON=$([ ! -e "$run/run.db" ] || echo yes)
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HEAD_PORT=$((20000 + SLURM_JOB_ID % 20000))
export GO_ON HEAD_NODE HEAD_PORT

# 120 s before the time is over this shell is told; it asks the nodes to save, and queues the job again.
again=
trap 'again=yes; scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1
srun --cpus-per-task=@@{cpus} --kill-on-bad-exit=1 bash "$folder/train.sh" &
process=$!
status=0
wait "$process" || status=$?
while kill -0 "$process" 2>/dev/null; do
    status=0
    wait "$process" || status=$?
done
if [ -n "$again" ] && [ "$status" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

#!/bin/bash
# One job of a run, rendered by `llama-train submit`: it goes on from the newest checkpoint and is safe to start again.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{processes_per_node}}
#SBATCH --time={{time}}
#SBATCH --chdir={{folder}}
#SBATCH --output={{log}}
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{{signal_before}}
{{options}}

# A later job of a chain has nothing to do when an earlier one has finished the run.
if [ "${1:-1}" -gt 1 ] && grep -qs '"state": "finished"' {{outcome}}; then
  echo "the run has finished"
  exit 0
fi

# Shortly before the time limit Slurm signals this shell. The run is told, saves, and ends with status 0.
limit=no
ask_to_stop() {
  limit=yes
  scancel --signal=USR1 "$SLURM_JOB_ID" # to the processes of the job's steps, not to this shell
}
trap ask_to_stop USR1

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi # srun does not inherit it

# Every process is a task of Slurm's own. Under torchrun it would not be, and would never see the signal: where Slurm
# tracks processes by cgroups, it signals tasks and not what they have started. A process that is not ready for the
# signal yet ignores it.
start='trap "" USR1
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE={{processes}} LOCAL_WORLD_SIZE={{processes_per_node}}
exec "$@"'
srun --kill-on-bad-exit=1 bash -c "$start" job {{command}} &
step=$!
status=129
while [ "$status" -gt 128 ]; do # a signal ends the wait, not the step
  wait "$step"
  status=$?
done

if [ "$limit" = yes ] && [ "$status" = 0 ] && [ {{requeue}} = yes ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

#!/bin/bash
# One job of a run, rendered by `llama-train submit`: it goes on from the newest checkpoint and is safe to start again.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node=1
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

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
# torchrun itself must not mind the signal that is meant for the processes it has started.
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1; exec "$@"' job {{command}} &
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

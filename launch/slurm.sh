#!/usr/bin/env bash
# A run under SLURM, one process a host with all of its GPUs. From the checkout, which all hosts see:
#
#   sbatch --nodes=16 launch/slurm.sh --config=my_config.py --workdir=/data/run
#   sbatch --nodes=2 --gpus-per-node=0 --export=ALL,PLATFORM=cpu launch/slurm.sh ...
#   scancel --signal=USR1 JOB          a profiler trace of the next steps
#   scancel --signal=TERM JOB          save, then end; the job is not queued again
#
# What ends a job that is not done queues it again, and the run goes on from its newest checkpoint:
# a host that fails (SLURM does it: --requeue), a preemption that asks before (likewise), and the
# time limit: five minutes before it the run saves and stops.
#SBATCH --job-name=moejax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=moejax-%j.log
#SBATCH --signal=B:USR2@300
set -uo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
# SLURM runs a copy of this file, so the checkout is where sbatch was called.
root="${MOEJAX_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [ ! -x "$root/launch/host.sh" ]; then
  echo "launch: $root is no checkout. Call sbatch there, or set MOEJAX_ROOT to it." >&2
  exit 2
fi

again=no
# shellcheck disable=SC2329  # the trap calls it
stop_and_queue_again() {
  again=yes
  echo "launch: the time is nearly up: saving, to go on in a new run of job $SLURM_JOB_ID" >&2
  scancel --signal=TERM "$SLURM_JOB_ID" # its tasks; without --batch not this script
}
trap stop_and_queue_again USR2

# A task that fails ends the others, which would wait for it. --cpu-bind=none: a task that asks for
# no number of CPUs would be bound to one, and the host prepares batches.
srun --kill-on-bad-exit=1 --cpu-bind=none --label \
  "$root/launch/host.sh" "${PLATFORM:-gpu}" "$@" &
job=$!
# A trap ends `wait` before its process has ended.
while true; do
  wait "$job"
  code=$?
  kill -0 "$job" 2>/dev/null || break
done
if [ "$again" = yes ]; then
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"

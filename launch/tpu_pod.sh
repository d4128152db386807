#!/usr/bin/env bash
# A run on all hosts of a Cloud TPU (one slice, or several of a queued resource), from any machine
# with gcloud. The checkout with its .venv is in every host's home folder, and the workdir in a file
# system that all of them have mounted (Filestore, or a bucket by gcsfuse).
#
#   TPU=my-tpu ZONE=us-east5-a ./launch/tpu_pod.sh --config=my_config.py --workdir=/mnt/run
#
#   TPU        name of the TPU (of a queued resource: of each of its nodes, with commas)
#   ZONE       where it is
#   CHECKOUT   folder on the hosts, seen from the home folder (default: moejax)
#
# Ctrl-C ends gcloud and leaves the run alone; `pkill -TERM -f cli.main` over the same command line
# of gcloud saves and ends it.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
: "${TPU:?set TPU to the name of the TPU}" "${ZONE:?set ZONE to where the TPU is}"

# On every host one process, with all of its chips; which one it is the machine's metadata tells.
printf -v command '%q ' "${CHECKOUT:-moejax}/launch/host.sh" tpu "$@"
pids=()
IFS=, read -ra names <<<"$TPU"
for name in "${names[@]}"; do
  gcloud compute tpus tpu-vm ssh "$name" --zone="$ZONE" --worker=all --command="$command" &
  pids+=("$!")
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"

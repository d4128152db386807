#!/usr/bin/env bash
# One host's process of a run on several: sets what its platform needs, then `moejax train`, which
# finds the others by itself. The scripts beside this one, and the container, start it everywhere.
#
#   ./launch/host.sh gpu|tpu|cpu --config=my_config.py --workdir=/data/run
#   MOEJAX=/path/to/moejax ./launch/host.sh ...      the command, where it is neither in .venv nor on
#                                                    the PATH
#
# Options of the compiler are none of this: `moejax train` gives them with each compilation, by
# train.prefetch (moejax/train/xla_flags.py). Here stands what is read once, before it runs; a value
# that is set already stays.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
platform="${1:-}"
shift || true

default() { [ -n "${!1:-}" ] || export "$1=$2"; }

case "$platform" in
  gpu)
    # A host whose GPUs do not start must end the run, not join it with its CPUs.
    default JAX_PLATFORMS cuda,cpu
    # XLA takes three quarters of a GPU unless told; the step's plan counts on more. NCCL's buffers
    # and the CUDA context live in the rest.
    default XLA_PYTHON_CLIENT_MEM_FRACTION 0.92
    # One line for what NCCL cannot do, instead of none.
    default NCCL_DEBUG WARN
    ;;
  tpu)
    # As above: libtpu that finds no chips must end the run.
    default JAX_PLATFORMS tpu,cpu
    # Without huge pages the TPU runtime starts and ends slowly (v5e and newer); root may set them.
    pages=/sys/kernel/mm/transparent_hugepage/enabled
    if [ -w "$pages" ]; then echo always >"$pages" || true; fi
    ;;
  cpu)
    default JAX_PLATFORMS cpu
    ;;
  *)
    echo "launch: the first argument is the platform, gpu, tpu or cpu; '$platform' was given." >&2
    exit 2
    ;;
esac

moejax="${MOEJAX:-$root/.venv/bin/moejax}"
if [ -z "${MOEJAX:-}" ] && [ ! -x "$moejax" ]; then moejax=moejax; fi
command -v "$moejax" >/dev/null || {
  echo "launch: no $moejax on $(uname -n). Install the package there, or set MOEJAX to its path." >&2
  exit 2
}
# SIGUSR1 asks a run for a profiler trace; one that comes while it still starts must not end it.
trap '' USR1
exec "$moejax" train --multihost "$@"

#!/usr/bin/env bash
# Trains the tiny configuration on eight simulated CPU devices; called again, it resumes the run.
#
#   ./launch/quickstart.sh                                   the run in runs/tiny
#   ./launch/quickstart.sh --workdir=runs/mine --config.train.num_steps=50
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

make_environment

# Flags of the user stay, and a device count among them wins.
devices="--xla_force_host_platform_device_count"
case "${XLA_FLAGS:-}" in
  *"$devices"*) ;;
  *) export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }$devices=8" ;;
esac
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

exec "$BIN/moejax" train --config="$(in_checkout configs/tiny.py)" \
  --workdir="$(in_checkout runs/tiny)" "$@"

#!/usr/bin/env bash
# Lint, type check and tests; with arguments only pytest, which gets them.
#
#   ./launch/test.sh                          everything but the slow and the GPU tests
#   ./launch/test.sh -m slow                  the slow ones
#   ./launch/test.sh tests/kernels -k kda     some
#   PYTHON=python3.12 ./launch/test.sh        with another Python
#   ./launch/test.sh aot                      compiles for GPUs and TPUs that are not here, in an
#                                             environment of its own (1.4 GB more): the tests marked
#                                             aot, then every kernel, whose table is
#                                             pallas_kernels/GATES.md; further arguments go to
#                                             python -m moejax.planner.kernel_gate
#   ./launch/test.sh aot --quick              of these the marked kernels, for an H200 and a v5p, and
#                                             no tests: two minutes, a part of CI
#   ./launch/test.sh slurm                    submits launch/slurm.sh to a SLURM of this machine, in
#                                             a folder of its own; installs Debian's packages where
#                                             they are missing (root)
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Chips whose kernels must compile, and chips that are told of.
gate() {
  export JAX_PLATFORMS=cpu
  if [ "$*" = --quick ]; then
    say "the marked kernels at their real sizes"
    "$BIN/python" -m moejax.planner.kernel_gate --chips=h200,v5p --quick || failed+=(kernels)
    return
  fi
  say "pytest -m aot"
  "$BIN/python" -m pytest -q -m aot || failed+=(pytest)
  say "every kernel at its real sizes, up to 20 minutes"
  local options=("--chips=h200,v5p" "--also=b200,v6e,tpu7x")
  [ "$#" -gt 0 ] || options+=(--markdown=pallas_kernels/GATES.md)
  local code=0
  "$BIN/python" -m moejax.planner.kernel_gate "${options[@]}" "$@" || code=$?
  [ "$code" -ne 2 ] || exit 2
  [ "$code" -eq 0 ] || failed+=(kernels)
}

# SLURM's daemons and commands.
install_slurm() {
  local missing=() program
  for program in munged slurmctld slurmd sbatch; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || missing+=("$program")
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  local packages="munge slurmctld slurmd slurm-client"
  command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ] ||
    die "${missing[*]} missing: install them, on Debian by root: apt-get install $packages"
  say "installing $packages"
  # shellcheck disable=SC2086  # words
  { apt-get update && apt-get install --yes --no-install-recommends $packages; } >/dev/null ||
    die "apt-get could not install $packages"
}

if [ "${1:-}" = slurm ]; then
  install_slurm
  set -- -m slurm tests/cluster "${@:2}"
fi
if [ "${1:-}" = aot ]; then
  export EXTRAS="dev,aot" MOEJAX_VENV="${MOEJAX_VENV:-$ROOT/.venv-aot}"
fi
make_environment
cd "$ROOT"

# One failing check does not hide what the others have to say.
failed=()
if [ "${1:-}" = aot ]; then
  gate "${@:2}"
  [ "${#failed[@]}" -eq 0 ] || die "failed: ${failed[*]}"
  exit
fi
if [ "$#" -eq 0 ]; then
  say "ruff"
  "$BIN/ruff" check --quiet . || failed+=(ruff)
  say "mypy"
  "$BIN/mypy" || failed+=(mypy)
fi
say "pytest"
# A whole run shares its files among a few processes: one alone leaves a core idle between compilations.
if [ "$#" -eq 0 ]; then
  cores="$(nproc 2>/dev/null || echo 2)"
  set -- -n "$((cores < 4 ? cores : 4))" --no-loadscope-reorder
fi
"$BIN/python" -m pytest -q "$@" || failed+=(pytest)

[ "${#failed[@]}" -eq 0 ] || die "failed: ${failed[*]}"

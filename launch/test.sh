#!/usr/bin/env bash
# Lint, type check and tests; with arguments only pytest, which gets them.
#
#   ./launch/test.sh                          everything but the slow and the GPU tests
#   ./launch/test.sh -m slow                  the slow ones
#   ./launch/test.sh tests/kernels -k kda     some
#   PYTHON=python3.12 ./launch/test.sh        with another Python
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

make_environment
cd "$ROOT"

# One failing check does not hide what the others have to say.
failed=()
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
  set -- -n "$((cores < 4 ? cores : 4))" --dist loadgroup
fi
"$BIN/python" -m pytest -q "$@" || failed+=(pytest)

[ "${#failed[@]}" -eq 0 ] || die "failed: ${failed[*]}"

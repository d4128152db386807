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

if [ "$#" -eq 0 ]; then
  say "ruff"
  "$BIN/ruff" check .
  say "mypy"
  "$BIN/mypy"
fi
say "pytest"
exec "$BIN/python" -m pytest -q "$@"

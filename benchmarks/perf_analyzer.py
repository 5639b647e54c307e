"""python -m benchmarks.perf_analyzer BINARY [--duration S]: NVIDIA's perf_analyzer, unchanged, before a gateway.

BINARY is `*.data/data/bin/perf_analyzer` of the wheel tritonclient==2.50.0. It needs libb64.so.0d (Debian's libb64-0d)
and libcudart.so.12 (the package nvidia-cuda-runtime-cu12) in a folder that LD_LIBRARY_PATH names.

Each line is a case at a concurrency: inferences/s, and the p50 and p95 latency in ms; of a stream of generate, until
its first answer. A case that fails prints what the program printed, and the exit code is 1.
"""

import argparse
import contextlib
import csv
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet import Fleet

EMBED, INFER, GENERATE = "all-MiniLM-L6-v2", "scale", "tiny"
TEXT = "A cat sat on the mat."
PROMPTS = {"data": [{"text_input": [TEXT], "sampling_parameters": ['{"max_tokens": 8}']}]}
# Windows that are tried until three in a row differ by at most so much from their mean. The program's default is 10 %.
TRIALS, VARIATION_PERCENT = 10, 100
LOAD_S, CASE_S = 120.0, 300.0
_SCALE = ("-m", INFER, "--shape", "x:1,3", "--shape", "counts:1,1")
_EMBED = ("-m", EMBED, "--shape", "text:1", "--string-data", TEXT)
_LEVELS = ("--concurrency-range", "1:64:21")
_FEW = ("--concurrency-range", "1:4:3")
_MEMORY = ("--shared-memory", "system")
CASES: dict[str, tuple[str, ...]] = {
    "infer grpc": ("-i", "grpc", *_SCALE, *_LEVELS),
    "infer http": ("-i", "http", *_SCALE, *_LEVELS),
    "infer grpc, shared memory": ("-i", "grpc", *_SCALE, *_LEVELS, *_MEMORY),
    "infer http, shared memory": ("-i", "http", *_SCALE, *_FEW, *_MEMORY),
    "infer stream": ("-i", "grpc", *_SCALE, *_FEW, "--streaming"),
    "embed grpc": ("-i", "grpc", *_EMBED, *_FEW),
    "embed http": ("-i", "http", *_EMBED, *_FEW),
    "generate stream": ("-i", "grpc", "-m", GENERATE, *_FEW, "--streaming", "--async"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the program's table. Latencies in ms."""

    concurrency: int
    rate: float
    p50: float
    p95: float


class CaseFailedError(Exception):
    """The program ended with an error or without a table. The text is its output."""


class Bench:
    """The program before a gateway. Files are in `folder`."""

    def __init__(self, binary: str, http: str, grpc: str, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        self._addresses = {"http": http, "grpc": grpc}
        self._prompts = folder / "prompts.json"
        self._prompts.write_text(json.dumps(PROMPTS))

    def load(self) -> None:
        """Returns when the models are loaded: the program asks for their tensors first."""
        for model in (EMBED, INFER, GENERATE):
            url = f"http://{self._addresses['http']}/v2/repository/models/{model}/load"
            urllib.request.urlopen(url, data=b"", timeout=LOAD_S).close()

    def run(self, case: str, duration_s: float) -> list[Row]:
        """The table of a case, by concurrency. Windows take `duration_s` seconds. CaseFailedError: there is none."""
        flags, table = CASES[case], self._folder / "table.csv"
        table.unlink(missing_ok=True)
        argv = [self._binary, *flags, "-u", self._addresses[flags[1]], "-f", str(table)]
        argv += ["-p", str(int(1000 * duration_s)), "--max-trials", str(TRIALS), "-s", str(VARIATION_PERCENT)]
        argv += ["--collect-metrics", "--metrics-url", f"http://{self._addresses['http']}/metrics"]
        if GENERATE in flags:  # else it makes up the optional inputs, too
            argv += ["--input-data", str(self._prompts)]
        printed = self._folder / "printed"
        with printed.open("wb") as file:
            try:
                code = subprocess.run(argv, stdout=file, stderr=file, timeout=CASE_S, check=False).returncode
            except subprocess.TimeoutExpired:
                raise CaseFailedError(f"no end after {CASE_S:.0f} s:\n{printed.read_text()}") from None
        if code or not table.exists():
            raise CaseFailedError(f"exit code {code}:\n{printed.read_text()}")
        with table.open() as lines:
            return sorted((_row(line) for line in csv.DictReader(lines)), key=lambda row: row.concurrency)


def _row(line: dict[str, str]) -> Row:
    p50, p95 = (float(line[f"{name} latency"]) / 1000 for name in ("p50", "p95"))
    return Row(int(line["Concurrency"]), float(line["Inferences/Second"]), p50, p95)


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

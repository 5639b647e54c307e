"""The cases that perf_analyzer runs before a gateway, and a run of it."""

import csv
import json
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

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

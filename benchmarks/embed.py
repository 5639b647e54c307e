"""embed: real sentences by a real model on two CPU workers of one thread, against the best baseline of transformers.

The baseline sorts all sentences by length, cuts them into batches, and pools and normalises with torch: at its best
batch size, in two processes of one thread or in one of two, whichever is faster. All embed the same sentences.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from multigpu import AsyncClient

from benchmarks.engines.embed_engine import sentences
from benchmarks.fleet import Fleet
from benchmarks.measure import median
from benchmarks.relay import loop_runner

N = 2000
BASELINE_BATCHES = (8, 16, 32, 64)
# Processes, and threads of each.
PLAIN_SHAPES = ((2, 1), (1, 2))
Row = dict[str, Any]
# By the clock, and of CPU time of all processes.
Seconds = tuple[float, float]

# Arguments: threads, which share of the sentences, of how many shares, how many sentences, where the vectors go, then
# batch sizes. For each size it says "ready", waits for a line, and says when it ended.
_PLAIN = """
import sys, time
import numpy as np, torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from benchmarks.engines.embed_engine import sentences
from multigpu_worker.repository.folders import packaged_model

threads, share, shares, n = map(int, sys.argv[1:5])
path, batches = sys.argv[5], [int(b) for b in sys.argv[6:]]
torch.set_num_threads(threads)
folder = packaged_model()
tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=256)
model = AutoModel.from_pretrained(folder).eval()
texts = sentences(n)[share::shares]

@torch.inference_mode()
def embed(texts, batch):
    lengths = [len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    order = np.argsort(lengths)
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        inputs = tokenizer([texts[i] for i in rows], truncation=True, padding=True, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        tokens = model(**inputs).last_hidden_state
        vectors[rows] = normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1).numpy()
    return vectors

embed(texts[:256], 32)
for batch in batches:
    print("ready", flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    vectors = embed(texts, batch)
    print(time.perf_counter(), time.process_time() - cpu, flush=True)
np.save(path, vectors)
"""


def baseline(processes: int, threads: int) -> tuple[dict[int, Seconds], Any]:
    """Seconds of the baseline for each batch size, from the word to begin to the last end; and the vectors."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    environment |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.npy" for i in range(processes)]
        running = [
            subprocess.Popen(
                [sys.executable, "-c", _PLAIN, *map(str, (threads, i, processes, N, path, *BASELINE_BATCHES))],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for i, path in enumerate(paths)
        ]  # fmt: skip
        for batch in BASELINE_BATCHES:
            for process in running:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            start = time.perf_counter()
            for process in running:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            # perf_counter is CLOCK_MONOTONIC: the same in all processes.
            ends = [process.stdout.readline().split() for process in running if process.stdout]
            seconds[batch] = max(float(end) for end, _ in ends) - start, sum(float(cpu) for _, cpu in ends)
        for process in running:
            process.communicate()
        vectors = np.empty((N, np.load(paths[0]).shape[1]), np.float32)
        for i, path in enumerate(paths):
            vectors[i::processes] = np.load(path)
    return seconds, vectors


async def ours(fleet: Fleet, texts: list[str], how: str) -> tuple[Seconds, Any]:
    """Seconds, and the vectors."""
    async with AsyncClient(fleet.address) as client:
        # Both workers have the model, and torch has seen all lengths.
        await client.embed(texts[:256])
        before, start = sum(fleet.cpu().values()), time.perf_counter()
        if how == "in chunks":
            vectors = await client.embed(texts)
        else:
            todo, found = iter(enumerate(texts)), {}

            async def caller() -> None:
                for i, text in todo:
                    found[i] = await client.embed([text])

            await asyncio.gather(*(caller() for _ in range(64)))
            vectors = np.concatenate([found[i] for i in range(len(texts))])
        return (time.perf_counter() - start, sum(fleet.cpu().values()) - before), vectors


def bench_embed(rounds: int) -> list[Row]:
    texts = sentences(N)
    assert len(texts) == N
    limit: dict[tuple[int, int, int], list[Seconds]] = {}
    taken: dict[str, list[Seconds]] = {}
    off = 0.0
    for _ in range(rounds):
        for shape in PLAIN_SHAPES:
            found, expected = baseline(*shape)
            for batch, seconds in found.items():
                limit.setdefault((*shape, batch), []).append(seconds)
        with Fleet() as fleet:
            for how in ("in chunks", "one by one, 64 callers"):
                seconds, vectors = loop_runner("uvloop")(ours(fleet, texts, how))
                taken.setdefault(how, []).append(seconds)
                off = max(off, float(np.abs(vectors - expected).max()))
    (processes, threads, batch), best_s = min(((each, medians(s)[0]) for each, s in limit.items()), key=lambda x: x[1])
    cpu_s = min(medians(each)[1] for each in limit.values())
    rows: list[Row] = [
        {
            "benchmark": "embed",
            "subject": f"baseline, {processes} x {threads} threads, batch {batch}",
            "sentences/s": f"{N / best_s:.0f}",
            "ms CPU a sentence": f"{1e3 * cpu_s / N:.2f} at the best batch for that",
        }
    ]
    for how, each in taken.items():
        s, cpu = medians(each)
        rows.append(
            {
                "benchmark": "embed",
                "subject": f"multigpu, {how}",
                "sentences/s": f"{N / s:.0f}",
                "of the baseline": f"{best_s / s:.2f}",
                # On a busy machine this tells more.
                "ms CPU a sentence": f"{1e3 * cpu / N:.2f}, client and master counted",
                "by CPU time": f"{cpu_s / cpu:.2f}",
                "largest difference": f"{off:.1e}",
            }
        )
    return rows


def medians(taken: list[Seconds]) -> Seconds:
    return median([clock for clock, _ in taken]), median([cpu for _, cpu in taken])

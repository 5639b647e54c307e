"""The embed engine against the best baseline: sentence-transformers' `encode`, in the same process, in turns.

    python benchmarks/engines/embed_engine.py [--threads 1] [--rounds 5] [--sentences 1000]

Every round has other sentences, so preparation for new shapes counts. CPU time is compared, which other load disturbs
less than the clock; sentences per second of the clock are shown too. A ratio is the baseline's CPU time at its best
batch size divided by the engine's, round by round; the figure is the median. The engine gets 256 tasks to a batch, as
from a worker, and sorts each batch; `encode` sorts all sentences at once.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from multigpu.cli.bench.sentences import sentences as sentences  # noqa: PLC0414  (other benchmarks have it from here)
from multigpu.v1 import embed_pb2
from multigpu_worker.engines.base import Batch, EmbeddingCacheSettings, EngineSettings, Item
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model
from multigpu_worker.repository.model import ModelSpec

BATCH_TASKS = 256
BASELINE_BATCHES = (16, 32, 64)


def engine_settings(folder: Path, threads: int, cache: EmbeddingCacheSettings | None = None) -> EngineSettings:
    """Those of an engine on the CPU with the model in `folder`."""
    specs = {PACKAGED_MODEL: ModelSpec(name=PACKAGED_MODEL, folder=folder)}
    cache = cache or EmbeddingCacheSettings()
    return EngineSettings(device="cpu", slots=1, threads=threads, models=specs, embedding_cache=cache)


class Collector:
    """The reporter's end of the engine: keeps results."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}

    def begin(self, item: Item) -> None:
        raise NotImplementedError

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        del content_type
        self.results[item.lease_id] = result

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        raise RuntimeError(f"{item.lease_id}: {error_type}: {message} {retryable} {traceback}")

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        raise NotImplementedError

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        raise NotImplementedError

    def log(self, item: Item, text: str) -> None:
        raise NotImplementedError

    def checkpoint(self, item: Item, data: bytes) -> None:
        raise NotImplementedError

    def cancelled(self, item: Item) -> bool:
        del item
        return False

    def beat(self) -> None:
        pass


def engine_encode(engine: EmbedEngine, texts: list[str], per_task: int) -> npt.NDArray[np.float32]:
    payloads = [
        embed_pb2.EmbedPayload(texts=texts[i : i + per_task]).SerializeToString()
        for i in range(0, len(texts), per_task)
    ]
    items = [Item(i, i, 1, payload, 1, b"", 0) for i, payload in enumerate(payloads)]
    collector = Collector()
    tasks = max(1, BATCH_TASKS // per_task)
    for start in range(0, len(items), tasks):
        batch = Batch("embed", "", {}, "", items[start : start + tasks])
        engine.run(batch, engine.prepare(batch), collector)
    results = [embed_pb2.EmbedResult.FromString(collector.results[i]) for i in range(len(items))]
    return np.concatenate([np.frombuffer(r.values, "<f4").reshape(-1, r.dimension) for r in results])


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """CPU and clock seconds of a call."""
    cpu, clock = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"

    folder = packaged_model()
    assert folder is not None, "install multigpu[minilm]"
    texts = sentences(options.sentences * options.rounds)
    assert len(texts) == options.sentences * options.rounds, f"only {len(texts)} sentences: ask for fewer, or rounds"
    engine = EmbedEngine(engine_settings(folder, options.threads))
    cpu, clock = timed(engine.load)
    print(f"load, with torch and transformers imported: {cpu:.2f} s CPU, {clock:.2f} s")

    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    baseline = SentenceTransformer(str(folder), device="cpu")
    subjects: dict[str, Callable[[list[str]], object]] = {
        f"encode, batches of {n}": partial(baseline.encode, batch_size=n, show_progress_bar=False)
        for n in BASELINE_BATCHES
    }
    subjects["engine, 1 text a task"] = partial(engine_encode, engine, per_task=1)
    subjects["engine, 32 texts a task"] = partial(engine_encode, engine, per_task=32)
    difference = np.abs(np.asarray(baseline.encode(texts[:100])) - engine_encode(engine, texts[:100], 1)).max()
    print(f"{options.threads} thread(s); the largest difference of a component is {difference:.1e}")

    rounds = []
    for i in range(options.rounds):
        part = texts[i * options.sentences : (i + 1) * options.sentences]
        rounds.append({name: timed(partial(run, part)) for name, run in subjects.items()})
    best = [min(r[f"encode, batches of {n}"][0] for n in BASELINE_BATCHES) for r in rounds]
    for name in subjects:
        cpu, clock = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
        ratio = statistics.median(b / r[name][0] for b, r in zip(best, rounds, strict=True))
        print(
            f"{name:24} {1e3 * cpu / options.sentences:6.3f} ms CPU a sentence, "
            f"{options.sentences / clock:6.0f} sentences/s, {ratio:5.2f} times the best baseline"
        )


if __name__ == "__main__":
    main()

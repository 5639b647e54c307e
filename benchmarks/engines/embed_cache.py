"""What the embedding cache costs if no text repeats, and saves if all do: without and with a cache, in turns.

    python -m benchmarks.engines.embed_cache [--threads 1] [--rounds 5] [--sentences 1000]

Every round has other sentences. The CPU time of all threads is compared, which other load disturbs less than the clock.
"new" texts are computed, cached and written to the file; "known to memory" are the same again, and "known to the file"
the same again by an engine that has just started. A ratio is the CPU time of the engine without a cache in the same
round, divided by that with; the figure is the median.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.repository.folders import packaged_model

from benchmarks.engines.embed_engine import engine_encode, engine_settings, sentences, timed


def loaded(folder: Path, threads: int, settings: EmbeddingCacheSettings | None) -> EmbedEngine:
    engine = EmbedEngine(engine_settings(folder, threads, settings))
    engine.load()
    return engine


def check(engine: EmbedEngine, *, hits: int) -> None:
    counts = engine.cache_counts()
    assert counts is not None
    assert counts.hits == hits, f"{hits} texts were known, and there were {counts.hits} hits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    folder = packaged_model()
    assert folder is not None, "install multigpu[minilm]"
    texts = sentences(options.sentences * options.rounds)
    assert len(texts) == options.sentences * options.rounds, f"only {len(texts)} sentences: ask for fewer, or rounds"

    rounds = []
    with tempfile.TemporaryDirectory() as place:
        settings = EmbeddingCacheSettings(entries=100_000, file=str(Path(place) / "cache.db"))
        without = loaded(folder, options.threads, None)
        for i in range(options.rounds):
            part = texts[i * options.sentences : (i + 1) * options.sentences]
            row, cached = {}, loaded(folder, options.threads, settings)
            # Who comes second finds the processor warm: each does in turn.
            pair = [("without a cache", without), ("new", cached)]
            for name, engine in pair if i % 2 else reversed(pair):
                row[name] = timed(partial(engine_encode, engine, part, 1))
            row["known to memory"] = timed(partial(engine_encode, cached, part, 1))
            remembered = engine_encode(cached, part, 1)
            check(cached, hits=2 * len(part))
            cached.close()  # when all is written
            cached = loaded(folder, options.threads, settings)
            row["known to the file"] = timed(partial(engine_encode, cached, part, 1))
            assert np.array_equal(engine_encode(cached, part, 1), remembered)
            check(cached, hits=2 * len(part))
            cached.close()
            rounds.append(row)
    for name in ("without a cache", "new", "known to memory", "known to the file"):
        cpu, clock = (statistics.median(row[name][i] for row in rounds) for i in (0, 1))
        ratio = statistics.median(row["without a cache"][0] / row[name][0] for row in rounds)
        print(
            f"{name:18} {1e6 * cpu / options.sentences:8.1f} us CPU a sentence, {options.sentences / clock:8.0f} "
            f"sentences/s, {ratio:6.2f} times as fast as without"
        )


if __name__ == "__main__":
    main()

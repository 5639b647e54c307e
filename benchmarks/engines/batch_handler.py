"""python -m benchmarks.engines.batch_handler [--rounds N]: a batching handler, and the same model in a plain loop.

Both embed the same sentences with MiniLM in batches of 32, with one thread, in short bursts in turns: the handler
through a fleet with one worker, the loop in a process of its own. Printed is the median of the bursts' ratios; the aim
is 0.9.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import multigpu
from multigpu import Client

from benchmarks.fleet import Fleet

SIZE, BATCHES = 32, 12
ROOT = Path(__file__).resolve().parents[2]


@multigpu.handler
class Embedder:
    def __init__(self) -> None:
        import torch
        from multigpu_worker.repository.folders import packaged_model
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self.model = SentenceTransformer(str(packaged_model()), device=multigpu.context().device)

    @multigpu.batch(max_size=SIZE, max_wait_ms=5)
    def __call__(self, texts: list[str]) -> list[Any]:
        return list(self.model.encode(texts, batch_size=SIZE))


def plain() -> None:
    """Answers each line, a list of texts, with the seconds that the loop took."""
    embedder = Embedder()
    for line in sys.stdin:
        texts = json.loads(line)
        start = time.perf_counter()
        for at in range(0, len(texts), SIZE):
            embedder(texts[at : at + SIZE])
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        plain()
        return
    from benchmarks.engines.embed_engine import sentences

    texts = sentences(4000)
    kind = "benchmarks.engines.batch_handler.Embedder"  # which is "__main__.Embedder" here
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.engines.batch_handler", "--plain"]
    loop = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert loop.stdin is not None
    assert loop.stdout is not None
    ratios: list[float] = []
    rates: list[float] = []
    flags = ("--handlers", "benchmarks.engines.batch_handler")
    with Fleet(1, worker_flags=flags) as fleet, Client(fleet.address) as client:
        for number in range(arguments.rounds + 2):
            burst = random.sample(texts, SIZE * BATCHES)
            taken: dict[str, float] = {}
            for who in random.sample(["loop", "handler"], 2):
                if who == "loop":
                    loop.stdin.write(json.dumps(burst) + "\n")
                    loop.stdin.flush()
                    taken[who] = float(loop.stdout.readline())
                    continue
                start = time.perf_counter()
                vectors = list(client.map(kind, burst))
                taken[who] = time.perf_counter() - start
                assert len(vectors) == len(burst)
            if number >= 2:
                ratios.append(taken["loop"] / taken["handler"])
                rates.append(len(burst) / taken["handler"])
    loop.communicate()
    row = {"of the plain loop": round(statistics.median(ratios), 3), "sentences/s": round(statistics.median(rates))}
    print(json.dumps({**row, "least": round(min(ratios), 3), "batch": SIZE, "bursts": len(ratios)}))


if __name__ == "__main__":
    main()

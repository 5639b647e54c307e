"""Accuracy of vectors through a whole fleet: Spearman on STS-B and SICK-R for each engine and precision.

    python -m benchmarks.engines.accuracy [--rows torch:fp32,torch:bf16,torch:fp16] [--repository DIR] [--model NAME]

Two workers on the CPU, started with the row's `--engine` and `--precision`; every row embeds the same sentences by
`client.embed`. The model's model.toml must name neither. The score is Spearman's correlation of cosines with people's
scores, times 100: MTEB's main score of both tasks. MTEB's results for all-MiniLM-L6-v2 are 82.03 (STS-B test) and 77.58
(SICK-R). MGPU_SHARED_DATA names the folder with `stsb/sts-test.csv` and `sick/SICK_*.txt`, which are not part of this
repository.

int8 and fp8 need a model with calibration data that passes its accuracy gate; rejected rows show the reason.
"""

import argparse
import asyncio
import csv
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from multigpu import AsyncClient
from multigpu.outcome import TaskError

from benchmarks.fleet import Fleet
from benchmarks.measure import table

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
Pairs = list[tuple[str, str, float]]


def read_pairs(data: Path) -> dict[str, Pairs]:
    """Pairs of sentences with their human similarity scores, by the name of the task."""
    with (data / "stsb" / "sts-test.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    stsb = [(row[5], row[6], float(row[4])) for row in rows]
    sick = []
    for path in sorted((data / "sick").glob("SICK_*.txt")):
        for line in path.read_text("utf-8").splitlines():
            _, left, right, score, _ = line.split("\t")
            sick.append((left, right, float(score)))
    assert (len(stsb), len(sick)) == (1379, 9927), (len(stsb), len(sick))
    return {"STS-B": stsb, "SICK-R": sick}


def spearman(pairs: Pairs, vectors: dict[str, Any]) -> float:
    from scipy.stats import spearmanr

    left = np.stack([vectors[pair[0]] for pair in pairs])
    right = np.stack([vectors[pair[1]] for pair in pairs])
    cosines = (left * right).sum(axis=1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    return 100 * float(spearmanr(cosines, [pair[2] for pair in pairs]).statistic)


async def score(address: str, model: str, tasks: dict[str, Pairs]) -> dict[str, Any]:
    """One row of the table, without its names."""
    texts = list(dict.fromkeys(text for pairs in tasks.values() for pair in pairs for text in pair[:2]))
    async with AsyncClient(address) as client:
        try:
            start = time.perf_counter()
            await client.embed(texts[:64], model=model)
            loaded = time.perf_counter()
            found = await client.embed(texts, model=model)
        except TaskError as error:
            return {"remark": str(error).splitlines()[0]}
        seconds = time.perf_counter() - loaded
    vectors = dict(zip(texts, found, strict=True))
    row = {f"{name}, {len(pairs)} pairs": f"{spearman(pairs, vectors):.2f}" for name, pairs in tasks.items()}
    return row | {"sentences/s": f"{len(texts) / seconds:.0f}", "first answer after s": f"{loaded - start:.1f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="torch:fp32,torch:bf16,torch:fp16", help="ENGINE:PRECISION,…")
    parser.add_argument("--repository", default="", help="folder of models for the workers")
    parser.add_argument("--model", default="", help="default: the workers' own")
    parser.add_argument("--tasks", default="STS-B,SICK-R")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    pairs = read_pairs(Path(os.environ.get("MGPU_SHARED_DATA", DATA)))
    tasks = {name: pairs[name] for name in options.tasks.split(",")}
    flags = ("--model-repository", options.repository) if options.repository else ()
    rows = []
    for wanted in options.rows.split(","):
        engine, _, precision = wanted.partition(":")
        # New workers for each row: models or plan builds of an earlier row must not affect it.
        row = {"engine": engine, "precision": precision}
        with Fleet(options.workers, worker_flags=(*flags, "--engine", engine, "--precision", precision)) as fleet:
            rows.append(row | asyncio.run(score(fleet.address, options.model, tasks)))
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()

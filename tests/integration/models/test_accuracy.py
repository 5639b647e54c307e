"""What the whole fleet makes of real sentences: the published accuracy of all-MiniLM-L6-v2 on the STS benchmark."""

import csv
import os
from pathlib import Path

import multigpu
import numpy as np
import pytest
from scipy.stats import spearmanr

from tests.fleet import Fleet

DATA = Path(os.environ.get("MGPU_SHARED_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
# MTEB's result for the model on STSBenchmark, test: 0.82032.
PUBLISHED = 82.03


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "stsb").is_dir(), reason=f"the STS benchmark is not at {DATA}/stsb; set MGPU_SHARED_DATA"
)
def test_the_sts_benchmark_through_client_master_and_two_workers(tmp_path: Path) -> None:
    with (DATA / "stsb" / "sts-test.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    gold = [float(row[4]) for row in rows]
    assert len(gold) == 1379
    flags = ("--threads", "1")
    with Fleet(tmp_path, worker_flags=flags) as fleet, multigpu.Client(fleet.address) as client:
        vectors = client.embed([text for row in rows for text in row[5:7]])
    assert vectors.shape == (2 * 1379, 384)
    cosine = np.sum(vectors[0::2] * vectors[1::2], axis=1)
    assert abs(100 * spearmanr(cosine, gold).statistic - PUBLISHED) < 0.02

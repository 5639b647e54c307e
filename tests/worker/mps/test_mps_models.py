"""MPS with several models: each process with a model is a client."""

from pathlib import Path

import pytest
from multigpu.v1 import task_pb2
from multigpu.v1 import worker_service_pb2 as pb

from tests.fakes.mps_host import MpsHost
from tests.worker.scripted_master import SUCCEEDED, Stream

ENGINE = """
import os, time
from multigpu_worker.engines.base import ModelEngine
from simulated_mps import Client

class Toy(ModelEngine):
    one_by_one = False

    def load(self):
        self.client = Client()
        return {}

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            self.client.work()
            if item.payload == b"stuck":
                time.sleep(3600)
            if item.payload == b"fault":
                self.client.fault()
            reporter.succeed(item, b"%d" % os.getpid())
"""


def repository(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "mps_toy.py").write_text(ENGINE)
        (folder / name / "model.toml").write_text('engine = "mps_toy:Toy"\n')
    return ("--model-repository", str(folder), "--mps-terminate-timeout-s", "60")


async def ask(stream: Stream, lease_id: int, model: str, payload: bytes = b"") -> int:
    word = await stream.run(lease_id, payload, kind="infer", model=model)
    assert word.state == SUCCEEDED, word
    return int(word.result)


@pytest.mark.slow
async def test_each_process_of_a_model_is_a_client(host: MpsHost, tmp_path: Path) -> None:
    worker = await host.worker(0, *repository(tmp_path / "models", "a", "b"))
    stream = worker.stream
    await stream.run(1, b"", kind="m.work")
    a, b = await ask(stream, 2, "a"), await ask(stream, 3, "b")
    await stream.until(lambda: stream.heartbeats[-1].mps.clients == 3)
    # One is unloaded, one is ended by force.
    stream.send(desired=pb.DesiredState(unwanted_models=["a"]))
    await stream.until(lambda: stream.heartbeats[-1].mps.clients == 2)
    spec = task_pb2.TaskSpec()
    spec.run_timeout.FromMilliseconds(300)
    word = await stream.run(4, b"stuck", kind="infer", model="b", run_timeout=spec.run_timeout)
    assert word.error.type == "RunTimeout"
    assert await ask(stream, 5, "b") != b
    stream.send(desired=pb.DesiredState())
    assert await ask(stream, 6, "a") != a
    counts = host.counts(0)
    assert (counts["violations"], counts["forced"], counts["faults"]) == ([], 0, 0)
    assert await worker.stop() == 0


@pytest.mark.slow
async def test_a_fault_of_one_model_ends_all_and_all_are_loaded_again(host: MpsHost, tmp_path: Path) -> None:
    worker = await host.worker(0, *repository(tmp_path / "models", "a", "b"))
    stream = worker.stream
    before = await ask(stream, 1, "a"), await ask(stream, 2, "b")
    await stream.run(3, b"", kind="m.work")
    base = worker.engine_pid()
    word = await stream.run(4, b"fault", kind="infer", model="a")
    assert word.state == pb.REPORT_STATE_FAILED
    assert any(r.broke_engine for batch in stream.batches for r in batch.reports)
    after = await ask(stream, 5, "a"), await ask(stream, 6, "b")
    assert not set(before) & set(after)
    assert (await stream.run(7, b"", kind="m.work")).state == SUCCEEDED
    assert worker.engine_pid() != base
    counts = host.counts(0)
    assert (counts["violations"], counts["faults"], counts["forced"]) == ([], 1, 0)

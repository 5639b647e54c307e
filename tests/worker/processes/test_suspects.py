"""Answers that are generated together, one of which ends their engine: it alone is charged, and nothing is told twice.

The engine is a toy in a real worker: its answers run at the same time, each in a slot, and go on where they were.
"""

from collections import Counter
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.conftest import Start, WorkerProcess
from tests.worker.scripted_master import SUCCEEDED, Stream

FAILED = pb.REPORT_STATE_FAILED
ENGINE = """
import os, signal, threading, time
from multigpu_worker.engines.base import ModelEngine

class Answers(ModelEngine):
    one_by_one = True

    def __init__(self, settings):
        self.running = set()
        self.stuck = threading.Event()

    def load(self):
        return {"engine": "toy", "precision": "fp32"}

    def prepare(self, batch):
        if any(item.payload == b"unreadable" for item in batch.items):
            signal.raise_signal(signal.SIGSEGV)

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            reporter.begin(item)
            self.running.add(item.lease_id)
            try:
                self.answer(item, reporter)
            finally:
                self.running.discard(item.lease_id)

    def answer(self, item, reporter):
        # Ends after `total` outputs; `fate` comes with the output `at`.
        total, fate, at = item.payload.decode().split()
        step = len(item.partials)
        while step < int(total):
            while self.stuck.is_set():
                time.sleep(0.01)
            if step == int(at):
                if fate == "die" or (fate == "crowd" and len(self.running) > 1):
                    signal.raise_signal(signal.SIGSEGV)
                if fate == "stick":
                    self.stuck.set()
                    continue
            reporter.partial(item, b"%d" % step)
            step += 1
            time.sleep(0.003)
        reporter.succeed(item, b"%d" % step)
"""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    folder = tmp_path / "models" / "answers"
    folder.mkdir(parents=True)
    (folder / "answers_engine.py").write_text(ENGINE)
    (folder / "model.toml").write_text('kind = "generate"\nengine = "answers_engine:Answers"\nconcurrency = 8\n')
    return ["--model-repository", str(tmp_path / "models")]


def payload(total: int = 40, fate: str = "live", at: int = 0) -> bytes:
    return f"{total} {fate} {at}".encode()


def deaths(worker: WorkerProcess) -> int:
    return worker.log.count('"engine died"')


def check_outputs(stream: Stream) -> None:
    """Each lease's outputs came once, in their order, and as many as its result says."""
    next_index: Counter[int] = Counter()
    for partial in stream.partials:
        assert (partial.index, partial.data) == (next_index[partial.lease_id], b"%d" % next_index[partial.lease_id])
        next_index[partial.lease_id] += 1
    for lease_id, word in stream.reports.items():
        if word.state == SUCCEEDED:
            assert int(word.result) == next_index[lease_id]


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [1, 8])
async def test_the_one_that_ends_its_engine_is_charged_alone(start: Start, flags: list[str], culprit: int) -> None:
    worker, stream = await start(*flags)
    leases = [(n, payload(fate="die", at=5) if n == culprit else payload()) for n in range(1, 9)]
    stream.lease(leases, kind="generate")
    words = await stream.reported(*range(1, 9))
    assert {word.lease_id: word.error.type for word in words if word.state != SUCCEEDED} == {culprit: "EngineDied"}
    (report,) = [report for batch in stream.batches for report in batch.reports]
    assert report.broke_engine
    check_outputs(stream)
    assert 1 <= deaths(worker) <= 3


@pytest.mark.slow
async def test_two_culprits_and_one_that_can_not_even_be_read(start: Start, flags: list[str]) -> None:
    worker, stream = await start(*flags)
    fates = {2: payload(fate="die", at=9), 5: payload(fate="die", at=20), 7: b"unreadable"}
    stream.lease([(n, fates.get(n, payload())) for n in range(1, 17)], kind="generate")
    words = await stream.reported(*range(1, 17), timeout_s=60)
    assert {word.lease_id for word in words if word.state != SUCCEEDED} == set(fates)
    check_outputs(stream)
    # Each uncharged crash makes at least one task a suspect, and a task is a suspect at most twice.
    assert deaths(worker) <= 2 * 16 + 3


async def test_a_device_on_which_all_die_charges_each_once_and_comes_to_an_end(start: Start, flags: list[str]) -> None:
    worker, stream = await start(*flags)
    stream.lease([(n, payload(fate="die", at=2)) for n in range(1, 5)], kind="generate")
    words = await stream.reported(1, 2, 3, 4)
    assert [word.state for word in words] == [FAILED] * 4
    assert deaths(worker) <= 1 + 4


async def test_a_crash_of_tasks_that_run_together_is_charged_to_none(start: Start, flags: list[str]) -> None:
    worker, stream = await start(*flags)
    stream.lease([(n, payload(total=60, fate="crowd", at=30)) for n in range(1, 5)], kind="generate")
    words = await stream.reported(1, 2, 3, 4)
    assert [word.state for word in words] == [SUCCEEDED] * 4
    check_outputs(stream)
    assert 1 <= deaths(worker) <= 2 * 4


@pytest.mark.slow
async def test_one_that_holds_up_all_is_found(start: Start, flags: list[str]) -> None:
    worker, stream = await start(*flags, "--progress-timeout-s", "6")  # for a load, too
    leases = [(n, payload(fate="stick", at=4) if n == 3 else payload()) for n in range(1, 5)]
    stream.lease(leases, kind="generate")
    words = await stream.reported(1, 2, 3, 4, timeout_s=60)
    assert {word.lease_id: word.error.type for word in words if word.state != SUCCEEDED} == {3: "NoProgress"}
    check_outputs(stream)
    assert deaths(worker) <= 2 * 4 + 1

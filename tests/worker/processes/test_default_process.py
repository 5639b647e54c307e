"""The default process, with a real engine."""

from types import SimpleNamespace
from typing import Any, cast

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.processes.child import ProcessSettings
from multigpu_worker.processes.default_process import DefaultProcess
from multigpu_worker.processes.process import Callbacks
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.waiting import until


async def test_a_frame_that_is_read_after_the_kill_makes_no_process_ready() -> None:
    settings = ProcessSettings(
        engine=EngineSettings(device="cpu", slots=1, threads=1),
        memory_bytes=0,
        result_bytes_max=1 << 20,
        device_environment={"CUDA_VISIBLE_DEVICES": ""},
        sharing=Sharing(),
        progress_timeout_s=0.0,
        cancel_grace_s=1.0,
    )
    callbacks = Callbacks()
    process = DefaultProcess(settings, callbacks)
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

"""What takes long is not done on the worker's event loop, nor one process after the other: a real worker tells when."""

import signal
from pathlib import Path

import pytest

from tests.worker.asking import ask, models
from tests.worker.conftest import Start
from tests.worker.toy_models import Shop

# In the agent alone: its engines have the same environment.
PLANTED = """
import sys

if "multigpu_worker.main" in sys.orig_argv:
    import functools
    import threading

    def recorded(function, name, which):
        @functools.wraps(function)
        def call(*args, **kwargs):
            print(f"planted {name} {which(args)} in {threading.current_thread().name}", flush=True)
            return function(*args, **kwargs)
        return call

    import subprocess
    from multigpu_worker.processes.child import ChildProcess
    from multigpu_worker.models import memory_estimates as memory

    memory.weights_bytes = recorded(memory.weights_bytes, "reads", lambda args: args[0].name)
    ChildProcess._sigkill = recorded(ChildProcess._sigkill, "kills", lambda args: args[0].pid)
    subprocess.Popen.wait = recorded(subprocess.Popen.wait, "waits for", lambda args: args[0].pid)
"""


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANTED)
    return folder


def planted(log: str) -> list[str]:
    return [line.removeprefix("planted ") for line in log.splitlines() if line.startswith("planted ")]


async def test_headers_of_a_model_that_comes_later_are_read_in_a_thread(start: Start, shop: Shop, plant: Path) -> None:
    shop.add("early")
    worker, stream = await start(*shop.flags, pythonpath=plant)
    shop.add("late")
    await stream.until(lambda: "late" in models(stream))
    reads = [line.split()[1:] for line in planted(worker.log) if line.startswith("reads")]
    assert {thread for model, _, thread in reads if model == "late"} not in (set(), {"MainThread"})
    assert models(stream)["late"].expected_memory_bytes > 0
    assert len(reads) == len({model for model, *_ in reads}), "what was there before is not read again"


async def test_all_engines_are_ended_before_any_is_waited_for(start: Start, shop: Shop, plant: Path) -> None:
    for name in "abc":
        shop.add(name)
    worker, stream = await start(*shop.flags, pythonpath=plant)
    engines = {str((await ask(stream, number, name)).pid) for number, name in enumerate("abc", 1)}
    stream.lease([(9, b"600")], kind="sleep")  # so that the first signal begins a drain, and the second ends it
    await stream.running(9)
    before = len(planted(worker.log))
    worker.signal(signal.SIGTERM)
    await stream.until(lambda: stream.heartbeats[-1].draining)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    lines = planted(worker.log)[before:]
    first_wait = next(at for at, line in enumerate(lines) if line.startswith("waits"))
    killed = {line.split()[1] for line in lines[:first_wait]}
    assert killed > engines, "the base is among them, too"

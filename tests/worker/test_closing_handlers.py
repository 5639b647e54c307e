"""`close()` of handler classes runs at the end of an engine process: when a worker stops, and at a reload."""

import signal
import time
from pathlib import Path

import pytest

from tests.worker.conftest import Start

CODE = """
import asyncio, time
from pathlib import Path
import multigpu

FILE = Path(__file__).with_suffix(".txt")

def write(text):
    with FILE.open("a") as file:
        file.write(text + "\\n")

class Base:
    def __call__(self, value: bytes) -> None: ...

@multigpu.handler("first")
class First(Base):
    def close(self):
        write("first closed")

@multigpu.handler("broken")
class Broken(Base):
    def close(self):
        raise OSError("the disk is gone")

@multigpu.handler("last")
class Last(Base):
    async def close(self):
        await asyncio.sleep(0)
        write("last closed")
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/closing.py").write_text(CODE)
    return tmp_path / "code/closing.py"


@pytest.mark.parametrize("how", ["stop", "reload"])
async def test_a_stop_or_a_reload_closes_the_handlers(start: Start, module: Path, how: str) -> None:
    worker, stream = await start("--handlers", "closing", pythonpath=module.parent)
    await stream.until(lambda: stream.heartbeats)
    if how == "reload":
        stream.send(reload_handlers=True)
        await stream.until(lambda: stream.heartbeats[-1].handlers.reloads == 1)
    else:
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0
        assert "close() of the handler broken failed" in worker.log
        assert "the disk is gone" in worker.log
    assert module.with_suffix(".txt").read_text() == "last closed\nfirst closed\n"


async def test_a_close_that_hangs_does_not_keep_the_worker(start: Start, module: Path) -> None:
    module.write_text(CODE.replace('write("first closed")', "time.sleep(600)"))
    worker, stream = await start("--handlers", "closing", pythonpath=module.parent)
    await stream.until(lambda: stream.heartbeats)
    began_s = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    assert time.monotonic() - began_s < 20
    assert "handlers did not close in time" in worker.log

"""A worker runs one version of its handlers until it is asked to reload them, even if their files change."""

import os
import re
import signal
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.conftest import Start, WorkerProcess
from tests.worker.scripted_master import SUCCEEDED, Stream

HANDLERS = """
import os, time
import words
from multigpu.handlers import handler

@handler("my.word")
def word(value: bytes) -> bytes:
    while value and not os.path.exists(value):
        time.sleep(0.01)
    return f"{VERSION} {words.WORD}".encode()
"""


class Edited:
    """A module of handlers and one that it imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("one")

    def write(self, version: str, code: str = HANDLERS) -> None:
        (self.folder / "mine.py").write_text(f"VERSION = {version!r}\n{code}")
        (self.folder / "words.py").write_text(f"WORD = {version!r}\n")


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    (tmp_path / "code").mkdir()
    return Edited(tmp_path / "code")


Begun = tuple[WorkerProcess, Stream]


@pytest.fixture
async def begun(start: Start, edited: Edited) -> Begun:
    worker, stream = await start("--handlers", "mine", pythonpath=edited.folder)
    await stream.until(lambda: stream.heartbeats)
    return worker, stream


async def answer(stream: Stream, lease_id: int) -> bytes:
    word = await stream.run(lease_id, b"", kind="my.word")
    assert word.state == SUCCEEDED, word
    return word.result


async def reload(stream: Stream) -> pb.Handlers:
    before = stream.heartbeats[-1].handlers.reloads
    stream.send(reload_handlers=True)
    await stream.until(lambda: stream.heartbeats[-1].handlers.reloads > before)
    return stream.heartbeats[-1].handlers


async def test_the_engine_after_a_death_has_the_same_version_whatever_was_edited(begun: Begun, edited: Edited) -> None:
    worker, stream = begun
    version = stream.heartbeats[-1].handlers.version
    assert len(bytes.fromhex(version)) == 6
    assert await answer(stream, 1) == b"one one"
    for number, edit in enumerate(("edited", "broken", "deleted"), 2):
        edited.write("two", "1/0" if edit == "broken" else HANDLERS)
        if edit == "deleted":
            (edited.folder / "mine.py").unlink()
        (pid,) = worker.engine_pids()
        os.kill(pid, signal.SIGKILL)
        await stream.until(lambda pid=pid: worker.engine_pids() not in ([], [pid]))  # type: ignore[misc]
        assert await answer(stream, number) == b"one one"
    assert {beat.handlers.version for beat in stream.heartbeats} == {version}


async def test_a_reload_lets_running_tasks_end_and_then_only_the_new_version_runs(begun: Begun, edited: Edited) -> None:
    _, stream = begun
    before = stream.heartbeats[-1].handlers.version
    go = edited.folder / "go"
    stream.lease([(1, str(go).encode())], kind="my.word")
    await stream.running(1)
    edited.write("two")
    stream.send(reload_handlers=True)
    stream.lease([(2, b"")], kind="my.word")
    beats = len(stream.heartbeats)
    await stream.until(lambda: len(stream.heartbeats) > beats + 3)
    assert not stream.reports, "nothing begins beside what runs"
    go.touch()
    old, new = await stream.reported(1, 2)
    assert (old.result, new.result) == (b"one one", b"two two")
    await stream.until(lambda: stream.heartbeats[-1].handlers.reloads == 1)
    after = stream.heartbeats[-1].handlers
    assert (after.error, after.version != before) == ("", True)
    edited.write("one")
    assert (await reload(stream)).version == before, "the same sources are the same version"


async def test_tasks_that_outlast_the_drain_timeout_begin_anew_uncharged(start: Start, edited: Edited) -> None:
    worker, stream = await start("--handlers", "mine", "--drain-timeout-s", "0.2", pythonpath=edited.folder)
    go = edited.folder / "go"
    stream.lease([(1, str(go).encode())], kind="my.word")
    await stream.until(lambda: stream.heartbeats and any(held.running for held in stream.heartbeats[-1].leases))
    edited.write("two")
    assert (await reload(stream)).error == ""
    go.touch()
    (word,) = await stream.reported(1)
    assert (word.state, word.result) == (SUCCEEDED, b"two two")
    assert "begin anew" in worker.log


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1/0", r"ZeroDivisionError: division by zero \(.*mine\.py, line \d+\)"),
        ("def (", r"SyntaxError: invalid syntax \(.*mine\.py, line \d+\)"),
        ("import os; os._exit(7)", "exit code 7"),
        # As of a file name that is not UTF-8: no text of a message may have it.
        (r"raise ValueError('bad \udcff name')", r"ValueError: bad \? name"),
    ],
)
async def test_a_failed_import_leaves_the_version_before(begun: Begun, edited: Edited, code: str, error: str) -> None:
    _, stream = begun
    before = stream.heartbeats[-1].handlers.version
    edited.write("two", code)
    after = await reload(stream)
    assert re.search(error, after.error)
    assert after.version == before
    assert await answer(stream, 1) == b"one one"
    assert {beat.health.state for beat in stream.heartbeats} == {stream.heartbeats[0].health.state}, "it is not sick"
    edited.write("two")
    after = await reload(stream)
    assert (after.error, after.reloads) == ("", 2)
    assert await answer(stream, 2) == b"two two"


async def test_leases_of_a_removed_kind_are_returned(begun: Begun, edited: Edited) -> None:
    _, stream = begun
    go = edited.folder / "go"
    stream.lease([(1, str(go).encode())], kind="my.word")
    await stream.running(1)
    edited.write("two", HANDLERS.replace("my.word", "my.sentence"))
    stream.send(reload_handlers=True)
    stream.lease([(2, b"")], kind="my.word")
    go.touch()
    one, two = await stream.reported(1, 2)
    assert one.result == b"one one"
    assert two.state == pb.REPORT_STATE_RETURNED
    offers = [{c.kind for c in b.catalog.capabilities} for b in stream.heartbeats if b.HasField("catalog")]
    assert "my.sentence" in offers[-1]
    assert "my.word" not in offers[-1]


async def test_version_covers_all_modules_of_a_package(start: Start, tmp_path: Path) -> None:
    package = tmp_path / "code/pack"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "deep/__init__.py").write_text("from .. import text\n")
    (package / "text.py").write_text("WORD = b'one'\n")
    (package / "mine.py").write_text(
        "from multigpu.handlers import handler\nfrom .deep import text\n"
        "@handler('my.word')\ndef word(value: bytes) -> bytes:\n    return text.WORD + __file__.encode()\n"
    )
    worker, stream = await start("--handlers", "pack.mine", pythonpath=package.parent)
    result = await answer(stream, 1)
    assert result == b"one" + str(package / "mine.py").encode(), "data that lie beside it are found"
    (package / "text.py").write_text("WORD = b'two'\n")
    (pid,) = worker.engine_pids()
    os.kill(pid, signal.SIGKILL)
    await stream.until(lambda: worker.engine_pids() not in ([], [pid]))
    assert await answer(stream, 2) == result

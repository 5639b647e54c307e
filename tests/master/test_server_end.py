"""The master ends if its gRPC server ends with an internal error, and does not start with a grpcio that lacks private
names that it uses.
"""

import asyncio
import contextlib
import itertools
import json
import pkgutil
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from multigpu.config.config import MasterConfig
from multigpu.daemon import grpc_server, grpcio_check
from multigpu.v1 import task_pb2
from multigpu_master.clock import Clock
from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.core.scheduler import Core
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.driver import Driver
from multigpu_master.journal.protocol import Entry, Recovered
from multigpu_master.journal.sqlite.failures import full_error
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.room import Room
from multigpu_master.journal.sqlite.schema import DATABASE_NAME
from multigpu_master.server import Master, StartError

from tests.hostile.http2 import Peer, drive
from tests.waiting import until

MISSING = """
import importlib, runpy, sys
module, _, name = sys.argv.pop(1).partition(":")
owner, attribute = importlib.import_module(module), name.partition(".")[0]
if "." in name:  # types of Cython can't be changed
    kept = {key: None for key in dir(owner.AioServer) if key != name.partition(".")[2]}
    owner.AioServer = type("AioServer", (), kept)
else:
    delattr(owner, attribute)
runpy.run_module("multigpu_master.main", run_name="__main__")
"""


async def test_the_master_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # gRPC's own server core fails on a path that is not UTF-8.
    own = cygrpc.AioServer._make_request_call_future
    monkeypatch.setattr(grpc_server._Core, "_make_request_call_future", own)
    config = MasterConfig(listen="127.0.0.1:0", data_dir=tmp_path)
    master = Master(config, SqliteJournal(tmp_path, size_max_bytes=1 << 30), Clock())
    await master.start()
    await asyncio.to_thread(_send_a_path_that_is_no_text, master.address)
    async with asyncio.timeout(120):
        await master.stop_requested.wait()
    assert master.fatal is not None and "gRPC server" in master.fatal
    await master.stop()


async def test_outcomes_that_are_delivered_during_a_stop_are_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MasterConfig(listen="127.0.0.1:0", data_dir=tmp_path)
    master = Master(config, SqliteJournal(tmp_path, size_max_bytes=1 << 30), Clock())
    await master.start()
    driver, stop = master.driver, master._server.stop
    driver.workers.open(1, "p")
    driver.handle(ev.Hello(1, WorkerInfo(worker_id="w", capabilities=(Capability(kind="echo"),), slots=8)))
    stream, outbox = driver.open_stream()
    task = Task(driver.specs.read(task_pb2.TaskSpec(kind="echo")), "late", b"payload", submit_s=driver.now())
    driver.submit(task.spec, [task], stream, lambda _error: None)
    await driver.write_buffer.flush_and_wait()

    async def deliver_then_stop(grace_s: float) -> None:
        await stop(grace_s)
        assert task.lease is not None
        driver.handle(ev.Reports(1, [task.lease.lease_id], [b"result"]))
        assert await outbox.next() is not None, "the client has the outcome"

    monkeypatch.setattr(master._server, "stop", deliver_then_stop)
    await master.stop()
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    again = list(journal.open(lambda *_: None).tasks)
    stored = journal.find_requests(["late"])
    journal.close(10)
    assert (list(stored), again) == (["late"], [])


async def test_a_stop_of_the_master_charges_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the sessions counted as a loss of their workers: a last attempt became a dead letter."""
    config = MasterConfig(listen="127.0.0.1:0", data_dir=tmp_path, session_timeout_s=1.0, heartbeat_interval_s=0.2)
    master = Master(config, SqliteJournal(tmp_path, size_max_bytes=1 << 30), Clock())
    await master.start()
    driver, stop = master.driver, master._server.stop
    driver.workers.open(1, "p")
    driver.handle(ev.Hello(1, WorkerInfo(worker_id="w", capabilities=(Capability(kind="echo"),))))
    task = Task(driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1)), "r", b"", submit_s=driver.now())
    driver.submit(task.spec, [task], 0, lambda _error: None)
    assert task.lease is not None
    held = ev.HeldLease(task.lease.lease_id, task.task_id, 1, running=True)
    driver.handle(ev.Heartbeat(1, [held], 1, Telemetry()))

    async def end_sessions_and_wait(grace_s: float) -> None:
        await stop(grace_s)
        driver.workers.close(1)
        await asyncio.sleep(1.5 * config.session_timeout_s)  # the stop may take as long, on a slow disk

    monkeypatch.setattr(master._server, "stop", end_sessions_and_wait)
    await master.stop()
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    recovered = journal.open(lambda *_: None)
    assert [record.request_id for record in recovered.tasks] == ["r"]
    assert json.loads(recovered.settings["worker/w"])["connected"], "the next master awaits it"
    journal.close(10)


async def test_the_journal_may_find_room_before_there_is_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread starts before the driver exists, and reports at once that a disk that was full has room again."""
    refusals = itertools.chain([full_error(tmp_path)], itertools.repeat(None))
    monkeypatch.setattr(Room, "prepare_for_submits", lambda _room: next(refusals))
    config = MasterConfig(listen="127.0.0.1:0", data_dir=tmp_path)
    master = Master(config, journal := SqliteJournal(tmp_path, size_max_bytes=1 << 30), Clock())
    make = master._make_driver

    def make_late(core: Core, recovered: Recovered) -> Driver:
        until(lambda: journal.writable)
        return make(core, recovered)

    monkeypatch.setattr(master, "_make_driver", make_late)
    await master.start()
    await master.driver.write_buffer.save({"written": b"1"})
    await master.stop()
    assert not master.fatal


def _send_a_path_that_is_no_text(address: str) -> None:
    with Peer(address) as peer:
        peer.call(b"/x\xff/y")
        drive([peer], 5, lambda: 0)


@pytest.mark.parametrize("name", [*grpcio_check.NAMES, "grpc._cython.cygrpc:AioServer"])
def test_a_master_without_a_private_name_of_grpcio_says_so_and_does_not_start(name: str, tmp_path: Path) -> None:
    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        [sys.executable, "-c", MISSING, name, *flags], capture_output=True, text=True, timeout=400, check=False
    )
    core = ", ".join(entry.partition(":")[2] for entry in grpcio_check.NAMES if entry.startswith(name))
    wanted = (
        f"mgpu-master: grpcio {grpc.__version__} lacks {core}: it does not start, because one malformed call "
        "could end gRPC's own server; run `pip install 'multigpu[master]'`\n"
    )
    assert (done.stderr, done.stdout, done.returncode) == (wanted, "", 1)
    assert not (tmp_path / "data").exists()


def test_every_private_name_in_use_is_checked() -> None:
    source = Path(grpc_server.__file__).read_text("utf-8")
    used = {f"grpc._cython.cygrpc:{name}" for name in re.findall(r"cygrpc\.(\w+)", re.sub(r'".*?"', "", source))}
    used |= {f"grpc.aio._server:{name}" for name in re.findall(r"aio_server\.(\w+)", source)}
    # Methods of the base class that _Core calls or overrides.
    body = source.partition("class _Core(")[2].partition("\ndef ")[0]
    methods = set(re.findall(r"(?:self|super\(\))\.(\w+)\(|def (\w+)", body))
    inherited = {name for pair in methods for name in pair if name and hasattr(cygrpc.AioServer, name)}
    used |= {f"grpc._cython.cygrpc:AioServer.{name}" for name in inherited if not name.startswith("__")}
    assert used - {"grpc._cython.cygrpc:AioServer"} == set(grpcio_check.NAMES)
    assert all(pkgutil.resolve_name(name) for name in used)


async def test_a_master_that_rejects_a_setting_leaves_a_closed_journal(tmp_path: Path) -> None:
    """Its log was left: sqlite3, with which the message tells to remove the row, deleted the log, and the next master
    rejected a journal without one.
    """
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    journal.open(lambda *_commit: None)
    journal.append(Entry(settings={"worker/w": b"{"}))
    journal.close(10)
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    with pytest.raises(StartError, match="setting 'worker/w' is damaged"):
        await Master(MasterConfig(data_dir=tmp_path, listen="127.0.0.1:0"), journal, Clock()).start()
    assert not (tmp_path / f"{DATABASE_NAME}-wal").exists()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)) as other:
        other.execute("DELETE FROM setting WHERE key = 'worker/w'")
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    journal.open(lambda *_commit: None)
    journal.close(10)

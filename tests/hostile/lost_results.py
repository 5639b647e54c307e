"""A missing result is never delivered as a value, and an existing one always is.

A journal is filled with small and large outcomes, in rows, segments and payload files; then some are expired, deleted,
truncated or damaged. A real client asks a real master for every task by every call. The damage alone determines each
expected answer.
"""

import asyncio
import random
import sqlite3
import tempfile
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

from multigpu import (
    AlreadyExistsError,
    AsyncClient,
    Input,
    MultigpuError,
    OutcomeState,
    ResultExpiredError,
    ResultLostError,
)
from multigpu._transport.payloads import LARGE_BYTES, Writer
from multigpu.config.config import MasterConfig
from multigpu.v1 import task_pb2
from multigpu_master.clock import Clock
from multigpu_master.core.identity import fingerprint
from multigpu_master.core.model import Task
from multigpu_master.journal.protocol import Entry, LargeBody, SettleRecord
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.server import Master
from multigpu_master.wire.payloads import outcome_body
from multigpu_master.wire.specs import SpecReader

from tests.hostile.targets.base import mute

KIND, PAYLOAD = "rule", b"payload"
SIZES = (0, 1, 100, 9000, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 5)
SUCCEEDED = task_pb2.OUTCOME_STATE_SUCCEEDED
ANSWERS_S = 20.0  # a call that never ends fails the test
# Bodies of rows that cannot be read.
GARBAGE: tuple[Any, ...] = (
    b"\xff\xff", "not:one", f"{'0' * 24}-1:x:1:", f"{'0' * 24}-1:0:1:z", f"{'0' * 24}-1:0:1:", "-:0:1:",
    "00000001:0:5:00000000", "00000009:0:5:00000000", 7, 1.5,
)  # fmt: skip

Expected = bytes | type[MultigpuError]


def check(seed: int) -> None:
    """AssertionError: an answer is wrong."""
    mute()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        expected: dict[int, Expected] = dict(_fill(folder, rng))
        with closing(sqlite3.connect(folder / "journal.sqlite3", isolation_level=None)) as connection:
            for _ in range(rng.choice((0, 1, 3, 6))):
                rng.choice((_expire, _garble, _harm_file, _harm_file))(connection, folder, rng, expected)
        asyncio.run(_ask(folder, expected))


def _fill(folder: Path, rng: random.Random) -> dict[int, bytes]:
    """Journals outcomes; the result of each task."""
    results: dict[int, bytes] = {}
    settles = []
    journal = SqliteJournal(folder, size_max_bytes=1 << 30)
    list(journal.open(lambda *_told: None).tasks)
    writer = Writer(journal.payloads.path)
    spec = SpecReader().read(task_pb2.TaskSpec(kind=KIND))
    for task_id in range(1, rng.choice((2, 6, 12))):
        result = results[task_id] = rng.randbytes(rng.choice(SIZES))
        own = task_pb2.Outcome(task_id=task_id, request_id=f"r{task_id}", state=SUCCEEDED, attempts=1)
        body: bytes | LargeBody = own.SerializeToString() + task_pb2.Outcome(result=result).SerializeToString()
        if len(result) >= LARGE_BYTES and rng.random() < 0.5:
            at = writer.put(result)
            reference = journal.payloads.resolve(at.pin.name, at.offset, at.size_bytes)
            body = outcome_body(own.SerializeToString(), b"", reference)
        settles.append(
            SettleRecord(
                task_id, f"r{task_id}", SUCCEEDED, "default", KIND, "", "w", 1.0, 2.0, 9e9, body, None,
                fingerprint(Task(spec, f"r{task_id}", PAYLOAD)),
            )
        )  # fmt: skip
    journal.append(Entry(settles=settles))
    journal.close(60.0)
    return results


def _expire(connection: sqlite3.Connection, _: Path, rng: random.Random, expected: dict[int, Expected]) -> None:
    task_id = rng.choice(list(expected))
    connection.execute("UPDATE outcome SET body = NULL WHERE task_id = ?", (task_id,))
    expected[task_id] = ResultExpiredError


def _garble(connection: sqlite3.Connection, _: Path, rng: random.Random, expected: dict[int, Expected]) -> None:
    task_id, body = rng.choice(list(expected)), rng.choice(GARBAGE)
    connection.execute("UPDATE outcome SET body = ? WHERE task_id = ?", (body, task_id))
    expected[task_id] = ResultLostError


def _harm_file(connection: sqlite3.Connection, folder: Path, rng: random.Random, expected: dict[int, Expected]) -> None:
    """Deletes, truncates or damages a file with large bodies. Returns the tasks of its rows."""
    files = [*(folder / "segments").glob("*"), *(folder / "payloads").glob("*-*")]
    if not files:
        return
    file = rng.choice(files)
    size = file.stat().st_size
    # Payload files have no checksum: a flipped bit there is not detected.
    how = rng.choice(("delete", "truncate", "flip" if file.parent.name == "segments" else "truncate"))
    at = rng.randrange(size) if size else 0
    if how == "delete":
        file.unlink()
    elif how == "truncate":
        with file.open("r+b") as opened:
            opened.truncate(at)
    else:
        data = bytearray(file.read_bytes())
        data[at : at + 1] = bytes([data[at] ^ 1]) if data else b""
        file.write_bytes(data)
    rows = connection.execute("SELECT task_id, body FROM outcome WHERE body GLOB ?", (f"{file.name}:*",))
    for task_id, body in rows.fetchall():
        offset, length = (int(part, 16) for part in body.split(":")[1:3])
        harmed = {"delete": True, "truncate": at < offset + length, "flip": offset <= at < offset + length}[how]
        if harmed and task_id in expected and expected[task_id] is not ResultExpiredError:
            expected[task_id] = ResultLostError


async def _ask(folder: Path, expected: dict[int, Expected]) -> None:
    config = MasterConfig(listen="127.0.0.1:0", data_dir=folder)
    master = Master(config, SqliteJournal(folder, size_max_bytes=1 << 30), Clock())
    await master.start()
    try:
        async with asyncio.timeout(ANSWERS_S), AsyncClient(master.address) as client:
            await _answers(client, expected)
    finally:
        await master.stop()


async def _answers(client: AsyncClient, expected: dict[int, Expected]) -> None:
    inputs = [Input(payload=PAYLOAD, request_id=f"r{task_id}") for task_id in expected]
    mapped = client.map(KIND, inputs, return_exceptions=True, wait_for_worker=True)
    for task_id, answer in zip(expected, [each async for each in mapped], strict=True):
        _compare("map", task_id, expected[task_id], answer)
    watched = dict[int, Any]()
    async with aclosing(client.watch()) as outcomes:
        while len(watched) < len(expected):
            outcome, _ = await anext(outcomes)
            watched[outcome.task_id] = _value(outcome)
    async for task in client.list_tasks():
        assert task.outcome is not None
        assert task.outcome.state is OutcomeState.SUCCEEDED, f"a list says {task.outcome.state.name}"
        assert task.outcome.message.result == b"", "a list has results"
    for task_id, wanted in expected.items():
        _compare("watch", task_id, wanted, watched[task_id])
        for key in (task_id, f"r{task_id}"):
            found = (await client.get(key)).outcome
            _compare("get", task_id, wanted, _value(found))
        ran = await client.run_outcome(KIND, PAYLOAD, request_id=f"r{task_id}", wait_for_worker=True)
        _compare("run", task_id, wanted, _value(ran))
        other = Input(payload=b"another", request_id=f"r{task_id}")
        answers = [each async for each in client.map(KIND, [other], return_exceptions=True, wait_for_worker=True)]
        assert isinstance(answers[0], AlreadyExistsError), f"another task with its request_id was given {answers[0]!r}"


def _value(outcome: Any) -> Any:
    """The result by both calls; or the error, if both raise the same."""
    answers: list[Any] = []
    for ask in (outcome.value, lambda: outcome.result):
        try:
            answers.append(ask())
        except MultigpuError as error:
            answers.append(error)
    same = answers[0] == answers[1] or type(answers[0]) is type(answers[1])
    assert same, f"value and result differ: {answers}"
    return answers[0]


def _compare(call: str, task_id: int, wanted: Expected, answer: Any) -> None:
    if isinstance(wanted, bytes):
        assert isinstance(answer, bytes), f"{call} says {answer!r} of a result that is there"
        assert answer == wanted, f"{call} gives a result that never was: {len(answer)} bytes"
    else:
        assert not isinstance(answer, bytes), f"{call} gives a value for a result that is not there"
        assert type(answer) is wanted, f"{call} of task {task_id} says {answer!r}, not {wanted.__name__}"

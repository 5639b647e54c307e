"""Targets that read files, the environment and the journal."""

import contextlib
import os
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.message import DecodeError
from multigpu._transport.call import Answer, Call
from multigpu._transport.run_state import RunState
from multigpu._transport.window import Window
from multigpu.cli.failures import Failure
from multigpu.cli.tasks.lines import count_lines, read_lines
from multigpu.cli.tasks.submit import parse
from multigpu.config.config import CONFIG_CLASSES, ConfigError, load
from multigpu.errors import MultigpuError
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu_master import settings
from multigpu_master.core.model import Worker
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.errors import InvalidArgumentError, JournalError
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.rpc import queries
from multigpu_master.rpc.requests import parse_page_token, read_page_size
from multigpu_master.strategies.registry import load_strategies
from multigpu_master.wire import specs as wire_specs
from multigpu_master.wire import tasks as wire_tasks

from tests.hostile.targets.base import Crash, Target, mute
from tests.hostile.targets.inputs import WORDS, Maker

_WORKER = Worker(WorkerInfo(worker_id="a", capabilities=(Capability(kind="echo"),)))
SAVED_WORKER = settings.worker_setting(_WORKER)["worker/a"] or b""
FIELDS = [(cls, name) for cls in CONFIG_CLASSES for name in cls.__dataclass_fields__]  # type: ignore[attr-defined]  # all are
VALUES = [
    *("0", "-1", "1", "1e999", "nan", "inf", "-0", "1_0", "٣", "0x10", "64MiB", "1GiB1", "KiB", "true"),
    *("TRUE", "maybe"),
    *("127.0.0.1:0", "h:99999", "[::1]:1", "[::1", "unix:", "unix:/x", ":1", "a=b", "=", "a=,b", "~", "~nobody/x"),
    *("cuda:0", "cuda:99999999999", "cpu", "auto", "debug", "a,b,,c", "", "64 mib", "9" * 400, "\0", "/" * 5000),
]


def _toml(maker: Maker) -> bytes:
    rng = maker.rng
    if rng.random() < 0.1:
        return maker.noise()
    lines = []
    for _ in range(rng.choice((1, 1, 3, 8))):
        cls, name = rng.choice(FIELDS)
        section = cls.section if rng.random() < 0.9 else rng.choice(("mastr", "", "master.x", '"a b"'))
        text = rng.choice(VALUES + WORDS[:25]).replace("\\", "").replace('"', "").replace("\n", " ").replace("\0", "")
        forms = ('"{}"', "{}", "[{}]", '["{}"]', '{{ k = "{}" }}', "{{ a.b = 1 }}", "1979-05-27T07:32:00Z", "{}.5")
        lines += [f"[{section}]", f"{name} = {rng.choice(forms).format(text)}"]
    data = "\n".join(lines).encode()
    return data if rng.random() < 0.8 else maker.damaged(data)


class Folder:
    """A folder for inputs that are read from files."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.path = Path(self._folder.name)

    def config(self, data: bytes) -> None:
        path = self.path / "config.toml"
        path.write_bytes(data)
        for cls in CONFIG_CLASSES:
            with contextlib.suppress(ConfigError):
                load(cls, file=path, env={})

    def lines(self, data: bytes) -> None:
        path = self.path / "lines.jsonl"
        path.write_bytes(data)
        with contextlib.suppress(Failure):
            lines = list(read_lines([str(path)]))
            if len(lines) != count_lines([str(path)]):
                raise Crash(f"{len(lines)} lines were read, {count_lines([str(path)])} counted")
            for line in lines:
                parse(line.encode())


def _pairs(maker: Maker) -> bytes:
    """Settings as text: NAME, NUL, VALUE, NUL, ... with valid, similar and invalid names."""
    rng, parts = maker.rng, []
    for _ in range(rng.choice((1, 2, 5))):
        cls, name = rng.choice(FIELDS)
        prefix = rng.choice(("MGPU_", f"MGPU_{cls.section.upper()}_", "mgpu_", "MGPU"))
        parts += [prefix + name.upper()[: rng.choice((99, 99, 99, 5))], rng.choice(VALUES + WORDS).replace("\0", " ")]
    return "\0".join(parts).encode()


def _environment(data: bytes) -> None:
    parts = os.fsdecode(data).split("\0")
    env = dict(zip(parts[::2], parts[1::2], strict=False))
    for cls in CONFIG_CLASSES:
        with contextlib.suppress(ConfigError):
            load(cls, file=None, env={"XDG_CONFIG_HOME": "/nowhere", **env})


# Values that a column of an SQLite table can have if the table is not STRICT.
COLUMN = [
    *(0, 1, -1, 2**63 - 1, -(2**63), 0.5, 1e308, float("inf"), "", "x", "a:b:c", "00000001:0:10", "1:-1:5", "1:0:-5"),
    *("ffffffff:0:ffffffffffffffff", "::", b"", b"\xff\xfe", b"\x0a\x04echo", "x" * 300, None),
]
TASK = [7, "r", task_pb2.TaskSpec(kind="echo").SerializeToString(), b"payload", "key", 1, 1.6e9]
OUTCOME_BODY = task_pb2.Outcome(task_id=7, request_id="r", state=1).SerializeToString()  # type: ignore[arg-type]  # an int on the wire
OUTCOME = [3, 7, "r", 1, "default", "echo", "", 1.6e9, None, 9e9, OUTCOME_BODY]


class Rows:
    """The journal's readers, with rows made from the seed in the input."""

    def __init__(self, folder: Path) -> None:
        mute()
        self._reads = JournalReads(folder)
        self._specs = wire_specs.SpecReader()
        self._strategies = load_strategies()

    def _row(self, whole: list[Any], data: bytes) -> list[Any]:
        rng = Random(data)
        row = list(whole)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(row))
            damage = Maker(rng)
            row[at] = (
                damage.damaged(row[at]) if isinstance(row[at], bytes) and rng.random() < 0.7 else rng.choice(COLUMN)
            )
        return row

    def task(self, data: bytes) -> None:
        with contextlib.suppress(JournalError):
            record = self._reads._task(self._row(TASK, data), {})
            task = wire_tasks.restored_task(record, self._specs.restore(record.spec))
            wire_tasks.task_message(task, 0.0).SerializeToString()
            wire_tasks.submit_record(task)

    def outcome(self, data: bytes) -> None:
        with contextlib.suppress(JournalError):
            stored = self._reads._outcome(self._row(OUTCOME, data))
            queries.stored_task(stored, whole=True).SerializeToString()

    def setting(self, data: bytes) -> None:
        rng = Random(data)
        key = rng.choice(("strategy", "queue/a", "worker/a", "worker/", "queue/", "nonsense", ""))
        values = [
            b"auto",
            b'{"paused": true, "strategy": "", "tasks_max": 1, "bytes_max": 0}',
            SAVED_WORKER,
        ]
        value: Any = Maker(rng).damaged(rng.choice(values)) if rng.random() < 0.8 else rng.choice(COLUMN)
        core = Core(self._strategies, Limits(), 1, lambda: 0.5)
        with contextlib.suppress(JournalError):
            settings.restore(lambda event: core.handle(event, 1.6e9), core.ledger.strategies, {key: value})


class Waiting(Call):
    """A call with a waiting caller."""

    __slots__ = ("answers",)

    def settle(self, answer: Answer) -> None:
        if isinstance(answer, Outcome):
            repr(answer)
            with contextlib.suppress(MultigpuError):
                answer.value()
            with contextlib.suppress(ValueError):  # of an invalid time
                answer.finish_time  # noqa: B018  reading it is what is tried


def _client(data: bytes) -> None:
    """A random frame for a client's Run stream."""
    window = Window(10, 1 << 20)
    state = RunState(window)
    calls = [Waiting(task_pb2.TaskSpec(kind="echo"), b"x", f"r{n}", None) for n in range(4)]
    for call in calls:
        assert window.try_admit(1, call.nbytes)
    state.start(calls)
    state.next_frame()
    with contextlib.suppress(DecodeError):
        frame = task_service_pb2.RunResponse.FromString(data)
        later = state.receive(frame, len(data))
        assert all(delay >= 0 for delay in later)


def _token(data: bytes) -> None:
    with contextlib.suppress(InvalidArgumentError):
        number = parse_page_token(data.decode("utf-8", "replace"), "cursor")
        read_page_size(number % (1 << 31))
        if not 0 <= number < 1 << 62:
            raise Crash(f"a cursor of {number}")


def targets(folder: Folder) -> list[Target]:
    rows = Rows(folder.path)

    def bits(maker: Maker) -> bytes:
        return maker.rng.randbytes(8)

    def word(maker: Maker) -> bytes:
        return maker.word().encode("utf-8", "surrogatepass")

    def json_lines(maker: Maker) -> bytes:
        lines = ['{"a": 1}', "[" * 2000, '"\\ud800"', "1e999", "NaN", "{", "null", '{"a":' * 50, *WORDS[:20]]
        data = "\n".join(maker.rng.choice(lines) for _ in range(maker.rng.randrange(6))).encode()
        return data if maker.rng.random() < 0.6 else maker.damaged(data)

    def frame(maker: Maker) -> bytes:
        return maker.wire(task_service_pb2.RunResponse.DESCRIPTOR)

    return [
        Target(name="config file", make=_toml, feed=folder.config),
        Target(name="config environment", make=_pairs, feed=_environment),
        Target(name="journal row of a task", make=bits, feed=rows.task),
        Target(name="journal row of an outcome", make=bits, feed=rows.outcome),
        Target(name="journal setting", make=bits, feed=rows.setting),
        Target(name="client RunResponse", make=frame, feed=_client),
        Target(name="cursor, page token", make=word, feed=_token),
        Target(name="mgpuctl lines", make=json_lines, feed=folder.lines),
    ]

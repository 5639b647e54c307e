"""One task: its attempts on a time axis, the explanation of its state, its output, and actions on it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from multigpu._kinds.training import KIND as TRAIN
from multigpu._times import instant
from multigpu.fleet import Explanation, ModelState, Worker
from multigpu.outcome import Outcome
from multigpu.task import Task, TaskState

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard import text
from multigpu_gateway.dashboard.pages import Page
from multigpu_gateway.rest.values import data_value

TEXT_CHARACTERS_MAX = 20_000
CANDIDATES_MAX = 20
# The width of the time axis, in units of the SVG's viewBox.
WIDTH = 1000
AT_WORKER, LOADING = "at the worker", "loading its model"


@dataclass
class Bar:
    """A part of the time axis. `kind`: waiting, at-worker or running."""

    kind: str
    stage: str
    begin: float
    width: float
    seconds: float


@dataclass
class Row:
    """An attempt. `number` 0: the task waits for its next attempt."""

    number: int
    worker_id: str
    bars: list[Bar]
    end: str


async def show(pair: ClientPair, task_id: int) -> Page:
    found = await pair.client.get(task_id)
    explanation = await pair.admin.explain(task_id)
    outcome = found.outcome
    worker = None
    if found.state is TaskState.LEASED:
        workers = await pair.admin.list_workers()
        worker = next((each for each in workers if each.worker_id == found.worker_id), None)
    values: dict[str, Any] = {
        "task": found, "outcome": outcome, "explanation": explanation, "rows": rows_of(found, worker),
        "candidates": explanation.candidates[:CANDIDATES_MAX] if found.state is TaskState.QUEUED else (),
        "width": WIDTH,
        "start": await _start(pair, explanation), "follow": outcome is None and bool(found.request_id),
        "result": _result(outcome),
        "partials": _partials(outcome), "job": found.kind == TRAIN, "reports": _reports(found),
    }  # fmt: skip
    return Page("task.html", values, live=outcome is None)


async def _start(pair: ClientPair, explanation: Explanation) -> str:
    """Returns when the task will start: from the number of tasks before it, and the last minute's rate of its queue."""
    if explanation.ahead is None:
        return ""
    name = explanation.task.message.spec.queue
    queue = next((each for each in await pair.admin.list_queues() if each.queue == name), None)
    if queue is not None and queue.paused:
        return "when its queue is resumed"
    if queue is None or not queue.end_rate:
        return "unknown, because no task of the queue ended in the last minute"
    return f"in {text.duration(explanation.ahead / queue.end_rate)}, at the queue's pace in the last minute"


def rows_of(task: Task, worker: Worker | None) -> list[Row]:
    """Returns a row for each attempt that is known, and one for the wait of a queued task. All have the same time axis,
    from submit to the task's end, or to now. `worker`: the worker that has the task's lease.
    """
    outcome = task.outcome.message if task.outcome is not None else None
    message = outcome or task.message
    stages = message.stages
    now = datetime.now(UTC)
    submit = task.submit_time or now
    end = instant(stages.finish_time) or now
    axis = Axis(submit, end)
    rows = []
    before = submit
    first = task.attempts - len(message.earlier_attempts)
    for number, attempt in enumerate(message.earlier_attempts, max(1, first)):
        until = instant(attempt.end_time) or now
        bars = axis.bars(before, instant(attempt.dispatch_time), instant(attempt.start_time), until, AT_WORKER)
        rows.append(Row(number, attempt.worker_id, bars, attempt.reason))
        before = until
    dispatch = instant(stages.dispatch_time)
    bars = axis.bars(before, dispatch, instant(stages.start_time), end, LOADING if _loads(task, worker) else AT_WORKER)
    worker_id = outcome.worker_id if outcome is not None else task.worker_id
    word = text.state(task).lower().replace("_", " ")
    if task.outcome is not None and task.outcome.error_type:
        word += f": {task.outcome.error_type}"
    rows.append(Row(task.attempts if dispatch else 0, worker_id, bars, word))
    return rows


def _loads(task: Task, worker: Worker | None) -> bool:
    """Whether the worker is loading the model of the task."""
    name = task.message.spec.model.partition(":")[0]
    models = worker.models if worker is not None else ()
    return any(each.state is ModelState.LOADING and each.model.partition(":")[0] == name for each in models)


class Axis:
    """Converts times to positions between 0 and WIDTH."""

    def __init__(self, begin: datetime, end: datetime) -> None:
        self._begin = begin
        self._seconds = max(1e-6, (end - begin).total_seconds())

    def bars(
        self, begin: datetime, dispatch: datetime | None, start: datetime | None, end: datetime, before_run: str
    ) -> list[Bar]:
        """Returns a bar for each stage that an attempt has reached. `dispatch`, `start` None: not reached."""
        parts = [("waiting", "waiting", begin, dispatch or end)]
        if dispatch is not None:
            parts.append(("at-worker", before_run, dispatch, start or end))
        if start is not None:
            parts.append(("running", "running", start, end))
        return [self._bar(*part) for part in parts]

    def _bar(self, kind: str, stage: str, begin: datetime, end: datetime) -> Bar:
        seconds = max(0.0, (end - begin).total_seconds())
        at = WIDTH * max(0.0, (begin - self._begin).total_seconds()) / self._seconds
        return Bar(kind, stage, min(at, WIDTH - 1.0), max(1.0, WIDTH * seconds / self._seconds), seconds)


def _reports(task: Task) -> str:
    """Returns the reports of an ended training job as a JSON list. A running job's reports arrive as events."""
    if task.kind != TRAIN or task.outcome is None:
        return "[]"
    return f"[{','.join(data.decode() for data in task.outcome.message.partials)}]"


def _result(outcome: Outcome | None) -> str | None:
    if outcome is None or not outcome.succeeded:
        return None
    return _text(data_value(outcome.result, outcome.content_type))


def _partials(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    types = outcome.message.partial_content_types or [""] * len(outcome.message.partials)
    return "".join(_partial(*each) for each in zip(outcome.message.partials, types, strict=True))


def _partial(data: bytes, content_type: str) -> str:
    """Returns a partial output as dashboard.js shows it while the task runs: text as it is, else one line."""
    value = data_value(data, content_type)
    return _text(value, indent=-1) + ("" if isinstance(value, str) else "\n")


def _text(value: Any, *, indent: int = 2) -> str:
    """Returns what data_value returned as a person can read it: JSON or text, shortened, or else the number of bytes.
    `indent` -1: JSON on one line.
    """
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    shown = value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    return (
        shown if len(shown) <= TEXT_CHARACTERS_MAX else f"{shown[:TEXT_CHARACTERS_MAX]} … ({len(shown):,} characters)"
    )

"""Run streams by hand: frames up when the test says so, and everything that came down. And a master's metrics."""

import threading
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet


def scrape(fleet: Fleet) -> str:
    """The metrics of a master with `--metrics-listen 127.0.0.1:0`."""
    address = fleet.master.events("metrics are served")[0]["address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def run_frame(kind: str, *pairs: tuple[str, bytes], received: int = 0, **spec: Any) -> task_service_pb2.RunRequest:
    """A RunRequest of (request_id, payload) pairs."""
    inputs = [task_pb2.TaskInput(request_id=r, payload=p, partials_received=received) for r, p in pairs]
    batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind=kind, **spec), inputs=inputs)
    return task_service_pb2.RunRequest(batches=[batch])


class Feed:
    """The upward half of a Run stream: frames are sent as they are put."""

    def __init__(self, *frames: Any) -> None:
        self._frames = list(frames)
        self._changed = threading.Condition()
        self._closed = False

    def put(self, frame: Any) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._closed, timeout=60)
            if not self._frames:
                raise StopIteration
            return self._frames.pop(0)


@dataclass(slots=True)
class Heard:
    """What a Run stream said."""

    accepted: list[Any] = field(default_factory=list)
    rejected: list[Any] = field(default_factory=list)
    partials: list[Any] = field(default_factory=list)
    outcomes: list[Any] = field(default_factory=list)


def collect(stream: Iterable[Any]) -> Heard:
    """Everything that a Run stream says until it ends."""
    heard = Heard()
    for frame in stream:
        heard.accepted += frame.accepted
        heard.rejected += frame.rejected
        heard.partials += frame.partials
        heard.outcomes += frame.outcomes
    return heard

"""One request_id, another task: an error that says what differs, never the first one's result. While the first task
waits, once it has ended, and after a restart; small payloads and large ones, by bytes and by reference.
"""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import multigpu
import pytest

from tests.fleet import Fleet, until
from tests.integration.streams import collect, run_frame

LARGE = bytes(300 << 10)
# What the first task is, and what a second one of its request_id may not be.
FIRST: dict[str, Any] = {"kind": "trial.nap", "payload": b"abc", "parameters": {"seconds": "0.01"}}
OTHERS: dict[str, dict[str, Any]] = {
    "payload": {"payload": b"abd"},
    "kind": {"kind": "echo"},
    "parameters": {"parameters": {"seconds": "0.02"}},
    "content_type": {"payload": "abc"},  # travels as JSON
    "model": {"model": "other", "wait_for_worker": True},
}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet", workers=1, handlers=["trial_handlers"]) as running:
        yield running
        assert not running.faults()


def is_rejected(fleet: Fleet, request_id: str, changes: dict[str, Any], word: str) -> None:
    """Neither `run`, `map` nor `submit` gives the other task, and each error says what differs."""
    task = FIRST | changes
    kind, payload = task.pop("kind"), task.pop("payload")
    with fleet.client() as client:
        with pytest.raises(multigpu.AlreadyExistsError, match=word):
            client.run(kind, payload, request_id=request_id, **task)
        with pytest.raises(multigpu.AlreadyExistsError, match=word):
            client.submit(kind, payload, request_id=request_id, **task)
        (answer,) = client.map(
            kind, [multigpu.Input(payload=payload, request_id=request_id)], return_exceptions=True, **task
        )
        assert isinstance(answer, multigpu.AlreadyExistsError)


@pytest.mark.slow
@pytest.mark.parametrize("durable", [True, False])
def test_a_request_id_that_is_used_for_another_task_is_rejected(fleet: Fleet, durable: bool) -> None:
    first = {k: v for k, v in FIRST.items() if k not in ("kind", "payload")} | {"ephemeral": not durable}
    with fleet.client() as client:
        fleet_waits = first | {"labels": {"nobody": "has"}, "wait_for_worker": True}
        waiting = client.submit("trial.nap", b"abc", request_id="waiting", **fleet_waits)
        assert client.run("trial.nap", b"abc", request_id="ended", **first) == b"cba"
        if durable:
            until(lambda: fleet.stats().outcomes_retained == 1)
        for name in ("waiting", "ended"):
            for word, changes in OTHERS.items():
                is_rejected(fleet, name, changes | {"ephemeral": not durable}, word)
        # How it runs may differ.
        same = first | {"priority": 1, "queue": "other", "attempts_max": 1, "run_timeout_s": 9}
        assert client.run("trial.nap", b"abc", request_id="ended", **same) == b"cba"
        again = client.submit("trial.nap", b"abc", request_id="waiting", **same, wait_for_worker=True)
        assert again.id == waiting.id


def test_a_large_payload_that_lies_in_a_file_is_told_from_another_of_its_size(fleet: Fleet) -> None:
    other = LARGE[:-1] + b"x"
    waits: dict[str, Any] = {"labels": {"nobody": "has"}, "wait_for_worker": True}
    with fleet.client() as client, contextlib.closing(fleet.client()) as waiter, ThreadPoolExecutor() as pool:
        assert client.run("echo", LARGE, request_id="ended") == LARGE
        waiting = pool.submit(waiter.run, "echo", LARGE, request_id="waiting", **waits)
        until(lambda: fleet.stats().queued == 1 and fleet.stats().outcomes_retained == 1)
        time.sleep(1)  # a task of which nobody is told is on the disk within half a second
        for restart in (False, True):
            if restart:
                fleet.restart_master()
                fleet.wait_for_workers()
            for name in ("ended", "waiting"):
                with pytest.raises(multigpu.AlreadyExistsError, match="payload"):
                    client.run("echo", other, request_id=name)
                with pytest.raises(multigpu.AlreadyExistsError, match="payload"):
                    client.submit("echo", other, request_id=name)  # sends the bytes
        waiter.close()
        assert isinstance(waiting.exception(), multigpu.ClientClosedError)


def test_different_tasks_with_one_request_id_in_a_frame_are_distinguished(fleet: Fleet) -> None:
    heard = collect(fleet.tasks.Run(iter([run_frame("echo", ("one", b"a"), ("one", b"b"))]), timeout=30))
    assert [outcome.result for outcome in heard.outcomes] == [b"a"]
    assert [(r.request_id, r.code) for r in heard.rejected] == [("one", 6)]
    inputs = [multigpu.Input(payload=data, request_id="two") for data in (b"a", b"b", b"a")]
    with fleet.client() as client:
        answers = list(client.map("echo", inputs, return_exceptions=True))
    assert answers[0] == answers[2] == b"a"
    assert isinstance(answers[1], multigpu.AlreadyExistsError)

"""TaskHandles against a real fleet: results, timeouts, many at a time, other processes, restarts, and tasks that are
gone.
"""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import multigpu
import pytest

from tests.fleet import Fleet

FLEET = {"workers": 2, "handlers": ["trial_handlers"], "master_flags": ["--token-calls-max", "100"]}


def test_a_handle_has_the_result_and_all_that_is_known_of_its_task(fleet: Fleet) -> None:
    with fleet.client() as client:
        handle = client.submit("echo", {"n": 1}, request_id="whole")
        assert handle.result(120) == {"n": 1}
        assert handle.done()
        outcome = handle.outcome()
        assert (outcome.task_id, outcome.request_id, handle.request_id) == (handle.id, "whole", "whole")
        assert handle.status().task_id == handle.id
        assert str(handle.id) in repr(handle)
        assert handle.cancel() is False
        with pytest.raises(TypeError, match=r"send its id, and use client\.handle"):
            pickle.dumps(handle)


def test_a_timeout_is_an_error_and_the_task_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fleet.client() as client:
        handle = client.submit("trial.gate", str(gate).encode())
        with pytest.raises(TimeoutError, match="the task goes on"):
            handle.result(0.2)
        with pytest.raises(multigpu.CallTimeoutError):
            list(multigpu.as_completed([handle], timeout=0.1))
        assert not handle.done()
        assert handle.explain().task.task_id == handle.id
        gate.touch()
        assert handle.result(120) == b"opened"


def test_cancelled_and_failed_tasks_raise_their_error(fleet: Fleet, tmp_path: Path) -> None:
    with fleet.client() as client:
        waiting = client.submit("trial.gate", str(tmp_path / "never").encode())
        assert waiting.cancel("no need")
        with pytest.raises(multigpu.TaskCancelled, match="no need"):
            waiting.result(120)
        failing = client.submit("fail", b"", attempts_max=1)
        with pytest.raises(multigpu.TaskError):
            failing.result(120)
        assert not failing.outcome().succeeded
        good = client.submit("echo", b"x")
        errors = multigpu.gather([failing, good, waiting], return_exceptions=True)
        assert isinstance(errors[0], multigpu.TaskError)
        assert errors[1] == b"x"
        assert isinstance(errors[2], multigpu.TaskCancelled)
        with pytest.raises(multigpu.TaskError):
            multigpu.gather([good, failing])
        assert [outcome.succeeded for outcome in multigpu.wait([failing, good])] == [False, True]


def test_many_handles(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fleet.client() as client:
        slow = client.submit("trial.gate", str(gate).encode())
        answers = client.submit_many("echo", [b"%d" % n for n in range(12_000)])  # more than the client's window
        handles = [handle for handle in answers if isinstance(handle, multigpu.TaskHandle)]
        assert len(handles) == 12_000
        assert multigpu.gather(handles, timeout=60) == [b"%d" % n for n in range(12_000)]
        order = multigpu.as_completed([slow, *handles[:50]], timeout=30)
        first = [next(order) for _ in range(50)]
        assert slow not in first
        gate.touch()
        assert list(order) == [slow]
        assert (multigpu.gather([]), list(multigpu.as_completed([]))) == ([], [])


def test_a_handle_outlives_its_client_and_the_master(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fleet.client() as client:
        first = client.submit("trial.gate", str(gate).encode(), request_id="outlives")
    with fleet.client() as client:
        by_id, by_name = client.handle(first.id), client.handle("outlives")
        assert (by_id.request_id, by_name.id) == ("outlives", first.id)
        with pytest.raises(multigpu.NotFoundError):
            client.handle("never submitted")
        with pytest.raises(TimeoutError):
            by_name.result(0.1)
        fleet.restart_master()
        gate.touch()
        assert by_name.result(60) == b"opened"
        assert by_id.result(120) == b"opened"
    with pytest.raises(multigpu.ClientClosedError):
        client.handle(first.id)
    script = "import sys, multigpu\nprint(multigpu.Client(sys.argv[1]).handle(int(sys.argv[2])).result(120))"
    argv = [sys.executable, "-c", script, fleet.address, str(first.id)]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=400, check=True).stdout == "b'opened'\n"


def test_a_handle_gives_the_outcome_of_its_own_task(fleet: Fleet) -> None:
    """It gave that of the task that had its request_id last."""
    with fleet.client() as client:
        first = client.submit("fail", b"no", request_id="again", attempts_max=1)
        assert not client.get(first.id, wait_s=30).outcome.succeeded  # type: ignore[union-attr]
        second = client.submit("echo", b"yes", request_id="again", retry_failed=True)
        assert second.result(120) == b"yes"
        assert (first.outcome(120).task_id, first.outcome().succeeded) == (first.id, False)
        assert client.handle(first.id).outcome(120).task_id == first.id
        (unnamed,) = fleet.submit("echo", b"unnamed")
        assert client.handle(unnamed).result(120) == b"unnamed"


def test_a_wait_that_ends_early_cancels_nothing(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fleet.client() as client:
        handles = [client.submit("trial.gate", str(gate).encode()), client.submit("echo", b"x")]
        ended = multigpu.as_completed(handles, timeout=60)
        assert next(ended) is handles[1]
        ended.close()
        gate.touch()
        assert handles[0].result(120) == b"opened"


def test_a_follower_has_all_partial_outputs_and_leaves_the_task_alone(fleet: Fleet) -> None:
    parameters = {"count": "12", "seconds": "0.1"}
    with fleet.client() as client, fleet.client() as other:
        handle = client.submit("trial.stream", b"x", parameters=parameters)
        parts = handle.follow()
        first = next(parts)
        assert not isinstance(first, multigpu.Outcome)
        assert (first.data, first.content_type) == (b"x-0", "")
        parts.close()
        assert not handle.done()
        *partials, last = other.handle(handle.id).follow(timeout=30)
        assert [part.data for part in partials] == [b"x-%d" % n for n in range(12)]  # type: ignore[union-attr]
        assert isinstance(last, multigpu.Outcome)
        assert last.result == b"end of x"
        failed = client.submit("trial.wrong_type", b"")
        (last,) = failed.follow()
        assert isinstance(last, multigpu.Outcome)
        assert last.error_type == "WrongResultType"


def test_a_follower_gets_its_own_task_also_if_another_has_its_request_id(fleet: Fleet) -> None:
    parameters = {"count": "3", "seconds": "0"}
    with fleet.client() as client:
        failed = client.submit("trial.wrong_type", b"", request_id="follow again")
        assert failed.outcome(120).error_type == "WrongResultType"
        again = client.submit("trial.stream", b"x", parameters=parameters, request_id="follow again", retry_failed=True)
        (last,) = failed.follow(timeout=120)
        assert isinstance(last, multigpu.Outcome)
        assert (last.task_id, last.error_type) == (failed.id, "WrongResultType")
        *parts, last = again.follow(timeout=120)
        assert (len(parts), getattr(last, "task_id", 0)) == (3, again.id)
        (task_id,) = fleet.submit("trial.stream", b"x", parameters=parameters)
        *parts, last = client.handle(task_id).follow(timeout=120)  # it has no request_id
        assert (len(parts), getattr(last, "task_id", 0)) == (3, task_id)


def test_a_list_has_pages(fleet: Fleet) -> None:
    with fleet.client() as client:
        ids = [handle.id for handle in client.submit_many("echo", [b"x"] * 5, queue="pages")]  # type: ignore[union-attr]
        first, token = client.list_page(page_size=3, queue="pages")
        rest, end = client.list_page(page_size=3, page_token=token, queue="pages")
        assert [task.task_id for task in (*first, *rest)] == ids[::-1]
        assert (len(first), end) == (3, "")
        with pytest.raises(multigpu.InvalidTaskError, match="page_token"):
            client.list_page(page_token="x")


def test_handles_of_another_client_are_rejected(fleet: Fleet) -> None:
    with fleet.client() as one, fleet.client() as other:
        handles: Any = [one.submit("echo", b"1"), other.submit("echo", b"2")]
        with pytest.raises(TypeError, match="of one Client"):
            multigpu.gather(handles)


async def test_asyncio_takes_handles(fleet: Fleet, tmp_path: Path) -> None:
    async with multigpu.AsyncClient(fleet.address) as client:
        one, two = await client.submit("echo", b"1"), await client.submit("echo", b"2")
        assert await one == b"1"
        assert list(await asyncio.gather(one, two)) == [b"1", b"2"]
        assert sorted([await each for each in asyncio.as_completed([one, two])]) == [b"1", b"2"]
        assert await (await client.handle(two.id)) == b"2"
        handles: Any = [one]
        with pytest.raises(TypeError, match=r"asyncio\.gather"):
            multigpu.gather(handles)
        waiting = await client.submit("trial.gate", str(tmp_path / "gate").encode())
        task = asyncio.create_task(waiting.result())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await waiting.done()
        assert await waiting.cancel()


def test_two_callers_of_one_task_share_its_outcome(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fleet.client() as client:
        handle = client.submit("trial.gate", str(gate).encode(), request_id="shared")
        with pytest.raises(TimeoutError):
            handle.result(0.1)
        mapped = client.map("trial.gate", [multigpu.Input(payload=str(gate).encode(), request_id="shared")])
        gate.touch()
        assert list(mapped) == [b"opened"]
        assert handle.result(120) == b"opened"

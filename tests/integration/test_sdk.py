"""The Python client against a real fleet: slow readers, clients that die, many threads, asyncio, and plain errors."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import multigpu
import pytest
from multigpu._calls.submitting import Submission, cut

from tests.fleet import Fleet

FLEET = {"handlers": ["trial_handlers"], "master_flags": ["--stream-bytes-max", "4MiB"]}

CLIENT = """
import sys, multigpu
with multigpu.Client(sys.argv[1]) as client:
    inputs = (multigpu.Input(payload=b"%d" % n, request_id=f"outlived-{n}") for n in range(200))
    options = {"parameters": {"log": sys.argv[2], "seconds": "0.01"}}
    for outcome in client.map_outcomes("trial.logged", inputs, ordered=False, **options):
        print(outcome.request_id, outcome.task_id, flush=True)
"""


def test_a_slow_reader_gets_every_result_though_they_pile_up(fleet: Fleet) -> None:
    payloads = [bytes([n]) * (256 << 10) for n in range(100)]  # 25 MiB, and the stream may hold 4
    with fleet.client() as client:
        results = []
        for n, result in enumerate(client.map("echo", payloads)):
            results.append(result)
            if n % 25 == 0:
                time.sleep(0.3)
    assert results == payloads


def test_tasks_of_a_killed_client_are_finished_for_the_next_one(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "executions"
    command = [sys.executable, "-c", CLIENT, fleet.address, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        seen = [first.stdout.readline().split() for _ in range(20)]
        first.kill()
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    again = [line.split() for line in done.stdout.splitlines()]
    assert {tuple(s) for s in seen} <= {tuple(a) for a in again}
    assert sorted(name for name, _ in again) == sorted(f"outlived-{n}" for n in range(200))
    # Not one of them ran twice.
    executions = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert executions == Counter(task_id for _, task_id in again)


def test_a_map_that_was_interrupted_goes_on_when_it_is_run_again(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "executions"
    names = [f"interrupted-{n}" for n in range(60)]
    inputs = [multigpu.Input(payload=b"%d" % n, request_id=name) for n, name in enumerate(names)]
    options: Any = {"parameters": {"log": str(log), "seconds": "0.01"}}
    with fleet.client() as client:
        for _ in range(2):  # with the same client, and at once
            interrupted: Any = client.map_outcomes("trial.logged", inputs, **options)
            seen = [next(interrupted).task_id for _ in range(10)]
            interrupted.close()
        again = list(client.map_outcomes("trial.logged", inputs, **options))
        assert all(outcome.succeeded for outcome in again)
        assert [outcome.task_id for outcome in again[:10]] == seen
        # What ended before was not run again.
        executions = Counter(line.split()[0] for line in log.read_text().splitlines())
        assert {executions[str(task_id)] for task_id in seen} == {1}


async def test_withdrawn_tasks_may_be_submitted_again_and_cancelled_ones_may_not(fleet: Fleet) -> None:
    async with multigpu.AsyncClient(fleet.address) as client:
        names = [f"withdrawn-{n}" for n in range(20)]
        inputs = [multigpu.Input(payload=b"", request_id=name) for name in names]
        submission = Submission(client._core.connection, None, lambda task_id, _: task_id)
        (request,) = cut(client._core.calls.inputs("trial.hang", inputs, {"queue": "w"}, ""))
        await submission.send(request)
        first = submission.results
        await submission.undo()
        final = (await client.submit("trial.hang", b"", request_id="final", queue="w")).id
        await client.cancel("final")
        for name in ("withdrawn-0", "final"):
            found = await client.get(name, wait_s=10)
            assert found.outcome is not None and found.outcome.state == multigpu.OutcomeState.CANCELLED
        await watched(client, *first, final)  # and so they are in the journal, and nowhere else
    fleet.restart_master()
    async with multigpu.AsyncClient(fleet.address) as client:
        second = await client.submit_many("echo", inputs, queue="w")
        assert not set(first) & {handle.id for handle in second if not isinstance(handle, multigpu.RejectedError)}
        ended = [(await client.get(name, wait_s=10)).outcome for name in names]
        assert all(outcome is not None and outcome.succeeded for outcome in ended)
        with pytest.raises(multigpu.TaskCancelled):
            await client.run("trial.hang", b"", request_id="final", queue="w")


async def watched(client: multigpu.AsyncClient, *task_ids: object) -> None:
    """Returns when a watch has yielded the outcomes of all these tasks."""
    left = set(task_ids)
    async for outcome, _ in client.watch(queue="w"):
        left.discard(outcome.task_id)
        if not left:
            return


def test_a_stream_yields_what_the_handler_yielded_and_has_what_it_returned(fleet: Fleet) -> None:
    with fleet.client() as client:
        for _ in range(2):  # as it runs, and once it has ended
            parts = client.stream("trial.mixed", 7, request_id="mixed")
            with pytest.raises(RuntimeError, match="not ended"):
                print(parts.outcome)
            assert (list(parts), parts.outcome.value()) == ([{"given": 7}, b"raw", "text"], [1.5, None])
        outcome = client.get("mixed").outcome
        assert outcome is not None and outcome.partials == [b'{"given":7}', b"raw", b'"text"']
        (listed,) = (task for task in client.list_tasks() if task.request_id == "mixed")
        assert not listed.message.outcome.partial_content_types


def test_clients_that_come_and_go_leave_nothing_on_stderr(fleet: Fleet) -> None:
    code = (
        "import sys, threading, multigpu\n"
        "def use():\n"
        "    for n in range(12):\n"
        "        with multigpu.Client(sys.argv[1]) as client:\n"
        "            assert list(client.map('echo', [b'%d' % n] * 20)) == [b'%d' % n] * 20\n"
        "threads = [threading.Thread(target=use) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    command = [sys.executable, "-c", code, fleet.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    assert not done.stderr


def test_large_payloads_come_back_whole_and_larger_ones_are_rejected(fleet: Fleet) -> None:
    payloads = [bytes([n]) * (size << 20) for n, size in enumerate((1, 8, 31, 3, 31))]
    with fleet.client() as client:
        assert list(client.map("echo", payloads)) == payloads
        with pytest.raises(multigpu.InvalidTaskError, match="payload_bytes_max"):
            client.run("echo", bytes((32 << 20) + 1))
        assert client.run("echo", b"after") == b"after"

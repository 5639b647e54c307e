"""The synchronous Client: threads, forks, Ctrl-C, and the calls it shares with AsyncClient."""

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import multigpu
import pytest
from multigpu import Client
from multigpu.handlers import registered_handlers

from tests.client.calls.test_watch import scripted_outcomes
from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task, ThreadedMaster, echo, failed
from tests.waiting import until


@pytest.fixture(name="master")
def threaded_master() -> Iterator[ScriptedMaster]:
    with ThreadedMaster() as master:
        yield master


@pytest.fixture(name="client")
def synchronous_client(master: ScriptedMaster) -> Iterator[Client]:
    with Client(master.address) as client:
        yield client


def run_program(program: str, address: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, address]
    return subprocess.run(command, capture_output=True, timeout=30, text=True, check=False)


def test_the_calls(master: ScriptedMaster, client: Client) -> None:
    assert client.run("echo", b"x") == b"x"
    assert client.run_outcome("echo", {"a": 1}).value() == {"a": 1}
    task_id = client.submit("echo", 1, request_id="one").id
    assert client.get("one").task_id == task_id
    ids = client.submit_many("echo", (i for i in range(12_000)))
    assert len({handle.id for handle in ids if isinstance(handle, multigpu.TaskHandle)}) == 12_000
    assert master.submits == 3
    assert client.get(task_id, wait_s=1).outcome is not None
    assert list(client.cancel(task_id, "unknown").unknown) == ["unknown"]
    assert client.count().queued == len(master.tasks)
    assert len(list(client.list_tasks())) == len(master.tasks)
    master.partials[b"go"] = [b"a", b"b"]
    assert list(client.stream("echo", b"go")) == [b"a", b"b"]


def test_map(master: ScriptedMaster, client: Client) -> None:
    assert list(client.map("echo", range(5000))) == list(range(5000))
    master.reversed = True
    assert list(client.map("echo", range(5000), max_in_flight=100)) == list(range(5000))
    assert sorted(client.map("echo", range(5000), ordered=False)) == list(range(5000))
    outcomes = list(client.map_outcomes("echo", [multigpu.Input(payload=b"x", request_id="mine")]))
    assert [outcome.request_id for outcome in outcomes] == ["mine"]
    assert list(client.map("echo", [])) == []


@pytest.mark.parametrize("window", [1, 300])
def test_map_pulls_no_more_than_its_window_on_the_callers_thread(window: int) -> None:
    pulled = taken = 0
    ahead = 0

    def items() -> Iterator[int]:
        nonlocal pulled, ahead
        for i in range(2000):
            assert threading.current_thread() is threading.main_thread()
            pulled += 1
            ahead = max(ahead, pulled - taken)
            yield i

    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        for _ in client.map("echo", items(), max_in_flight=window):
            taken += 1
        assert taken == 2000
        assert ahead <= window


def test_a_slow_source_does_not_hold_up_results() -> None:
    events: list[str] = []

    def items() -> Iterator[int]:
        for i in range(100):
            time.sleep(0.01)  # so slow that a chunk ends with each
            events.append(f"in {i}")
            yield i

    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        for value in client.map("echo", items()):
            events.append(f"out {value}")
    assert events.index("out 0") < events.index("in 99")


def test_errors() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        if task.payload == b"0":
            return None  # runs for ever
        return failed("Three") if task.payload == b"3" else echo(spec, task)

    with ThreadedMaster(answer) as master, multigpu.Client(master.address) as client:
        with pytest.raises(multigpu.TaskFailed, match="Three"):
            client.run("echo", 3)
        with pytest.raises(multigpu.TaskFailed):
            list(client.map("echo", range(10_000), ordered=False))
        until(lambda: master.cancelled)
        values = list(client.map("echo", [2, 3, 4], return_exceptions=True))
        assert [type(value) for value in values] == [int, multigpu.TaskFailed, int]
        with pytest.raises(multigpu.NotFoundError):
            client.get(10**9)
        with pytest.raises(multigpu.NotFoundError, match=r"A str is a request_id; a task_id is an int: 1004$"):
            client.get("1004")
    with pytest.raises(multigpu.ClientClosedError):
        client.run("echo", 1)
    with pytest.raises(multigpu.ClientClosedError):
        client.map("echo", [1])


def test_leaving_a_map_early_cancels_the_rest(master: ScriptedMaster, client: Client) -> None:
    master.outcomes_per_frame = 1
    results = client.map("echo", range(1000), max_in_flight=200)
    assert next(results) == 0
    master.gate.clear()
    results.close()
    until(lambda: set(master.cancelled) | set(master.answered) >= {task.request_id for task in master.inputs})


def test_a_chunk_whose_start_is_still_scheduled_when_its_map_is_closed_never_starts() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        left = threading.Event()

        def source() -> Iterator[int]:
            time.sleep(0.01)  # so slow that the chunk ends here
            yield 0
            until(lambda: master.answered)
            time.sleep(0.1)  # and taken
            client._core._thread.loop.call_soon_threadsafe(left.wait, 5)
            yield from range(1, 1000)

        results = client.map("echo", source(), max_in_flight=200)
        assert next(results) == 0
        results.close()
        left.set()
        assert client.run("echo", "after") == "after"
        assert [task.payload for task in master.inputs] == [b"0", b'"after"']


def test_a_failed_map_starts_no_further_tasks() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        if task.payload != b"bad":
            return None  # runs for ever
        time.sleep(0.3)  # until the next chunk has been pulled, and waits for the window
        return failed("Bad")

    def hold() -> None:
        with contextlib.suppress(multigpu.ClientClosedError):
            client.run("echo", b"other")

    with ThreadedMaster(answer) as master, multigpu.Client(master.address, max_in_flight=8) as client:
        for _ in range(6):
            threading.Thread(target=hold, daemon=True).start()
        until(lambda: len(master.inputs) == 6)
        with pytest.raises(multigpu.TaskFailed):
            list(client.map("echo", [b"bad", b"x", b"y", b"z"], max_in_flight=8))
        until(lambda: master.cancelled)
        time.sleep(0.1)
        assert [task.payload for task in master.inputs[6:]] == [b"bad", b"x"]


def test_many_threads_share_a_client() -> None:
    results: dict[int, list[int]] = {}

    with ThreadedMaster() as master, multigpu.Client(master.address) as client:

        def work(start: int) -> None:
            got = [client.run("echo", start + i) for i in range(50)]
            got += client.map("echo", range(start, start + 500))
            results[start] = got

        threads = [threading.Thread(target=work, args=(n * 1000,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert master.streams == 1
    for start in range(0, 8000, 1000):
        assert results[start] == [*range(start, start + 50), *range(start, start + 500)]


def test_closing_ends_a_call_in_another_thread() -> None:
    with ThreadedMaster() as master:
        client = multigpu.Client(master.address)
        master.gate.clear()
        caught: list[BaseException] = []

        def work(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                caught.append(error)

        calls: list[Callable[[], object]] = [
            lambda: client.run("echo", 1),
            lambda: list(client.map("echo", range(10))),
            lambda: list(client.watch()),
        ]
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        until(lambda: len(master.inputs) == 11)
        time.sleep(0.1)
        client.close()
        for thread in threads:
            thread.join(10)
        assert [type(error) for error in caught] == [multigpu.ClientClosedError] * 3
        client.close()


def test_another_thread_may_close_a_stream_during_next() -> None:
    with ThreadedMaster(lambda spec, task: None) as master, multigpu.Client(master.address) as client:
        parts = client.stream("talk", b"", request_id="stopped")

        def stop() -> None:
            until(lambda: master.inputs)
            parts.close()

        closer = threading.Thread(target=stop)
        closer.start()
        assert list(parts) == []
        closer.join()
        until(lambda: master.cancelled == ["stopped"])
        parts.close()
        assert list(parts) == []
        assert client.count().queued == 0, "the client goes on"


def test_a_watch_goes_on_after_a_break_and_ends_at_the_master_when_closed() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        master.watched = scripted_outcomes(8)
        master.watch_break_after = 3
        watch = client.watch()
        assert [next(watch)[0].task_id for _ in range(8)] == list(range(1, 9))
        assert master.watchers == 1
        watch.close()
        until(lambda: master.watchers == 0)
        assert list(watch) == []


def test_a_program_that_never_closes_its_client_ends_without_errors() -> None:
    program = 'import sys, multigpu; client = multigpu.Client(sys.argv[1]); print(client.run("echo", 5))'
    with ThreadedMaster() as master:
        done = run_program(program, master.address)
        assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


@pytest.mark.parametrize("dropped", [True, False])
def test_at_the_end_of_a_program_tasks_of_maps_that_were_left_are_cancelled(dropped: bool) -> None:
    """Also if the client was collected just before: its end does not wait for its thread, the interpreter's does."""
    program = f"""
        import sys, time, multigpu
        client = multigpu.Client(sys.argv[1])
        results = client.map("echo", range(3), ordered=False)
        next(results)
        client._core._thread.loop.call_soon_threadsafe(time.sleep, 0.3)
        {"del client, results" if dropped else ""}
    """

    first = threading.Event()

    def answer(spec: Spec, task: Task) -> Reply:
        if not first.is_set():
            first.set()
            return echo(spec, task)
        return None  # runs for ever

    with ThreadedMaster(answer) as master:
        done = run_program(textwrap.dedent(program), master.address)
        assert (done.returncode, done.stderr) == (0, "")
        asked = {task.request_id for task in master.inputs} - set(master.answered)
        assert len(asked) == 2
        until(lambda: set(master.cancelled) == asked, 10)


def test_a_collected_client_does_not_wait_for_its_thread() -> None:
    """The garbage collector may run on a thread that holds a lock for which the client's thread waits: a deadlock."""
    client = multigpu.Client("127.0.0.1:1")
    thread = client._core._thread
    lock_released, acquired = threading.Event(), list[bool]()
    thread.loop.call_soon_threadsafe(lambda: acquired.append(lock_released.wait(20)))
    del client
    lock_released.set()
    until(lambda: not thread._thread.is_alive())
    assert acquired == [True]


def test_a_collected_generator_does_not_wait_for_its_thread() -> None:
    """It was a deadlock when the garbage collector ran on the client's own thread."""
    with ThreadedMaster() as master:
        master.watched = scripted_outcomes(2)
        client = multigpu.Client(master.address)  # not closed if the test fails: that would wait for ever
        outcomes = client.watch()
        next(outcomes)
        dropped, collected = [outcomes], threading.Event()
        del outcomes

        def collect() -> None:
            dropped.clear()
            collected.set()

        client._core._thread.loop.call_soon_threadsafe(collect)
        assert collected.wait(20)
        assert client.run("echo", 1) == 1
        client.close()


def test_a_client_collected_on_its_own_loop_thread_ends() -> None:
    with ThreadedMaster() as master:
        client = multigpu.Client(master.address)
        assert client.run("echo", 1) == 1
        thread = client._core._thread
        thread.loop.call_soon_threadsafe(client._core._finalizer)
        until(lambda: not thread._thread.is_alive())


INTERRUPTED = {
    "run": 'client.run("sleep", 1)',
    "map": 'list(client.map("sleep", range(100), max_in_flight=50))',
    "stream": 'list(client.stream("sleep", 1))',
    "embed": "client.embed(str(i) for i in range(100))",
    "between": 'it = client.map("sleep", range(100)); next(it); print("first", flush=True); threading.Event().wait(30)',
}


@pytest.mark.parametrize("call", INTERRUPTED)
def test_ctrl_c_cancels_what_the_call_started(call: str) -> None:
    # If confirmations never arrive, the wait is long enough to fail the test, also on a busy machine.
    program = textwrap.dedent(f"""
        import os, sys, threading, multigpu
        from multigpu._transport.run_stream import RunStream

        RunStream.wait_for_cancellations.__defaults__ = (60.0,)
        with multigpu.Client(sys.argv[1]) as client:
            try:
                {INTERRUPTED[call]}
            except KeyboardInterrupt:
                {"raise" if call == "between" else 'print("interrupted", flush=True); os._exit(0)'}
    """)
    first = threading.Event()

    def answer(spec: Spec, task: Task) -> Reply:
        if call == "between" and not first.is_set():
            first.set()
            return echo(spec, task)
        return None  # runs for ever

    with ThreadedMaster(answer) as master:
        process = subprocess.Popen(
            [sys.executable, "-c", program, master.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            until(lambda: master.inputs and not master.cancelled)
            if call == "between":
                assert process.stdout is not None
                assert process.stdout.readline() == "first\n"
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)  # and not 60: the confirmations have come
        finally:
            process.kill()
        assert out == ("" if call == "between" else "interrupted\n"), err
        asked = {task.request_id for task in master.inputs} - set(master.answered)
        assert set(master.cancelled) >= asked
        assert asked


def test_a_handler_without_a_kind_has_its_qualified_name() -> None:
    @multigpu.handler
    def my_handler(value: Any) -> Any:
        return value

    kind = f"{__name__}.test_a_handler_without_a_kind_has_its_qualified_name.<locals>.my_handler"
    assert registered_handlers()[kind].function is my_handler.__wrapped__


@pytest.mark.parametrize("cls", [multigpu.Client, multigpu.AsyncClient])
@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_a_client_is_an_error_with_a_remedy(cls: Any, call: Callable[[Any], Any]) -> None:
    client = cls("127.0.0.1:1")
    with pytest.raises(TypeError, match=f"^{cls.__name__} can't be pickled or copied: make one in each process"):
        call(client)
    if cls is multigpu.Client:
        client.close()

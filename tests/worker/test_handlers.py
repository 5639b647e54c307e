"""User functions in the real engine process: supported forms and failures."""

import asyncio
import json
import math
import os
import signal
from pathlib import Path

import pytest
from multigpu._encoding import MSGPACK, decode
from multigpu.v1 import worker_service_pb2 as pb

from tests.waiting import until_async
from tests.worker.conftest import Start, StartWorker
from tests.worker.scripted_master import SUCCEEDED, ScriptedMaster, Stream


async def still_works(stream: Stream) -> None:
    (report,) = await stream.run_all("t.upper", b"still")
    assert report.result == b"STILL"


async def test_values_and_results_and_async_handlers_on_one_event_loop(stream: Stream) -> None:
    assert "t.upper" in {capability.kind for capability in stream.hello.capabilities}
    reports = await stream.run_all("t.upper", *[b"a%d" % n for n in range(500)])
    assert [report.result for report in reports] == [b"A%d" % n for n in range(500)]
    assert reports[0].content_type == ""
    good, bad = await stream.run_all("t.json", b'{"n": 21}', b"{", content_type="application/json")
    assert (json.loads(good.result), good.content_type) == ({"twice": 42}, "application/json")
    assert (bad.error.type, bad.error.retryable) == ("BadInput", False)
    (nothing,) = await stream.run_all("t.none", b"x")
    assert (nothing.state, nothing.result) == (SUCCEEDED, b"null")
    extra = pb.LeaseExtra(checkpoint=b"before")
    told = await stream.run(9001, b"", attempt=3, extra=extra, kind="t.context", parameters={"a": "b"})
    told_of = {"task_id": 10001, "attempt": 3, "parameters": {"a": "b"}, "checkpoint": "before", "cancelled": False}
    assert json.loads(told.result) == told_of
    loops = [json.loads(report.result) for report in await stream.run_all("t.async", *[b""] * 20)]
    assert 2 <= max(loop["together"] for loop in loops) <= 16
    assert {loop["thread"] for loop in loops} == {"handlers-loop"}


@pytest.mark.parametrize(
    ("kind", "name", "good"), [("t.dict", "dict[str, typing.Any]", b'{"a": 1}'), ("t.quoted_list", "list[int]", b"[7]")]
)
async def test_bytes_for_a_handler_of_json_values(stream: Stream, kind: str, name: str, good: bytes) -> None:
    (parsed,) = await stream.run_all(kind, good, content_type="application/json")
    assert json.loads(parsed.result) in (["a"], 1)
    (raw,) = await stream.run_all(kind, b'{"a": 1}')
    assert (raw.error.type, raw.error.retryable) == ("BadInput", False)
    what = f"the argument 'value' must be {name}: bytes is not a {name.partition('[')[0]}: send a JSON value"
    assert raw.error.message.startswith(what)
    (wrong,) = await stream.run_all(kind, b"3", content_type="application/json")
    assert "send a JSON value" not in wrong.error.message


async def test_generators(stream: Stream) -> None:
    (report,) = await stream.run_all("t.generate", b"")
    assert report.result == b"whole"
    assert [(p.index, p.data) for p in stream.partials] == [(n, b"part%d" % n) for n in range(5)]
    assert stream.events.index(("partial", 1, 4)) < stream.events.index(("report", 1))
    stream.partials.clear()
    (report,) = await stream.run_all("t.generate_async", b"")
    assert [p.data for p in stream.partials] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    stream.partials.clear()
    await stream.run(77, b"", attempt=2, extra=pb.LeaseExtra(partials_received=3), kind="t.generate")
    assert [(p.index, p.data) for p in stream.partials] == [(3, b"part3"), (4, b"part4")]


async def test_partial_does_not_wait_for_the_next_one(stream: Stream) -> None:
    stream.lease([(1, b"")], kind="t.slow_stream")
    await stream.until(lambda: stream.partials, timeout_s=20)  # the next one takes 30 s


async def test_partials_do_not_wait_for_a_heartbeat(master: ScriptedMaster, start_handlers: Start) -> None:
    master.heartbeat_s = 60.0
    _, stream = await start_handlers()
    stream.lease([(1, b"")], kind="t.endless")
    await stream.until(lambda: len(stream.partials) >= 100, timeout_s=30)
    begun = stream.events.index(("partial", 1, 5))
    assert "heartbeat" not in stream.events[begun:]


async def test_exceptions_wrong_results_and_unknown_kinds_fail_the_task(stream: Stream) -> None:
    (report,) = await stream.run_all("t.raise", b"key")
    assert report.state == pb.REPORT_STATE_FAILED
    assert (report.error.type, report.error.retryable) == ("LookupError", False)
    assert report.error.message == "not there: key"
    assert "handlers_for_tests.py" in report.error.traceback
    expected = {"t.system_exit": ("SystemExit", False), "t.wrong_type": ("WrongResultType", False)}
    for kind, verdict in expected.items():
        (report,) = await stream.run_all(kind, b"")
        assert (report.error.type, report.error.retryable) == verdict
    assert "return bytes, None, a JSON value, or what is made of these and NumPy arrays" in report.error.message
    (report,) = await stream.run_all("t.nan", b"")
    assert report.content_type == MSGPACK
    assert math.isnan(decode(report.result, MSGPACK))
    await still_works(stream)
    (report,) = await stream.run_all("t.speechless", b"")
    assert report.error.type == "handlers_for_tests.SpeechlessError"
    (report,) = await stream.run_all("t.surrogates", b"")
    assert report.error.type == "RuntimeError"
    assert report.error.message == "?" * 8192
    assert len(report.error.traceback.encode()) <= 16384
    (report,) = await stream.run_all("t.nobody", b"")
    assert (report.error.type, report.error.retryable) == ("UnknownKind", False)


async def test_retries_are_those_that_the_handler_wants(stream: Stream) -> None:
    for attempt, payload, expected in (
        (1, b"key", ("KeyError", True)),
        (2, b"", ("ConnectionError", True)),  # an OSError
        (3, b"", ("ConnectionError", False)),
        (1, b"value", ("ValueError", False)),
    ):
        report = await stream.run(900 + attempt, payload, attempt=attempt, kind="t.retried")
        assert (report.error.type, report.error.retryable) == expected
        stream.reports.clear()


async def test_result_too_large(start_handlers: Start) -> None:
    _, stream = await start_handlers("--result-bytes-max", "1MiB")
    (report,) = await stream.run_all("t.big", b"1048577")
    assert (report.error.type, report.error.retryable) == ("ResultTooLarge", False)
    (report,) = await stream.run_all("t.big", b"1048576")
    assert len(report.result) == 1 << 20


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [("t.exit", b"0", "exit code 0"), ("t.exit", b"7", "exit code 7"), ("t.segfault", b"", "SIGSEGV")],
)
async def test_death_is_blamed_on_the_running_task(stream: Stream, kind: str, payload: bytes, words: str) -> None:
    await stream.run_all("t.upper", *[b"warm"] * 100)
    # Neighbours before and behind, in the same batch as far as kinds allow, and in the next one.
    stream.lease([(1001, b"0.01")], kind="t.nap")
    stream.lease([(1002, payload)], kind=kind)
    stream.lease([(n, b"after") for n in range(1003, 1103)], kind="t.upper")
    (dead,) = await stream.reported(1002)
    assert (dead.error.type, dead.error.retryable) == ("EngineDied", True)
    assert words in dead.error.message
    assert {report.state for report in await stream.reported(1001, *range(1003, 1103))} == {SUCCEEDED}
    await still_works(stream)


async def test_handler_that_closes_all_descriptors_is_charged_alone(start_handlers: Start) -> None:
    process, stream = await start_handlers()
    await stream.run_all("t.upper", b"warm")
    stream.lease([(1001, b"")], kind="t.close_all")
    stream.lease([(1002, b"after")], kind="t.upper")
    closed, after = await stream.reported(1001, 1002)
    assert (closed.error.type, closed.error.retryable) == ("EngineDied", True)
    assert after.state == SUCCEEDED
    assert process.log.count('"event": "engine died"') <= 2


async def test_other_tasks_of_the_batch_continue(stream: Stream) -> None:
    await stream.run_all("t.nap", *[b"0.0001"] * 200)  # learns that naps are short
    stream.lease([(n, b"0.0001" if n != 1050 else b"not a number") for n in range(1001, 1100)], kind="t.nap")
    reports = await stream.reported(*range(1001, 1100))
    assert [r.lease_id for r in reports if r.state != SUCCEEDED] == [1050]


@pytest.mark.parametrize("kind", ["t.hang", "t.spin"])
async def test_run_timeout(start_handlers: Start, kind: str) -> None:
    process, stream = await start_handlers()
    await still_works(stream)
    engine = process.engine_pids()
    stream.lease([(1001, b"")], kind=kind, run_timeout={"nanos": 300_000_000})
    stream.lease([(n, b"") for n in range(1002, 1005)], kind="t.upper")
    (report,) = await stream.reported(1001)
    assert (report.error.type, report.error.retryable) == ("RunTimeout", True)
    await stream.reported(1002, 1003, 1004)
    assert process.engine_pids() != engine
    assert "0.3 s" in report.error.message


async def test_no_progress(start_handlers: Start) -> None:
    _, stream = await start_handlers("--progress-timeout-s", "1")
    (good,) = await stream.run_all("t.progress", b"30")  # 1.5 s in all, but it moves
    assert good.result == b"done"
    (report,) = await stream.run_all("t.hang", b"")
    assert (report.error.type, report.error.retryable) == ("NoProgress", True)


@pytest.mark.slow
async def test_out_of_memory_is_a_clean_failure_of_private_and_shared_memory(start_handlers: Start) -> None:
    process, stream = await start_handlers("--engine-memory-bytes", "600MiB")
    await still_works(stream)
    engine = process.engine_pids()
    (report,) = await stream.run_all("t.hoard", b"")
    assert (report.error.type, report.error.retryable) == ("OutOfMemory", True)
    assert "in hoard" in report.error.traceback
    await still_works(stream)
    assert process.engine_pids() == engine
    (report,) = await stream.run_all("t.shared_hoard", b"")
    assert (report.error.type, report.error.retryable) == ("OutOfMemory", True)
    assert "engine_memory_bytes" in report.error.message
    await still_works(stream)


async def test_slots_run_concurrently_and_a_timeout_spares_others(start_handlers: Start) -> None:
    _, stream = await start_handlers("--slots", "4")
    stream.lease([(1, b"")], kind="t.hang", run_timeout={"nanos": 400_000_000})
    stream.lease([(2, b"1.0")], kind="t.nap")
    hung, napped = await stream.reported(1, 2)
    assert hung.error.type == "RunTimeout"
    assert napped.result == b"1.0"  # from the next engine, and not charged
    await still_works(stream)
    stream.lease([(2000 + n, b"30") for n in range(4)], kind="t.nap")
    stream.lease([(3000, b"still")], kind="t.upper")
    await stream.until(lambda: sum(held.running for held in stream.heartbeats[-1].leases) == 4)
    stream.revoke(2000)  # naps on, in vain; the slots are taken
    assert 3000 not in stream.reports


async def test_output_goes_to_the_log_and_is_truncated_if_it_is_excessive(start_handlers: Start) -> None:
    process, stream = await start_handlers()
    (report,) = await stream.run_all("t.print", b"hello")
    assert report.result == b"printed"
    await still_works(stream)
    assert "a line from user code: hello" in process.log
    assert "and one past Python" in process.log
    assert "trouble" in process.log
    (report,) = await stream.run_all("t.flood", b"")
    assert report.result == b"done"
    await asyncio.sleep(1.2)
    await stream.run_all("t.print", b"afterwards")
    await still_works(stream)
    assert process.log.count("flood ") < 5000
    assert "engine output not logged" in process.log
    assert "afterwards" in process.log


async def test_forked_child_reports_nothing_and_hides_no_death(stream: Stream, tmp_path: Path) -> None:
    for _ in range(5):
        (report,) = await stream.run_all("t.fork", b"")
        assert report.result.startswith(b"parent of ")
        (report,) = await stream.run_all("t.fork_unseen", b"")
        assert report.result == b"parent"
    (report,) = await stream.run_all("t.multiprocessing", b"")
    assert json.loads(report.result) == [1, 2, 3]
    path = tmp_path / "pid"
    (report,) = await stream.run_all("t.fork_and_die", str(path).encode())
    assert report.error.type == "EngineDied"
    assert "exit code 5" in report.error.message
    await still_works(stream)
    status = Path(f"/proc/{path.read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()  # dead, if not reaped


async def test_killed_engine_is_replaced_again_and_again(start_handlers: Start) -> None:
    process, stream = await start_handlers()
    stream.lease([(1, b"600"), (2, b"0.01"), (3, b"0.01")], kind="sleep")
    await stream.until(lambda: any(h.leases and h.leases[0].running for h in stream.heartbeats))
    os.kill(process.engine_pids()[0], signal.SIGKILL)
    first, second, third = await stream.reported(1, 2, 3)
    assert (first.error.type, first.error.retryable) == ("EngineDied", True)
    assert "SIGKILL" in first.error.message
    assert (second.result, third.result) == (b"0.01", b"0.01")
    for _ in range(4):
        await still_works(stream)
        os.kill(process.engine_pids()[0], signal.SIGKILL)
    await still_works(stream)


async def test_checkpoint_arrives_before_the_failure(stream: Stream) -> None:
    for n, kind in enumerate(["t.checkpoint_then_raise", "t.checkpoint_then_exit"], 1):
        (report,) = await stream.run_all(kind, b"it")
        assert report.state == pb.REPORT_STATE_FAILED
        carrying = [h for h in stream.heartbeats for held in h.leases if held.lease_id == n and held.checkpoint]
        assert [held.checkpoint for h in carrying for held in h.leases if held.lease_id == n] == [b"kept it"]
        report_at = stream.events.index(("report", n))
        assert "heartbeat" in stream.events[:report_at]


async def test_progress_is_reported(stream: Stream) -> None:
    await stream.run_all("t.progress", b"10")
    held = [h.leases[0] for h in stream.heartbeats if h.leases]
    assert any(0 < lease.progress.fraction < 1 and lease.progress.note.startswith("step") for lease in held)
    steps = [lease.progress.steps for lease in held]
    assert steps == sorted(steps)
    assert steps[-1] > 0


async def test_revoked_while_it_runs(start_handlers: Start, tmp_path: Path) -> None:
    process, stream = await start_handlers("--cancel-grace-s", "0.3")
    await still_works(stream)
    seen, cancelled = tmp_path / "seen", tmp_path / "cancelled"
    stream.lease([(1001, str(seen).encode())], kind="t.until_cancelled")
    stream.lease([(1002, str(cancelled).encode())], kind="t.async_forever")
    stream.lease([(1003, b"")], kind="t.hang")
    stream.lease([(1004, b"x")], kind="t.upper")
    engine = process.engine_pids()
    for lease_id in (1001, 1002):
        await stream.running(lease_id)
        stream.revoke(lease_id)
    await stream.running(1003)
    assert process.engine_pids() == engine  # the first two went by themselves
    assert seen.exists()
    assert cancelled.exists()
    stream.revoke(1003)
    await stream.reported(1004)
    assert process.engine_pids() != engine  # the third one did not
    assert set(stream.reports) & {1001, 1002, 1003} == set()


async def test_revoked_while_it_waits(stream: Stream) -> None:
    stream.lease([(1, b"0.3")], kind="t.nap")
    stream.lease([(n, b"x") for n in range(2, 50)], kind="t.raise")
    stream.lease([(50, b"x")], kind="t.upper")
    stream.revoke(*range(2, 50))
    await stream.reported(1, 50)
    # The head of the line may have gone to the engine ahead of its revocation; all others never ran.
    assert set(stream.reports) == {1, 50}


@pytest.mark.slow
async def test_broken_handlers_module(start_worker: StartWorker, tmp_path: Path, master: ScriptedMaster) -> None:
    (tmp_path / "broken_handlers.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "empty_handlers.py").write_text("")
    for module, words in [
        ("broken_handlers", "nothing_of_this_name"),
        ("empty_handlers", "registers no handler"),
        ("missing_handlers", "No module named"),
        ("empty_handlers.py", "give the module's name: empty_handlers"),
        (f"{tmp_path}/empty_handlers.py", "give the module's name: empty_handlers"),
    ]:
        process = await start_worker(master.address, "--handlers", module, pythonpath=tmp_path)
        assert await process.wait() == 3
        assert words in process.log
        assert "--handlers" in process.log


async def test_tracebacks_in_the_log_have_no_values_of_variables(start: Start, tmp_path: Path) -> None:
    """They may be a caller's texts, and structlog's default writes them where rich is installed."""
    (tmp_path / "logging_handlers.py").write_text(
        "import multigpu, structlog\n"
        "@multigpu.handler('logs')\n"
        "def logs(data: bytes) -> bytes:\n"
        "    private = data.decode()\n"
        "    try:\n"
        "        raise ValueError('nothing')\n"
        "    except ValueError:\n"
        "        structlog.get_logger().exception('caught one')\n"
        "    return data\n"
    )
    worker, stream = await start("--handlers", "logging_handlers", pythonpath=tmp_path)
    (report,) = await stream.run_all("logs", b"the words of a caller")
    assert report.state == SUCCEEDED, report
    await until_async(lambda: "ValueError: nothing" in worker.log, what="the traceback")
    assert "caught one" in worker.log
    assert "the words of a caller" not in worker.log

"""Options of calls: the client's defaults, the limit of a call, maps that begin at once, and progress bars."""

import asyncio
import contextlib
import inspect
import io
import math
import pydoc
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import multigpu
import pytest
from multigpu.options import SpecCache

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task, ThreadedMaster, echo
from tests.waiting import until, until_async


def test_defaults_apply_to_every_task_unless_the_call_says_otherwise() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address, defaults={"queue": "night"}) as client:
        client.run("echo", 1)
        urgent = client.with_options(priority=1, labels={"zone": "a"})
        urgent.run("echo", 1)
        list(urgent.map("echo", [1], queue="day"))
        client.run("echo", 1)
        found = [(spec.queue, spec.priority, dict(spec.required_labels)) for spec in master.specs]
        assert found == [("night", 0, {}), ("night", 1, {"zone": "a"}), ("day", 1, {"zone": "a"}), ("night", 0, {})]


def test_a_client_with_other_options_outlives_the_one_it_was_made_of() -> None:
    with ThreadedMaster() as master:
        client = multigpu.Client(master.address).with_options(timeout=30.0)
        assert client.run("echo", 1) == 1
        client.close()
        with pytest.raises(multigpu.ClientClosedError):
            client.with_options(priority=2).run("echo", 1)


def test_closing_one_of_two_clients_closes_both() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        client.with_options(priority=2).close()
        with pytest.raises(multigpu.ClientClosedError):
            client.run("echo", 1)


@pytest.mark.parametrize(
    ("defaults", "error", "text"),
    [({"quee": "night"}, TypeError, "did you mean 'queue'"), ({"request_id": "1"}, TypeError, "belongs to one task"),
     ({"priority": "high"}, multigpu.InvalidTaskError, "priority"), ({"timeout": -1}, multigpu.InvalidTaskError, "-1")],
)  # fmt: skip
def test_a_wrong_default_is_an_error_at_once(defaults: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        multigpu.Client("127.0.0.1:1", defaults=defaults)
    with multigpu.Client("127.0.0.1:1") as client, pytest.raises(error, match=text):
        client.with_options(**defaults)


NO_MASTER: dict[str, Any] = {
    "submit": lambda client: client.submit("echo", 1),
    "run": lambda client: client.run("echo", 1),
    "map": lambda client: list(client.map("echo", [1])),
    "get": lambda client: client.get(1),
    "count": lambda client: client.count(),
    "list_tasks": lambda client: list(client.list_tasks()),
}


@pytest.mark.parametrize("name", NO_MASTER)
def test_a_timeout_limits_the_connecting_too_and_names_the_cause(name: str) -> None:
    with multigpu.Client("127.0.0.1:1", timeout=2.0) as client:
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"within 2 s.*no master.*127\.0\.0\.1:1.*mgpuctl up"):
            NO_MASTER[name](client)
        assert time.monotonic() - begin < 8, "the default of connect_timeout_s is 10 s"


def test_leaving_a_client_that_never_reached_a_master_waits_for_nothing() -> None:
    begin = time.monotonic()
    with pytest.raises(multigpu.CallTimeoutError), multigpu.Client("127.0.0.1:1", timeout=0.1) as client:
        client.run("echo", 1)
    assert time.monotonic() - begin < 1.5, "a confirmation of the withdrawal is waited for, for 2 s"


def test_infinity_lifts_the_clients_limit_for_a_call() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address, timeout=0.2) as client:
        assert client.run("echo", 1, timeout=float("inf")) == 1
        master.answer = lambda _, __: None
        with pytest.raises(multigpu.CallTimeoutError):
            client.run("echo", 1, timeout=None)


def test_the_limit_of_gather_is_of_the_whole_call() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        handles = [client.submit("echo", i) for i in range(50)]
        master.answer = lambda _, __: None
        begin = time.monotonic()
        with pytest.raises(multigpu.CallTimeoutError):
            multigpu.gather(handles, timeout=0.3)
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("source", ["list", "generator"])
def test_a_map_that_nobody_reads_runs_what_may_be_in_flight(source: str) -> None:
    items: Any = list(range(1000)) if source == "list" else (i for i in range(1000))
    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        client.map("echo", items, max_in_flight=400)
        # On a busy host, the time for which a map pulls from an iterator may end with the first chunk.
        until(lambda: len(master.answered) >= (300 if source == "list" else 1))
        time.sleep(0.05)
        assert len(master.answered) <= 400
        assert not master.cancelled


@pytest.mark.parametrize("left_by", ["break", "exception"])
def test_the_end_of_the_client_cancels_a_map_that_was_left_early(left_by: str) -> None:
    def first_only(spec: Spec, task: Task) -> Reply:
        return echo(spec, task) if task.payload == b"0" else None

    with ThreadedMaster(first_only) as master:
        with contextlib.suppress(ArithmeticError), multigpu.Client(master.address) as client:
            unread = client.map("echo", [multigpu.Input(payload=1, request_id="nobody reads it")])
            results = client.map("echo", range(1000))  # the name keeps the iterator open
            assert next(results) == 0
            if left_by == "exception":
                raise ArithmeticError
        asked = {task.request_id for task in master.inputs} - set(master.answered) - {"nobody reads it"}
        assert len(asked) > 100
        until(lambda: asked <= set(master.cancelled))
        assert "nobody reads it" not in master.cancelled
        del unread, results


def test_a_map_returns_before_a_slow_source_has_its_items() -> None:
    pulled = 0

    def slow() -> Iterator[int]:
        nonlocal pulled
        while True:
            time.sleep(0.01)
            pulled += 1
            yield pulled

    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        results = client.map("echo", slow())
        assert pulled < 50
        assert next(results) == 1


def test_a_map_of_a_closed_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigpu._calls.mapping._BEGIN_S", 0.0)  # its source has been pulled from no further
    with ThreadedMaster() as master:
        client = multigpu.Client(master.address)
        results = client.map("echo", iter(range(10)))
        client.close()
        with pytest.raises(multigpu.ClientClosedError):
            next(results)


def test_the_limit_of_connecting_may_be_infinite() -> None:
    with ThreadedMaster() as master, multigpu.Client(master.address, connect_timeout_s=math.inf) as client:
        assert client.run("echo", 1) == 1
        client.count()


def test_the_two_times_of_an_hour_that_comes_twice_are_two_deadlines() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    specs = SpecCache()
    deadlines = [specs.get("echo", "", {"deadline": first.replace(fold=fold)}).deadline.seconds for fold in (0, 1)]
    assert deadlines == [first.timestamp(), first.timestamp() + 3600]
    assert specs.get("echo", "", {"deadline": first}) is specs.get("echo", "", {"deadline": first})


async def test_an_asynchronous_map_that_nobody_reads_runs_and_ends() -> None:
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        client.map("echo", range(1000), max_in_flight=400)
        await until_async(lambda: len(master.answered) >= 300)
        await until_async(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "multigpu map feeder"])
        assert len(master.answered) <= 400
        assert not master.cancelled


@pytest.mark.parametrize("cls", [multigpu.Client, multigpu.AsyncClient])
def test_help_explains_every_option_of_every_method(cls: type) -> None:
    methods = {name: each for name, each in vars(cls).items() if "options" in getattr(each, "__annotations__", {})}
    shown = {name: pydoc.plain(pydoc.render_doc(method)) for name, method in methods.items()}
    assert {"submit", "map", "embed", "generate", "infer", "classify", "stream", "with_options"} <= shown.keys()
    for name, text in shown.items():
        parameters = inspect.signature(methods[name]).parameters.values()
        options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        unexplained = [option for option in options if f"    {option}: " not in text and f"`{option}`" not in text]
        unexplained = [option for option in unexplained if option not in ("batch_size", "outputs", "top_k")]  # "As …"
        assert unexplained == [], name
        assert "**options" not in text


def test_progress_counts_tasks_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with ThreadedMaster() as master, multigpu.Client(master.address) as client:
        assert list(client.map("echo", [1, 2, 3], progress=True)) == [1, 2, 3]
    assert "3/3" in shown.getvalue()
    assert "task/s" in shown.getvalue()


async def test_progress_of_an_asynchronous_map(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        assert [value async for value in client.map("echo", [1, 2], progress=True)] == [1, 2]
    assert "2/2" in shown.getvalue()


def test_progress_without_tqdm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with multigpu.Client("127.0.0.1:1") as client, pytest.raises(multigpu.ConfigError, match="pip install tqdm"):
        client.map("echo", [1], progress=True)

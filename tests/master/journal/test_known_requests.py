"""The filter in front of the journal: it may say "perhaps" too often, and never "no" of what was there."""

import asyncio
import threading
import tracemalloc
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, cast

import pytest
from multigpu_master.journal import request_filter as known_requests
from multigpu_master.journal.protocol import JournalError
from multigpu_master.journal.request_filter import CAPACITY_MIN, RequestFilter
from multigpu_master.journal.sqlite.journal import SqliteJournal


class Pages:
    """A journal that knows these pages; `waits` holds up the reading between them."""

    def __init__(self, pages: Sequence[list[str]], waits: threading.Event | None = None) -> None:
        self.pages = pages
        self.waits = waits

    def oldest_cursor(self) -> int:
        return 1

    def newest_cursor(self) -> int:
        return sum(map(len, self.pages))

    def request_ids(self) -> Iterator[list[str]]:
        for page in self.pages:
            yield page
            if self.waits is not None:
                assert self.waits.wait(10)


def load(known: RequestFilter, journal: Pages, pending: Sequence[str]) -> Coroutine[Any, Any, None]:
    return known.load(cast(SqliteJournal, journal), pending)


def names(prefix: str, n: int) -> list[str]:
    return [f"{prefix}-{i}" for i in range(n)]


def test_everything_is_perhaps_known_before_it_is_loaded() -> None:
    assert RequestFilter().sift(["a", "b"]) == ["a", "b"]


async def test_never_no_of_what_was_there_and_seldom_perhaps_of_what_was_not() -> None:
    known = RequestFilter()
    stored, pending, added = names("stored", 20_000), names("pending", 50), names("added", 20_000)
    await load(known, Pages([stored[:7], stored[7:]]), pending)
    known.add(added)
    there = stored + pending + added
    assert known.sift(there) == there
    assert len(known.sift(names("new", 20_000))) < 300  # of about 190 on the average


async def test_what_is_added_while_it_is_made_anew_is_kept() -> None:
    known, waits = RequestFilter(), threading.Event()
    loading = asyncio.ensure_future(load(known, Pages([names("stored", 5)], waits), []))
    await asyncio.sleep(0.05)
    known.add(["meanwhile"])
    waits.set()
    await loading
    assert known.sift(["meanwhile", "stored-4"]) == ["meanwhile", "stored-4"]


async def test_what_is_added_before_it_begins_to_be_made_anew_is_kept() -> None:
    known = RequestFilter()
    loading = asyncio.ensure_future(load(known, Pages([names("stored", 5)]), []))
    known.add(["before"])  # the loop has not come to it yet
    await loading
    assert known.sift(["before", "stored-4"]) == ["before", "stored-4"]


async def test_it_is_made_anew_once_more_is_new_than_was_loaded() -> None:
    known = RequestFilter()
    await load(known, Pages([]), [])
    assert not known.full
    many = names("many", CAPACITY_MIN + 1)
    for at in range(0, len(many), 1000):
        known.add(many[at : at + 1000])
    assert known.full
    assert known.sift(many) == many
    await load(known, Pages([many]), [])
    assert not known.full
    assert known.sift(many) == many


@pytest.mark.slow
async def test_two_bytes_a_request_id() -> None:
    known = RequestFilter()
    pages = [names(f"page-{n}", 10_000) for n in range(200)]
    tracemalloc.start()
    try:
        await load(known, Pages(pages), [])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * sum(map(len, pages)) + (1 << 20)
    assert known.sift(pages[77]) == pages[77]


class FailsOnce(Pages):
    failed = False

    def request_ids(self) -> Iterator[list[str]]:
        if not self.failed:
            self.failed = True
            raise JournalError("the disk does not answer")
        return super().request_ids()


async def test_a_load_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_requests, "RETRY_S", 0.01)
    known = RequestFilter()
    loading = asyncio.ensure_future(load(known, FailsOnce([names("stored", 5)]), []))
    known.add(["meanwhile"])
    await loading
    assert known.sift(["meanwhile", "stored-4", "new"]) == ["meanwhile", "stored-4"]

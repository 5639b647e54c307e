"""The filter of known request_ids: it may take a new one for known, and never the reverse."""

import asyncio
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from multigpu_master.errors import JournalError
from multigpu_master.journal import request_filter as known_requests
from multigpu_master.journal.request_filter import CAPACITY_MIN, RequestFilter
from multigpu_master.journal.sqlite.journal import SqliteJournal


class Pages:
    """A journal that knows these pages. The first attempts to read it raise `failures`."""

    def __init__(self, pages: Sequence[list[str]], failures: Sequence[Exception]) -> None:
        self.pages = pages
        self.failures = list(failures)

    def oldest_cursor(self) -> int:
        return 1

    def newest_cursor(self) -> int:
        return sum(map(len, self.pages))

    def request_ids(self) -> Iterator[list[str]]:
        if self.failures:
            raise self.failures.pop()
        yield from self.pages


def journal(*pages: list[str], failures: Sequence[Exception] = ()) -> SqliteJournal:
    return cast("SqliteJournal", Pages(pages, failures))


def names(prefix: str, n: int) -> list[str]:
    return [f"{prefix}-{i}" for i in range(n)]


async def test_added_request_ids_are_found_and_few_others() -> None:
    known = RequestFilter()
    stored, pending, added = names("stored", 20_000), names("pending", 50), names("added", 20_000)
    await known.load(journal(stored[:7], stored[7:]), pending)
    known.add(added)
    there = stored + pending + added
    assert known.sift(there) == there
    assert len(known.sift(names("new", 20_000))) < 300  # of about 190 on the average


async def test_a_load_that_fails_for_lack_of_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_requests, "RETRY_S", 0.01)
    known = RequestFilter()
    await known.load(journal(["stored"], failures=[MemoryError()]), [])
    assert known.sift(["stored", "new"]) == ["stored"]


async def test_it_is_made_anew_once_more_is_new_than_was_loaded() -> None:
    known = RequestFilter()
    await known.load(journal([]), [])
    assert not known.full
    many = names("many", CAPACITY_MIN + 1)
    for at in range(0, len(many), 1000):
        known.add(many[at : at + 1000])
    assert known.full
    assert known.sift(many) == many
    await known.load(journal(many), [])
    assert not known.full
    assert known.sift(many) == many


@pytest.mark.slow
async def test_two_bytes_a_request_id() -> None:
    known = RequestFilter()
    pages = [names(f"page-{n}", 10_000) for n in range(200)]
    tracemalloc.start()
    try:
        await known.load(journal(*pages), [])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * sum(map(len, pages)) + (1 << 20)
    assert known.sift(pages[77]) == pages[77]


async def test_a_load_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_requests, "RETRY_S", 0.01)
    known = RequestFilter()
    failures = [JournalError("the disk does not answer")]
    loading = asyncio.ensure_future(known.load(journal(names("stored", 5), failures=failures), []))
    known.add(["meanwhile"])
    await loading
    assert known.sift(["meanwhile", "stored-4", "new"]) == ["meanwhile", "stored-4"]

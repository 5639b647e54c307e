"""Which request_ids the journal may know, in memory: most new tasks need no look at the disk.

A Bloom filter (Bloom, 1970) of one hash over an array of bytes: it may say "perhaps" of a request_id that was never
seen, and then the journal is asked; it never says "no" of one that was. Nothing can be taken out of it, so when it
fills up it is made anew, from what the journal still holds. While it is being made it says "perhaps" of everything.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Protocol

SLOTS_MIN = 1 << 22  # one byte each
FILL_MAX = 1 / 16  # request_ids for each slot; then about 6 % of new ones are looked up in vain


class RequestIds(Protocol):
    """The journal, as far as it matters here."""

    def request_ids(self) -> Iterator[list[str]]: ...


class KnownRequests:
    """See the module. `load` must run once, and again whenever `full`."""

    def __init__(self) -> None:
        self._slots = bytearray(SLOTS_MIN)
        self._count = 0
        self._loaded = False
        self._since: list[str] | None = None  # added while it is being made anew

    @property
    def full(self) -> bool:
        """Whether it is time to make it anew."""
        return self._loaded and self._count > len(self._slots) * FILL_MAX

    def add(self, request_ids: Sequence[str]) -> None:
        """Notes request_ids that the journal is about to know."""
        if self._since is not None:
            self._since.extend(request_ids)
        self._mark(self._slots, request_ids)
        self._count += len(request_ids)

    def sift(self, request_ids: Iterable[str]) -> list[str]:
        """Those that the journal may know."""
        if not self._loaded:
            return list(request_ids)
        slots, mask = self._slots, len(self._slots) - 1
        return [request_id for request_id in request_ids if slots[hash(request_id) & mask]]

    def load(self, journal: RequestIds, pending: Iterable[str]) -> Coroutine[None, None, None]:
        """Makes it anew from what the journal holds, and the request_ids that are on their way to it. What is added
        from this call on, before the coroutine has even begun, is kept.
        """
        self._since = list(pending)
        return self._load(journal, self._since)

    async def _load(self, journal: RequestIds, since: list[str]) -> None:
        slots, count = await asyncio.to_thread(self._read, journal)
        self._mark(slots, since)
        self._slots, self._count = slots, count + len(since)
        self._since = None
        self._loaded = True

    def _read(self, journal: RequestIds) -> tuple[bytearray, int]:
        pages = list[list[str]]()
        count = 0
        for page in journal.request_ids():
            pages.append(page)
            count += len(page)
        size = SLOTS_MIN
        while size * FILL_MAX < 2 * count:
            size *= 2
        slots = bytearray(size)
        for page in pages:
            self._mark(slots, page)
        return slots, count

    @staticmethod
    def _mark(slots: bytearray, request_ids: Iterable[str]) -> None:
        mask = len(slots) - 1
        for request_id in request_ids:
            slots[hash(request_id) & mask] = 1

"""An in-memory filter of the request_ids of settled tasks in the journal. It saves a read of the disk for most new
tasks.

It consists of Bloom filters (Bloom, 1970) that set two bits of one byte for each request_id. They find every request_id
that was added, and a few that were not; for each request_id found, the caller reads the journal. When a filter is full,
another one is added, as in scalable Bloom filters (Almeida et al., 2007). No request_id can be removed. So the filters
are rebuilt from the journal once more request_ids were added than the loaded filter can hold (at least CAPACITY_MIN).
Before the first load, every request_id counts as found.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import combinations

import structlog

from multigpu_master.errors import JournalClosedError
from multigpu_master.journal.sqlite.journal import SqliteJournal

# Bits (1.5 bytes) for each request_id. A full filter finds 4.1 % of new request_ids.
FILTER_BITS = 12
_PAIRS = bytes(1 << a | 1 << b for a, b in combinations(range(8), 2))
CAPACITY_MIN = 1 << 19  # request_ids
RETRY_S = 10.0

log = structlog.get_logger()


class _Filter:
    def __init__(self, capacity: int) -> None:
        self.room = self.capacity = max(capacity, CAPACITY_MIN)  # room: for how many more request_ids
        self._bytes = bytearray(self.capacity * FILTER_BITS // 8)

    def add(self, request_ids: Sequence[str]) -> None:
        self.room -= len(request_ids)
        array, size = self._bytes, len(self._bytes)
        for digest in map(hash, request_ids):
            array[digest % size] |= _PAIRS[(digest >> 40) % len(_PAIRS)]

    def find(self, request_ids: Iterable[str]) -> list[str]:
        array, size = self._bytes, len(self._bytes)
        return [
            request_id
            for request_id in request_ids
            if not _PAIRS[((digest := hash(request_id)) >> 40) % len(_PAIRS)] & ~array[digest % size]
        ]


class RequestFilter:
    """See the module. `load` must run once, and again whenever `full`."""

    def __init__(self) -> None:
        self._filters = [_Filter(0)]  # the newest last; `add` fills the newest only
        self._loaded_capacity = 0
        self._added = 0  # request_ids added since the start of the load that made `_filters[0]`

    @property
    def full(self) -> bool:
        """Whether to load again: more request_ids were added since the last load than the loaded filter can hold."""
        return 0 < self._loaded_capacity < self._added

    def add(self, request_ids: Sequence[str]) -> None:
        """Adds request_ids of settled tasks, whose outcomes will be appended to the journal."""
        self._added += len(request_ids)
        if self._filters[-1].room < len(request_ids):
            self._filters.append(_Filter(self._loaded_capacity // 2))
        self._filters[-1].add(request_ids)

    def sift(self, request_ids: Sequence[str]) -> list[str]:
        """Returns the request_ids that the journal may know, in their order."""
        if not self._loaded_capacity:
            return list(request_ids)
        found = set[str]()
        for each in self._filters:
            found.update(each.find(request_ids))
        return [request_id for request_id in request_ids if request_id in found] if found else []

    def load(self, journal: SqliteJournal, pending: Sequence[str]) -> Coroutine[None, None, None]:
        """Rebuilds the filters from the journal and the `pending` request_ids. Request_ids added after this call are
        kept, even if the coroutine has not begun.
        """
        self._filters.append(_Filter(0))
        self.add(pending)
        return self._load(journal, len(self._filters) - 1)

    async def _load(self, journal: SqliteJournal, first_kept: int) -> None:
        try:
            while (loaded := await asyncio.to_thread(_read, journal)) is None:  # noqa: ASYNC110  no event says when the journal can be read
                await asyncio.sleep(RETRY_S)
        except JournalClosedError:
            return  # the master stops
        self._filters = [loaded, *self._filters[first_kept:]]
        self._loaded_capacity = loaded.capacity
        self._added = sum(f.capacity - f.room for f in self._filters[1:])


def _read(journal: SqliteJournal) -> _Filter | None:
    """Returns a filter of the journal's request_ids, or None, and logs why, if they could not be read: an exception
    would end the load, `full` would stay True, and every settle would begin another load. Raises JournalClosedError.
    """
    try:
        loaded = _Filter(journal.newest_cursor() + 1 - journal.oldest_cursor())
        for page in journal.request_ids():
            loaded.add(page)
    except JournalClosedError:
        raise
    except Exception as error:  # noqa: BLE001  such as MemoryError
        log.warning("the journal's request_ids could not be read: trying again", error=str(error), wait_s=RETRY_S)
        return None
    return loaded

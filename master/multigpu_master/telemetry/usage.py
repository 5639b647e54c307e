"""Usage of devices, summed by queue, submitter, kind and model: written to the journal, and kept in memory for metrics.

The core sums usage by spec. Every FLUSH_S the sums go to the journal, which adds them to the sums of the current
interval. A crash of the master loses the last FLUSH_S of usage. While the disk is full, the sums stay in the core.
"""

import asyncio
from collections.abc import Callable, Collection

from multigpu_master.core.usage import Usage, UsageSums
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import USAGE_INTERVAL_S, Entry, UsageKey, UsageRecord
from multigpu_master.write_buffer import Done, WriteBuffer, set_result_of

FLUSH_S = 10.0
# A call that reads usage waits for at most this long until the newest sums are written.
FLUSH_WAIT_S = 1.0
# At most KEYS_MAX keys have their own sums in an interval, and as many in the metrics. OTHER has the other keys' sums.
KEYS_MAX = 1000
OTHER = UsageKey(queue="(other)", submitter="(other)", kind="(other)", model="(other)")


class UsageFlusher:
    def __init__(self, usage: Usage, write_buffer: WriteBuffer, now: Callable[[], float]) -> None:
        self.totals: dict[UsageKey, UsageSums] = {}  # since the master started
        self._usage = usage
        self._write_buffer = write_buffer
        self._now = now
        self._interval_begin_s = 0  # when the current interval began
        self._keys: set[UsageKey] = set()  # keys with their own sums in the current interval
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._run)

    def stop(self) -> None:
        """Passes the last sums to the journal."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush(None)

    def _run(self) -> None:
        self._flush(None)
        self.start()

    async def flush(self) -> None:
        """Writes the newest sums; returns when they are written, or after FLUSH_WAIT_S."""
        future: asyncio.Future[JournalError | None] = asyncio.get_running_loop().create_future()
        self._flush(set_result_of(future))
        await asyncio.wait([future], timeout=FLUSH_WAIT_S)

    def _flush(self, done: Done | None) -> None:
        """Passes sums to the journal. `done` is called when these and all earlier sums are written. While the disk is
        full, does nothing, and `done` is never called.
        """
        if not self._write_buffer.writable:
            return
        now_s = int(self._now())
        begin_s = now_s - now_s % USAGE_INTERVAL_S
        if begin_s != self._interval_begin_s:
            self._interval_begin_s, self._keys = begin_s, set()
        sums: dict[UsageKey, UsageSums] = {}
        for spec, used in self._usage.pop_sums().items():
            key = UsageKey(spec.queue, spec.submitter, spec.kind, spec.model)
            kept = _key_or_other(key, self._keys)
            self._keys.add(kept)
            sums.setdefault(kept, UsageSums()).add(used)
            self.totals.setdefault(_key_or_other(key, self.totals), UsageSums()).add(used)
        if sums or done is not None:
            records = [UsageRecord(begin_s, key, used) for key, used in sums.items()]
            self._write_buffer.append(Entry(usage=records), done, urgent=done is not None)


def _key_or_other(key: UsageKey, keys: Collection[UsageKey]) -> UsageKey:
    return key if key in keys or len(keys) < KEYS_MAX else OTHER

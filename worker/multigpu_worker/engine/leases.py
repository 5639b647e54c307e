"""Which leases in this process are cancelled, and which can be given back because no slot has begun them."""

import os
import threading
from collections.abc import Iterable

from multigpu_worker.engine.channel import EXIT_FORKED, AgentChannel


class Leases:
    """Shared by all threads. `cancelled` and `unbegun` may be read without a lock."""

    def __init__(self, channel: AgentChannel) -> None:
        # Lease ids. A batch's ids leave it when the batch ends; all do when no batch is left in the process.
        self.cancelled: set[int] = set()
        # Leases that no slot has begun. The value is the set of its batch's leases that were given back.
        self.unbegun: dict[int, set[int]] = {}
        self._channel = channel
        self._begin_lock = threading.Lock()
        self._batches = 0
        self._batches_lock = threading.Lock()

    def add_batch(self, lease_ids: Iterable[int]) -> set[int]:
        """A batch has come. Returns the set that will hold its leases that were given back."""
        with self._batches_lock:
            self._batches += 1
        given_back: set[int] = set()
        self.unbegun.update((lease_id, given_back) for lease_id in lease_ids)
        return given_back

    def end_batch(self, lease_ids: Iterable[int], given_back: set[int]) -> None:
        """A batch has ended. Its leases that were given back may be in another batch again, and be cancelled there."""
        if self.cancelled:
            self.cancelled.difference_update(set(lease_ids) - given_back)
        with self._batches_lock:
            self._batches -= 1
            if self._batches == 0:
                self.cancelled.clear()

    def begin(self, lease_ids: Iterable[int], given_back: set[int]) -> None:
        """Mark leases of a batch as begun: from now on they can't be given back, unless they already were."""
        if self._channel.forked:
            os._exit(EXIT_FORKED)
        with self._begin_lock:
            for lease_id in lease_ids:
                # The lease may have come again in another batch.
                if self.unbegun.get(lease_id) is given_back:
                    del self.unbegun[lease_id]

    def give_back(self, lease_ids: Iterable[int]) -> None:
        """Give back the given leases, except those that a slot has begun."""
        with self._begin_lock:
            given_back = [lease_id for lease_id in lease_ids if lease_id in self.unbegun]
            for lease_id in given_back:
                # In this order: a slot that reads without the lock finds the lease in one of the two sets.
                self.unbegun[lease_id].add(lease_id)
                del self.unbegun[lease_id]
            # Sent under the lock, which a batch also takes before it ends: so this frame precedes the batch's last one.
            self._channel.send(("given_back", given_back))

"""Makes a restart of the master safe: all new ids are unused, and workers reconnect before tasks are dispatched."""

from multigpu_master.core.model import EPOCH_IDS


class IdRange:
    """Issues task_ids and lease_ids from a range reserved in the journal. At `renew_at` the core requests another."""

    def __init__(self, first_id: int) -> None:
        self.begin(first_id)

    def begin(self, first_id: int) -> None:
        """Continues with the ids from `first_id` to the end of the range that contains it: EPOCH_IDS ids."""
        self.next_id = first_id
        self.end = first_id - first_id % EPOCH_IDS + EPOCH_IDS
        self.renew_at = (first_id + self.end) // 2  # request the next range at this id

    def issue(self) -> int:
        """Returns an id that was never issued. Requires next_id < end."""
        self.next_id += 1
        return self.next_id - 1

    def note_requested(self) -> None:
        """Records that the next range was requested, so that it is requested once only."""
        self.renew_at = self.end + 1


class RecoveryHold:
    """Delays dispatch after a restart until all previously connected workers have reported their leases, or until the
    deadline `until_s`.
    """

    def __init__(self) -> None:
        self.until_s = 0.0
        self._expected: dict[str, None] = {}

    def expect(self, worker_id: str) -> None:
        self._expected[worker_id] = None

    def stop_expecting(self, worker_id: str, now: float) -> None:
        """Call when a worker has reconnected, or an operator has removed it (forget): it is no longer awaited."""
        self._expected.pop(worker_id, None)
        if not self._expected:
            self.until_s = min(self.until_s, now)

    @property
    def has_expected(self) -> bool:
        """Whether a worker has not reconnected yet."""
        return bool(self._expected)

    def active(self, now: float) -> bool:
        return now < self.until_s

"""What keeps a new master from undoing the work of the last one: fresh ids, and a wait for the workers it had."""

from multigpu_master.core.model import EPOCH_IDS


class IdRange:
    """Ids of tasks and leases, from a range that the journal has begun. Half-way the next range is requested."""

    def __init__(self, first_id: int) -> None:
        self.begin(first_id)

    def begin(self, first_id: int) -> None:
        """Goes on with the ids from this one to the end of its range."""
        self.next_id = first_id
        self.end = first_id - first_id % EPOCH_IDS + EPOCH_IDS
        self.renew_at = (first_id + self.end) // 2  # request the next range at this id

    def take(self) -> int:
        """An id that was never given out. Only while next_id is below the end."""
        self.next_id += 1
        return self.next_id - 1

    def requested(self) -> None:
        """The next range was requested: once is enough."""
        self.renew_at = self.end + 1


class RecoveryHold:
    """After a restart nothing is dispatched until the workers that were connected are back with their leases, or until
    a deadline.
    """

    def __init__(self) -> None:
        self.until_s = 0.0
        self._expected: dict[str, None] = {}

    def expect(self, worker_id: str) -> None:
        self._expected[worker_id] = None

    def arrived(self, worker_id: str, now: float) -> None:
        """The worker is back, or forgotten."""
        self._expected.pop(worker_id, None)
        if not self._expected:
            self.until_s = min(self.until_s, now)

    def active(self, now: float) -> bool:
        return now < self.until_s

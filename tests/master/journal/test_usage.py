"""Sums of usage in the journal."""

from pathlib import Path

from multigpu_master.core.model import Task
from multigpu_master.core.spec import Spec
from multigpu_master.core.usage import Usage, UsageSums
from multigpu_master.journal.protocol import USAGE_INTERVAL_S, Entry, UsageKey, UsageRecord
from multigpu_master.journal.sqlite.usage import KEPT_S
from multigpu_master.telemetry.usage import KEYS_MAX, OTHER, UsageFlusher

from tests.master.journal.journals import settle
from tests.master.journal.test_journal import opened
from tests.waiting import until

DAY = UsageKey("day", "a", "embed", "minilm")
NIGHT = UsageKey("night", "a", "embed", "minilm")


def record(begin_s: int, key: UsageKey, device_s: float) -> UsageRecord:
    return UsageRecord(begin_s, key, UsageSums(2, 1, device_s, device_s / 2, 10 * device_s, device_s))


def test_sums_grow_within_their_interval_and_are_found_by_period(tmp_path: Path) -> None:
    with opened(tmp_path) as it:
        it.write(Entry(usage=[record(600, DAY, 1.0), record(600, NIGHT, 4.0)]), Entry(usage=[record(600, DAY, 2.0)]))
        it.write(Entry(settles=[settle(1)], usage=[record(1200, DAY, 8.0)]))
        read = it.journal.usage
        assert read(600, 1199, ["queue"]) == [
            (UsageKey("night", "", "", ""), UsageSums(2, 1, 4.0, 2.0, 40.0, 4.0)),
            (UsageKey("day", "", "", ""), UsageSums(4, 2, 3.0, 1.5, 30.0, 3.0)),
        ]
        assert [used.device_s for _, used in read(0, 1e9)] == [15.0]
        assert [used.device_s for _, used in read(1199, 1200)] == [7.0], "the interval that the period touches"
        assert [used.device_s for _, used in read(1200, 1201)] == [8.0]
        assert read(1800, 1e9) == read(0, 600) == []
        assert [key.queue for key, _ in read(0, 1e9, ["queue"], queues=["day"])] == ["day"]
        assert read(0, 1e9, [], queues=[]) == []


def test_old_sums_are_deleted(tmp_path: Path) -> None:
    now_s = KEPT_S + 10 * USAGE_INTERVAL_S
    with opened(tmp_path, clock_s=now_s) as it:
        it.write(Entry(usage=[record(n * USAGE_INTERVAL_S, DAY, 1.0) for n in range(8, 13)]))
        it.journal._sweep_at_s = 0.0
        it.write(Entry(settings={"wakes": b""}))
        until(lambda: [used.succeeded for _, used in it.journal.usage(0, now_s)] == [6])


class Journal:
    """What UsageFlusher writes."""

    def __init__(self) -> None:
        self.writable = True
        self.records: list[UsageRecord] = []

    def append(self, entry: Entry, done: object, *, urgent: bool) -> None:
        del done, urgent
        self.records += entry.usage


def ended(usage: Usage, kind: str, device_s: float = 1.0) -> None:
    usage.add_succeeded([Task(Spec(kind=kind), "", b"")], device_s)


def test_keys_of_an_interval_are_limited() -> None:
    usage, journal = Usage(), Journal()
    clock_s = 1000.0
    usage_log = UsageFlusher(usage, journal, lambda: clock_s)  # type: ignore[arg-type]
    for n in range(KEYS_MAX + 2):
        ended(usage, f"kind-{n}")
    usage_log.stop()
    assert len(journal.records) == KEYS_MAX + 1
    assert journal.records[-1] == UsageRecord(600, OTHER, UsageSums(succeeded=2, device_s=2.0))
    journal.records.clear()
    ended(usage, "kind-0")
    ended(usage, "a new one")
    usage_log.stop()
    assert [each.key.kind for each in journal.records] == ["kind-0", "(other)"]
    journal.records.clear()
    clock_s += USAGE_INTERVAL_S
    ended(usage, "a new one")
    usage_log.stop()
    assert journal.records == [UsageRecord(1200, UsageKey("default", "", "a new one", ""), UsageSums(1, device_s=1.0))]
    assert len(usage_log.totals) == KEYS_MAX + 1


def test_sums_wait_while_the_disk_is_full() -> None:
    usage, journal = Usage(), Journal()
    usage_log = UsageFlusher(usage, journal, lambda: 1000.0)  # type: ignore[arg-type]
    journal.writable = False
    ended(usage, "embed")
    usage_log.stop()
    assert not journal.records
    journal.writable = True
    ended(usage, "embed", 2.0)
    usage_log.stop()
    assert journal.records == [UsageRecord(600, UsageKey("default", "", "embed", ""), UsageSums(2, device_s=3.0))]


def test_the_device_time_of_a_report_is_shared_by_units() -> None:
    usage = Usage()
    one, two = Spec(kind="one"), Spec(kind="two")
    usage.add_succeeded([Task(one, "", b"", units=1), Task(one, "", b"", units=2), Task(two, "", b"", units=5)], 8.0)
    usage.add_failed([Task(two, "", b"")], 4.0)
    assert usage.pop_sums() == {one: UsageSums(2, device_s=3.0), two: UsageSums(1, 1, device_s=9.0)}
    assert usage.pop_sums() == {}

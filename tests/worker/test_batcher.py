"""The batcher as values: what goes together, in which order, and how much of it."""

from collections.abc import Iterable

from multigpu_worker.batcher import Batcher, BatchLimits
from multigpu_worker.session import Lease, Spec

ECHO = Spec(kind="echo")
OTHER = Spec(kind="echo", parameters=(("a", "b"),))
HANDLER = Spec(kind="mine")
ONE_BY_ONE = frozenset({"mine"})


def leases(ids: Iterable[int], spec: Spec = ECHO, payload_bytes: int = 8) -> list[Lease]:
    return [Lease(n, n, 1, spec, b"x" * payload_bytes) for n in ids]


def batcher(slots: int = 1, **limits: float) -> Batcher:
    return Batcher(BatchLimits(**limits), slots)  # type: ignore[arg-type]  # counts and seconds alike


def ids(batch: list[Lease]) -> list[int]:
    return [lease.lease_id for lease in batch]


def pop(made: Batcher) -> list[int]:
    return ids(made.pop(one_by_one=ONE_BY_ONE))


def test_one_spec_a_batch_and_the_oldest_first() -> None:
    made = batcher()
    made.add(ECHO, leases([1, 2]))
    made.add(OTHER, leases([3], OTHER))
    made.add(ECHO, leases([4]))
    assert pop(made) == [1, 2, 4]
    assert pop(made) == [3]
    assert pop(made) == []


def test_no_line_starves_another() -> None:
    made = batcher(tasks_max=2)
    made.add(ECHO, leases([1, 2, 3]))
    made.add(OTHER, leases([4], OTHER))
    made.add(ECHO, leases([5, 6]))
    assert [pop(made) for _ in range(4)] == [[1, 2], [3, 5], [4], [6]]


def test_budget_of_tokens() -> None:
    made = batcher(tokens_max=100)
    made.add(ECHO, leases(range(1, 5), payload_bytes=160))  # 40 tokens each
    made.add(ECHO, leases([5], payload_bytes=10_000))  # more than a whole batch
    made.add(ECHO, leases([6], payload_bytes=0))
    assert [pop(made) for _ in range(4)] == [[1, 2], [3, 4], [5], [6]]


def test_dropped_leases_go_nowhere() -> None:
    made = batcher()
    waiting = leases(range(1, 5))
    made.add(ECHO, waiting)
    for lease in (waiting[0], waiting[2], waiting[3]):
        lease.dropped = True
    assert pop(made) == [2]
    assert pop(made) == []
    gone = leases([7])
    gone[0].dropped = True
    made.add(OTHER, gone)
    made.add(ECHO, leases([8]))
    assert pop(made) == [8]


def test_put_back_goes_first() -> None:
    made = batcher()
    made.add(ECHO, leases([1, 2, 3, 4]))
    batch = made.pop(one_by_one=ONE_BY_ONE)
    made.add(OTHER, leases([5], OTHER))
    made.add(ECHO, leases([6]))
    made.put_back(batch)
    assert pop(made) == [1, 2, 3, 4, 6]


def test_what_is_put_back_keeps_its_order_over_all_kinds() -> None:
    """One that never ends must not overtake those that were before it: they would wait for ever."""
    made = batcher()
    made.add(HANDLER, leases([1], HANDLER))
    made.add(ECHO, leases([2]))
    made.add(OTHER, leases([3], OTHER))
    taken = made.pop(one_by_one=ONE_BY_ONE) + made.pop(one_by_one=ONE_BY_ONE)
    made.put_back(taken)
    assert [pop(made), pop(made)] == [[1], [2]]
    made.put_back(taken[1:])
    made.put_back(taken[:1])
    assert [pop(made) for _ in range(4)] == [[1], [2], [3], []]


def test_suspects_go_in_smaller_batches() -> None:
    made = batcher()
    waiting = leases(range(1, 8))
    for lease in waiting[:4]:
        lease.together_max = 2
    made.add(ECHO, waiting)
    assert [pop(made) for _ in range(3)] == [[1, 2], [3, 4], [5, 6, 7]]
    waiting = leases(range(1, 6))
    waiting[3].together_max = 1
    made.add(ECHO, waiting)
    assert [pop(made) for _ in range(3)] == [[1, 2, 3], [4], [5]]


def test_unknown_speed_begins_with_one_and_grows() -> None:
    made = batcher(tasks_max=256)
    made.add(HANDLER, leases(range(1, 2001), HANDLER))
    sizes = []
    for _ in range(5):
        batch = made.pop(one_by_one=ONE_BY_ONE)
        sizes.append(len(batch))
        made.measure(HANDLER, len(batch), len(batch) * 1e-6)
    assert sizes == [1, 8, 64, 256, 256]


def test_slow_tasks_go_in_batches_of_bounded_time() -> None:
    made = batcher(batch_s=0.05)
    made.add(HANDLER, leases(range(1, 101), HANDLER))
    for _ in range(4):
        batch = made.pop(one_by_one=ONE_BY_ONE)
        made.measure(HANDLER, len(batch), len(batch) * 0.01)
    assert len(made.pop(one_by_one=ONE_BY_ONE)) == 5
    made.measure(HANDLER, 5, 5 * 10.0)
    assert len(made.pop(one_by_one=ONE_BY_ONE)) == 1


def test_every_slot_gets_a_share() -> None:
    made = batcher(slots=4)
    for _ in range(4):
        made.measure(HANDLER, 64, 64 * 1e-6)
    made.add(HANDLER, leases(range(1, 11), HANDLER))
    assert [len(made.pop(one_by_one=ONE_BY_ONE)) for _ in range(4)] == [3, 2, 2, 1]


def test_remembered_speeds_are_bounded() -> None:
    made = batcher()
    for n in range(5000):
        made.measure(Spec(kind=f"k{n}"), 1, 1.0)
    assert len(made._speeds) == 1024

"""The batcher as values: what goes together, in which order, and how much of it."""

from collections.abc import Iterable

from multigpu.v1 import task_pb2
from multigpu_worker.repository.model import BatchRules
from multigpu_worker.session.batcher import AGE_TASKS, Batcher, BatchLimits
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.wire import spec_of

ECHO = Spec(kind="echo")
OTHER = Spec(kind="echo", parameters=(("a", "b"),))
HANDLER = Spec(kind="mine")


def one_by_one(spec: Spec) -> bool:
    return spec.kind == "mine"


def leases(ids: Iterable[int], spec: Spec = ECHO, payload_bytes: int = 8) -> list[Lease]:
    return [Lease(n, n, 1, spec, b"x" * payload_bytes) for n in ids]


def batcher(slots: int = 1, **limits: float) -> Batcher:
    return Batcher(BatchLimits(**limits), slots)  # type: ignore[arg-type]  # counts and seconds alike


def ids(batch: list[Lease]) -> list[int]:
    return [lease.lease_id for lease in batch]


def pop(made: Batcher) -> list[int]:
    return ids(made.pop(one_by_one=one_by_one))


def test_one_spec_a_batch_and_the_oldest_first_and_no_line_starves_another() -> None:
    made = batcher()
    made.add(ECHO, leases([1, 2]))
    made.add(OTHER, leases([3], OTHER))
    made.add(ECHO, leases([4]))
    assert pop(made) == [1, 2, 4]
    assert pop(made) == [3]
    assert pop(made) == []
    made = batcher(tasks_max=2)
    made.add(ECHO, leases([1, 2, 3]))
    made.add(OTHER, leases([4], OTHER))
    made.add(ECHO, leases([5, 6]))
    assert [pop(made) for _ in range(4)] == [[1, 2], [3, 5], [4], [6]]


def test_budget_of_tokens_and_limits_of_a_model() -> None:
    made = batcher(tokens_max=100)
    made.add(ECHO, leases(range(1, 5), payload_bytes=160))  # 40 tokens each
    made.add(ECHO, leases([5], payload_bytes=10_000))  # more than a whole batch
    made.add(ECHO, leases([6], payload_bytes=0))
    assert [pop(made) for _ in range(4)] == [[1, 2], [3, 4], [5], [6]]
    made = batcher(tasks_max=256)
    rules = BatchRules(tasks_max=3)
    made.rules = {(MODEL.kind, "m"): rules, ("mine", "m"): rules}
    made.add(MODEL, leases(range(1, 6), MODEL))
    assert [pop(made), pop(made)] == [[1, 2, 3], [4, 5]]
    slow = Spec(kind="mine", model="m")
    made.measure(slow, 64, 64e-6)
    made.add(slow, leases(range(1, 6), slow))
    assert pop(made) == [1, 2, 3]


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


def test_dropped_leases_do_not_pile_up_in_a_queue_that_can_not_run() -> None:
    """As those of a model that never loads; and it is not asked for when nobody waits for it any more."""
    made = batcher()
    asked: list[Spec] = []

    def may(spec: Spec) -> bool:
        asked.append(spec)
        return False

    for n in range(1, 4):
        (lease,) = leases([n])
        made.add(ECHO, [lease])
        lease.dropped = True
        assert made.pop(one_by_one=one_by_one, may=may) == []
        assert not made._queues
    assert not asked
    waiting = leases(range(4, 7))
    made.add(ECHO, waiting)
    waiting[0].dropped = True
    assert made.pop(one_by_one=one_by_one, may=may) == []
    assert [lease for _, lease in made._queues[ECHO]] == waiting[1:]
    assert asked == [ECHO]


def test_put_back_goes_first_and_keeps_its_order_across_kinds() -> None:
    made = batcher()
    made.add(ECHO, leases([1, 2, 3, 4]))
    batch = made.pop(one_by_one=one_by_one)
    made.add(OTHER, leases([5], OTHER))
    made.add(ECHO, leases([6]))
    made.requeue_first(batch)
    assert pop(made) == [1, 2, 3, 4, 6]
    # A stream of new tasks must not overtake older ones: these would wait forever.
    made = batcher()
    made.add(HANDLER, leases([1], HANDLER))
    made.add(ECHO, leases([2]))
    made.add(OTHER, leases([3], OTHER))
    taken = made.pop(one_by_one=one_by_one) + made.pop(one_by_one=one_by_one)
    made.requeue_first(taken)
    assert [pop(made), pop(made)] == [[1], [2]]
    made.requeue_first(taken[1:])
    made.requeue_first(taken[:1])
    assert [pop(made) for _ in range(4)] == [[1], [2], [3], []]


def test_leases_that_an_engine_gave_back_wait_where_they_waited_before() -> None:
    made = batcher()
    made.add(OTHER, leases([1], OTHER))
    made.add(ECHO, leases([2, 3]))
    taken = made.pop(one_by_one=one_by_one, may=lambda spec: spec is ECHO)
    made.add(ECHO, leases([4]))
    made.requeue_in_place(taken)
    assert [pop(made), pop(made)] == [[1], [2, 3, 4]]


def test_suspects_go_in_smaller_batches() -> None:
    made = batcher()
    waiting = leases(range(1, 8))
    for lease in waiting[:4]:
        lease.batch_size_max = 2
    made.add(ECHO, waiting)
    assert [pop(made) for _ in range(3)] == [[1, 2], [3, 4], [5, 6, 7]]
    waiting = leases(range(1, 6))
    waiting[3].batch_size_max = 1
    made.add(ECHO, waiting)
    assert [pop(made) for _ in range(3)] == [[1, 2, 3], [4], [5]]


def test_batches_grow_with_a_known_speed_and_those_of_slow_tasks_take_bounded_time() -> None:
    made = batcher(tasks_max=256)
    made.add(HANDLER, leases(range(1, 2001), HANDLER))
    sizes = []
    for _ in range(5):
        batch = made.pop(one_by_one=one_by_one)
        sizes.append(len(batch))
        made.measure(HANDLER, len(batch), len(batch) * 1e-6)
    assert sizes == [1, 8, 64, 256, 256]
    made = batcher(batch_s=0.05)
    made.add(HANDLER, leases(range(1, 101), HANDLER))
    for _ in range(4):
        batch = made.pop(one_by_one=one_by_one)
        made.measure(HANDLER, len(batch), len(batch) * 0.01)
    assert len(made.pop(one_by_one=one_by_one)) == 5
    made.measure(HANDLER, 5, 5 * 10.0)
    assert len(made.pop(one_by_one=one_by_one)) == 1


def test_every_slot_gets_a_share() -> None:
    made = batcher(slots=4)
    for _ in range(4):
        made.measure(HANDLER, 64, 64 * 1e-6)
    made.add(HANDLER, leases(range(1, 11), HANDLER))
    assert [len(made.pop(one_by_one=one_by_one)) for _ in range(4)] == [3, 2, 2, 1]


def test_remembered_speeds_are_bounded() -> None:
    made = batcher()
    for n in range(5000):
        made.measure(Spec(kind=f"k{n}"), 1, 1.0)
    assert len(made._speeds) == 1024


URGENT = Spec(kind="echo", priority=1)
LATER = Spec(kind="echo", priority=5)
MODEL = Spec(kind="embed", model="m")


def test_a_higher_priority_which_is_the_tasks_goes_first() -> None:
    made = batcher()
    made.add(LATER, leases([1], LATER))
    made.add(ECHO, leases([2]))
    made.add(URGENT, leases([3, 4], URGENT))
    assert [pop(made) for _ in range(3)] == [[3, 4], [2], [1]]
    assert [spec_of(task_pb2.TaskSpec(kind="echo", priority=n)).priority for n in range(6)] == [3, 1, 2, 3, 4, 5]


def test_age_ends_the_preference() -> None:
    """A stream of urgent tasks without end: one of the lowest level goes after 4 x AGE_TASKS of them, and no later."""
    made = batcher(tasks_max=64)
    made.add(LATER, leases([0], LATER))
    went = []
    for n in range(1, 5 * AGE_TASKS, 32):
        made.add(URGENT, leases(range(n, n + 64), URGENT))
        went += pop(made)
        if 0 in went:
            break
    assert 0 in went
    assert 3 * AGE_TASKS < len(went) <= 4 * AGE_TASKS + 64


def test_lines_that_may_not_go_keep_their_place() -> None:
    made = batcher()
    made.add(MODEL, leases([1], MODEL))
    made.add(ECHO, leases([2]))
    asked: list[str] = []

    def may(spec: Spec) -> bool:
        asked.append(spec.kind)
        return spec.kind == "echo"

    assert ids(made.pop(one_by_one=one_by_one, may=may)) == [2]
    assert asked == ["embed", "echo"]
    assert made.pop(one_by_one=one_by_one, may=may) == []
    assert made.due_s() is None
    made.add(ECHO, leases([3]))
    assert pop(made) == [1]


def growing() -> Batcher:
    made = batcher()
    made.rules = {(MODEL.kind, "m"): BatchRules(tasks_max=10, tokens_max=100, delay_s=0.5, preferred=(4, 8))}
    return made


def pop_at(made: Batcher, now_s: float) -> list[int]:
    return ids(made.pop(one_by_one=one_by_one, now_s=now_s))


def test_a_batch_waits_to_grow_no_longer_than_its_delay_and_not_again_if_it_returns() -> None:
    made = growing()
    made.add(MODEL, leases([1], MODEL))
    assert pop_at(made, 7.0) == []
    assert made.due_s() == 7.5
    made.add(MODEL, leases([2], MODEL))
    made.add(ECHO, leases([3]))
    assert pop_at(made, 7.4) == [3], "others don't wait for it"
    assert pop_at(made, 7.4) == []
    assert made.due_s() == 7.5
    assert pop_at(made, 7.5) == [1, 2]
    assert made.due_s() is None
    made.add(MODEL, leases([4], MODEL))
    assert pop_at(made, 7.6) == []
    assert made.due_s() == 8.1, "each batch has a delay of its own"
    made = growing()
    made.add(MODEL, leases([1], MODEL))
    pop_at(made, 1.0)
    batch = made.pop(one_by_one=one_by_one, now_s=2.0)
    made.requeue_first(batch)
    assert pop_at(made, 2.0) == [1]


def test_a_batch_goes_at_a_preferred_size_or_a_limit() -> None:
    made = growing()
    made.add(MODEL, leases(range(1, 6), MODEL))
    assert pop_at(made, 1.0) == [1, 2, 3, 4], "4 is preferred; 5 waits on"
    assert pop_at(made, 1.0) == []
    made.add(MODEL, leases([6], MODEL, payload_bytes=400))
    assert pop_at(made, 1.1) == [5], "with the next one there is more than the budget of tokens"
    assert pop_at(made, 1.1) == [6]
    made.add(MODEL, leases(range(7, 30), MODEL))
    assert [len(pop_at(made, 1.2)) for _ in range(4)] == [8, 8, 4, 0]


def test_dropped_leases_at_the_head_of_a_batch_that_waits_hide_no_tokens() -> None:
    made = growing()
    waiting = leases([1, 2], MODEL)
    made.add(MODEL, waiting)
    assert pop_at(made, 1.0) == []
    waiting[0].dropped = True
    made.add(MODEL, leases([3], MODEL, payload_bytes=400))
    assert pop_at(made, 1.1) == [2], "with the next one there is more than the budget of tokens"
    waiting = leases([4, 5], MODEL)
    made = growing()
    made.add(MODEL, waiting)
    assert pop_at(made, 2.0) == []
    uncounted = leases([6], MODEL)
    made.add(MODEL, uncounted + leases([7], MODEL))
    for lease in waiting + uncounted:
        lease.dropped = True
    assert pop_at(made, 2.1) == []
    assert pop_at(made, 2.6) == [7]

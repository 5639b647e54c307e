"""When an engine gets its next batch: as late as it can be prepared, so that callers who wait share two batches."""

import heapq
import random

import pytest
from multigpu_worker.session.pace import LEAD_S, LEAD_SHARE, Pace


def test_the_next_batch_is_due_shortly_before_it_is_needed_or_at_once_if_batches_are_short() -> None:
    pace = Pace()
    assert pace.due_s() <= 0.0, "an idle engine waits for nothing"
    pace.begin(1, 100, 5.0)
    assert pace.due_s() <= 5.0, "nothing is known yet"
    pace.begin(2, 300, 5.5)
    pace.end(1, 6.0)
    assert pace.due_s() == pytest.approx(6.0 + 3.0 * (1 - LEAD_SHARE) - LEAD_S)
    pace.end(2, 9.0)
    assert pace.due_s() <= 0.0
    pace.begin(3, 100, 20.0)
    assert pace.due_s() == pytest.approx(20.0 + 1.0 * (1 - LEAD_SHARE) - LEAD_S)
    pace.clear()
    assert pace.due_s() <= 0.0
    # As on a GPU: a batch runs no longer than the next one takes to be prepared.
    pace = Pace()
    pace.begin(1, 16_384, 1.0)
    pace.end(1, 1.01)
    pace.begin(2, 16_384, 1.01)
    assert pace.due_s() <= 1.01


def simulate(*, paced: bool, callers: int = 32, token_s: float = 1e-4, tokens: int = 15) -> tuple[float, float]:
    """A worker that runs a batch and prepares the next; callers ask again 1 to 5 ms after their answers. Tasks in a
    batch on average, and the share of the time that the engine ran.
    """
    drawn = random.Random(18)
    pace, now_s, waiting, ran_s = Pace(), 0.0, callers, 0.0
    inside: list[tuple[int, int]] = []
    sizes: list[int] = []
    events: list[tuple[float, str, int]] = []
    while len(sizes) < 200:
        while waiting and len(inside) < 2 and (not paced or pace.due_s() <= now_s):
            sizes.append(waiting)
            inside.append((len(sizes), waiting))
            pace.begin(len(sizes), waiting * tokens, now_s)
            if len(inside) == 1:
                heapq.heappush(events, (now_s + waiting * tokens * token_s, "done", 0))
            waiting = 0
        if waiting and len(inside) < 2:
            heapq.heappush(events, (pace.due_s(), "due", 0))
        now_s, what, count = heapq.heappop(events)
        if what == "asked":
            waiting += count
        elif what == "done":
            batch_id, size = inside.pop(0)
            pace.end(batch_id, now_s)
            ran_s += size * tokens * token_s
            for _ in range(size):
                heapq.heappush(events, (now_s + drawn.uniform(0.001, 0.005), "asked", 1))
            if inside:
                heapq.heappush(events, (now_s + inside[0][1] * tokens * token_s, "done", 0))
    return sum(sizes[20:]) / len(sizes[20:]), ran_s / now_s


def test_callers_who_wait_for_their_answers_share_two_batches_instead_of_three() -> None:
    size, busy = simulate(paced=True)
    assert size > 15
    assert busy > 0.99
    before, _ = simulate(paced=False)
    assert before < 12, "the comparison could not fail"

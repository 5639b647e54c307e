"""The rules for loading and unloading models: single cases, and a random load."""

import random
from pathlib import Path

import pytest
from multigpu_worker.models.residency import (
    LOADS_MAX,
    PATIENCE_S,
    RETRY_FILES_AT_FAULT_MAX_S,
    RETRY_S,
    ModelState,
    Resident,
    plan,
)
from multigpu_worker.repository.model import ModelSpec

ABSENT, LOADING, READY, UNLOADING = ModelState


def model(name: str, memory_bytes: int = 10, state: ModelState = ABSENT, **more: object) -> Resident:
    spec = ModelSpec(name=name, folder=Path("/nowhere") / name, kind="infer")
    resident = Resident(key=name, spec=spec, memory_bytes=memory_bytes, state=state)
    for field, value in more.items():
        setattr(resident, field, value)
    return resident


def names(residents: list[Resident]) -> list[str]:
    return [resident.key for resident in residents]


def test_models_that_fit_are_loaded_in_the_order_of_waiting_pinned_ones_first() -> None:
    found = plan([model("a", wanted_at=2.0), model("b", wanted_at=1.0), model("c")], 100, 5.0)
    assert names(found.load) == ["b", "a"]
    assert len(plan([model(str(n), wanted_at=1.0) for n in range(9)], 0, 5.0).load) == LOADS_MAX
    old = model("old", 60, READY, pinned=True)
    found = plan([old, model("a", 30, wanted_at=1.0), model("b", 20, wanted_at=2.0, pinned=True)], 100, 5.0)
    assert names(found.load) == ["b"]
    assert not found.unload


def test_the_least_recently_used_idle_models_make_room_and_small_ones_delay_no_large_one() -> None:
    inside = [model("a", 40, READY, used_at=3), model("b", 40, READY, used_at=1), model("c", 15, READY, used_at=2)]
    found = plan([*inside, model("d", 50, wanted_at=9.0)], 100, 9.0)
    assert (names(found.unload), found.load, found.retire) == (["b", "c"], [], [])
    inside[1].leases = 1
    found = plan([*inside, model("d", 50, wanted_at=9.0)], 100, 9.0)
    assert names(found.unload) == ["c", "a"], "a model in use stays if others suffice"
    inside = [model("busy", 60, READY, leases=1, entered_at=9.0)]
    waiting = [model("large", 60, wanted_at=9.0), model("small", 30, wanted_at=9.5)]
    assert not plan([*inside, *waiting], 100, 9.2).load


def test_no_model_is_unloaded_if_others_are_being_unloaded_or_the_room_would_not_suffice() -> None:
    found = plan([model("a", 60, UNLOADING), model("b", 30, READY), model("c", 40, wanted_at=1.0)], 100, 9.0)
    assert not (found.load or found.unload or found.retire)
    inside = [model("idle", 20, READY), model("loading", 70, LOADING)]
    found = plan([*inside, model("large", 90, wanted_at=1.0)], 100, 99.0)
    assert not (found.unload or found.retire)


def test_a_model_in_use_retires_for_a_waiting_one_after_it_was_ready_long_enough() -> None:
    busy = model("busy", 60, READY, leases=5, entered_at=0.0)
    waiting = model("waiting", 60, wanted_at=10.0, load_s=4.0)
    assert not plan([busy, waiting], 100, 10.0 + PATIENCE_S / 2).retire
    assert names(plan([busy, waiting], 100, 10.0 + PATIENCE_S).retire) == ["busy"]
    busy.entered_at = 8.0
    assert not plan([busy, waiting], 100, 11.9).retire, "it was ready for less time than the other takes to load"
    assert names(plan([busy, waiting], 100, 12.0).retire) == ["busy"]


def test_a_model_may_be_too_large_beside_the_pinned_ones_or_larger_than_expected() -> None:
    pinned = model("p", 30, READY, pinned=True)
    found = plan([pinned, model("a", 80, wanted_at=1.0), model("b", 5, wanted_at=2.0)], 100, 3)
    assert [(resident.key, room_bytes) for resident, room_bytes in found.too_large] == [("a", 70)]
    assert names(found.load) == ["b"]
    inside = [model("a", 60, READY, used_at=1.0), model("b", 60, READY, used_at=2.0), model("c", 9, wanted_at=1.0)]
    found = plan(inside, 100, 3.0)
    assert (names(found.unload), found.load) == (["a"], [])


def test_a_failed_load_is_retried_with_a_growing_delay() -> None:
    failing = model("a", wanted_at=1.0)
    failing.record_failure("broken", 10.0)
    assert not plan([failing], 0, 10.0 + RETRY_S / 2).load
    assert plan([failing], 0, 10.0 + RETRY_S).load
    for _ in range(1100):  # e.g. a pinned model that never fits, retried for 18 h
        failing.record_failure("broken", 10.0)
    assert 10.0 < failing.retry_at <= 70.0 + RETRY_S
    for _ in range(20):
        failing.record_failure("its files are cut off", 10.0, files_at_fault=True)
    assert failing.retry_at == 10.0 + RETRY_FILES_AT_FAULT_MAX_S


@pytest.mark.parametrize("seed", range(60))
def test_random_load(seed: int) -> None:
    """A simple worker: it never exceeds its limit, and every model is loaded in bounded time."""
    rng = random.Random(seed)
    limit_bytes = 100
    residents = [
        model(f"m{n}", rng.randint(10, 60), load_s=rng.choice((0.1, 1.0, 3.0)), pinned=rng.random() < 0.05)
        for n in range(rng.randint(2, 8))
    ]
    while sum(r.memory_bytes for r in residents if r.pinned) > 40:
        next(r for r in residents if r.pinned).pinned = False
    served = dict.fromkeys((r.key for r in residents), 0)
    waits_since: dict[str, float] = {}
    now_s, loads = 0.0, 0
    while now_s < 120.0:
        now_s += 0.1
        for resident in residents:
            arrives = rng.random() < (0.98 if resident.key in ("m0", "m1") else 0.1)
            resident.leases += arrives and resident.leases < 5
            if resident.state is READY and resident.leases:
                resident.leases -= 1
                resident.used_at = now_s
                served[resident.key] += 1
            elif resident.state is LOADING and now_s - resident.entered_at >= resident.load_s:
                resident.enter(READY, now_s)
            elif resident.state is UNLOADING and now_s - resident.entered_at >= 0.2:
                resident.enter(ABSENT, now_s)
            wants = resident.state is ABSENT and (resident.leases or resident.pinned)
            resident.wanted_at = (resident.wanted_at or now_s) if wants else None
            if resident.leases and resident.state is not READY:
                waits_since.setdefault(resident.key, now_s)
            else:
                waits_since.pop(resident.key, None)
        found = plan(residents, limit_bytes, now_s)
        for resident, _ in found.too_large:
            resident.leases, resident.wanted_at = 0, None
        for resident in found.load:
            resident.enter(LOADING, now_s)
            loads += 1
        for resident in [*found.unload, *found.retire]:
            assert resident.state is READY
            assert not resident.pinned
            resident.enter(UNLOADING, now_s)
        assert sum(r.memory_bytes for r in residents if r.state is not ABSENT) <= limit_bytes
        # The worst case: all others are loaded, used and unloaded first.
        bound_s = sum(2 * max(PATIENCE_S, 3.0) + r.load_s + 1.0 for r in residents)
        assert all(now_s - since_s <= bound_s for since_s in waits_since.values()), waits_since
    assert loads >= 1

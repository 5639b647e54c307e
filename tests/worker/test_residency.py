"""Which models are in memory: the rules, one at a time, and by chance against what they promise."""

import random
from pathlib import Path

import pytest
from multigpu.repository.model import ModelSpec
from multigpu_worker.models.catalog import Catalog, unknown
from multigpu_worker.models.measured_sizes import ModelSize
from multigpu_worker.models.messages import model_messages
from multigpu_worker.models.residency import (
    LOADS_MAX,
    PATIENCE_S,
    RETRY_FAULTY_MAX_S,
    RETRY_S,
    ModelState,
    Resident,
    plan,
)
from multigpu_worker.models.routes import ModelRoutes

ABSENT, LOADING, READY, UNLOADING = ModelState


def model(name: str, memory_bytes: int = 10, state: ModelState = ABSENT, **more: object) -> Resident:
    resident = Resident(key=name, spec=_spec(name), memory_bytes=memory_bytes, state=state)
    for field, value in more.items():
        setattr(resident, field, value)
    return resident


def _spec(name: str, version: str = "", **more: object) -> ModelSpec:
    return ModelSpec(name=name, version=version, folder=Path("/nowhere") / name / version, kind="infer", **more)  # type: ignore[arg-type]


def names(residents: list[Resident]) -> list[str]:
    return [resident.key for resident in residents]


def test_what_fits_is_loaded_in_the_order_of_waiting() -> None:
    found = plan([model("a", wanted_s=2.0), model("b", wanted_s=1.0), model("c")], 100, 5.0)
    assert names(found.load) == ["b", "a"]
    assert len(plan([model(str(n), wanted_s=1.0) for n in range(9)], 0, 5.0).load) == LOADS_MAX


def test_pinned_models_come_first_and_never_go() -> None:
    old = model("old", 60, READY, pinned=True)
    found = plan([old, model("a", 30, wanted_s=1.0), model("b", 20, wanted_s=2.0, pinned=True)], 100, 5.0)
    assert names(found.load) == ["b"]
    assert not found.unload, "there is nothing that may go"


def test_the_least_recently_used_idle_ones_make_room() -> None:
    inside = [model("a", 40, READY, used_s=3.0), model("b", 40, READY, used_s=1.0), model("c", 15, READY, used_s=2.0)]
    found = plan([*inside, model("d", 50, wanted_s=9.0)], 100, 9.0)
    assert (names(found.unload), found.load, found.retire) == (["b", "c"], [], [])
    inside[1].leases = 1
    found = plan([*inside, model("d", 50, wanted_s=9.0)], 100, 9.0)
    assert names(found.unload) == ["c", "a"], "one in use stays while others do"


def test_those_on_their_way_out_are_waited_for() -> None:
    found = plan([model("a", 60, UNLOADING), model("b", 30, READY), model("c", 40, wanted_s=1.0)], 100, 9.0)
    assert not (found.load or found.unload or found.retire), "the room is coming"


def test_one_in_use_retires_for_one_that_has_waited_and_only_after_it_has_served() -> None:
    busy = model("busy", 60, READY, leases=5, since_s=0.0)
    waiting = model("waiting", 60, wanted_s=10.0, load_s=4.0)
    assert not plan([busy, waiting], 100, 10.0 + PATIENCE_S / 2).retire
    assert names(plan([busy, waiting], 100, 10.0 + PATIENCE_S).retire) == ["busy"]
    busy.since_s = 8.0
    assert not plan([busy, waiting], 100, 11.9).retire, "it has not served as long as the other takes to load"
    assert names(plan([busy, waiting], 100, 12.0).retire) == ["busy"]


def test_nobody_goes_in_vain() -> None:
    inside = [model("idle", 20, READY), model("loading", 70, LOADING)]
    found = plan([*inside, model("large", 90, wanted_s=1.0)], 100, 99.0)
    assert not (found.unload or found.retire)


def test_a_large_one_is_not_held_up_by_small_ones() -> None:
    inside = [model("busy", 60, READY, leases=1, since_s=9.0)]
    waiting = [model("large", 60, wanted_s=9.0), model("small", 30, wanted_s=9.5)]
    assert not plan([*inside, *waiting], 100, 9.2).load


def test_what_does_not_fit_an_empty_worker_is_told_how_much_there_is() -> None:
    found = plan(
        [model("p", 30, READY, pinned=True), model("a", 80, wanted_s=1.0), model("b", 5, wanted_s=2.0)], 100, 3
    )
    assert [(resident.key, room_bytes) for resident, room_bytes in found.too_large] == [("a", 70)]
    assert names(found.load) == ["b"]


def test_more_than_was_expected_is_shed() -> None:
    inside = [model("a", 60, READY, used_s=1.0), model("b", 60, READY, used_s=2.0), model("c", 9, wanted_s=1.0)]
    found = plan(inside, 100, 3.0)
    assert (names(found.unload), found.load) == (["a"], [])


def test_a_failure_is_not_repeated_at_once() -> None:
    failed = model("a", wanted_s=1.0)
    failed.failed("broken", 10.0)
    assert not plan([failed], 0, 10.0 + RETRY_S / 2).load
    assert plan([failed], 0, 10.0 + RETRY_S).load
    for _ in range(20):
        failed.failed("broken", 10.0)
    assert 10.0 < failed.retry_s <= 70.0 + RETRY_S
    for _ in range(20):
        failed.failed("its files are cut off", 10.0, faulty=True)
    assert failed.retry_s == 10.0 + RETRY_FAULTY_MAX_S


@pytest.mark.parametrize("seed", range(60))
def test_by_chance(seed: int) -> None:
    """A worker of the crudest kind: within its limit at each instant, and each model has its turn."""
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
                resident.used_s = now_s
                served[resident.key] += 1
            elif resident.state is LOADING and now_s - resident.since_s >= resident.load_s:
                resident.enter(READY, now_s)
            elif resident.state is UNLOADING and now_s - resident.since_s >= 0.2:
                resident.enter(ABSENT, now_s)
            wants = resident.state is ABSENT and (resident.leases or resident.pinned)
            resident.wanted_s = (resident.wanted_s or now_s) if wants else None
            if resident.leases and resident.state is not READY:
                waits_since.setdefault(resident.key, now_s)
            else:
                waits_since.pop(resident.key, None)
        found = plan(residents, limit_bytes, now_s)
        for resident, _ in found.too_large:
            resident.leases, resident.wanted_s = 0, None
        for resident in found.load:
            resident.enter(LOADING, now_s)
            loads += 1
        for resident in [*found.unload, *found.retire]:
            assert resident.state is READY
            assert not resident.pinned
            resident.enter(UNLOADING, now_s)
        assert sum(r.memory_bytes for r in residents if r.state is not ABSENT) <= limit_bytes
        # In the worst case all others have their turn first, each loading, serving and going.
        bound_s = sum(2 * max(PATIENCE_S, 3.0) + r.load_s + 1.0 for r in residents)
        assert all(now_s - since_s <= bound_s for since_s in waits_since.values()), waits_since
    assert loads >= 1


# --- versions --------------------------------------------------------------------------------------------------------


def catalog(*specs: ModelSpec, errors: dict[str, str] | None = None) -> Catalog:
    return Catalog(
        specs={spec.id: spec for spec in specs}, errors=errors or {}, current={spec.name: spec.id for spec in specs}
    )


ENGINE = {"engine": "some:Class"}


def test_tasks_may_say_nothing_a_name_or_a_version() -> None:
    routes = ModelRoutes(catalog(_spec("a", "1", **ENGINE), _spec("a", "2", **ENGINE), _spec("b", **ENGINE)), "auto")
    assert routes.table["infer", ""] == routes.table["infer", "a"] == "a:2"
    assert routes.table["infer", "a:1"] == "a:1"
    ((kind, said),) = routes.offers()
    assert kind == "infer"
    assert set(said[:2]) == {"a", "a:2"}, "the default first"
    assert set(said) == {"a", "a:1", "a:2", "b"}


def test_tasks_that_name_no_model_go_on_with_the_same_one() -> None:
    b, b2 = _spec("b", "1", **ENGINE), _spec("b", "2", **ENGINE)
    routes = ModelRoutes(catalog(b), "auto")
    routes.put(catalog(_spec("a", **ENGINE), b))
    assert routes.table["infer", ""] == "b:1", "a folder that sorts earlier has appeared"
    assert dict(routes.offers())["infer"][0] in {"b", "b:1"}
    routes.put(catalog(_spec("a", **ENGINE), b, b2))
    assert routes.table["infer", ""] == "b:2", "of the same model the newest"
    routes.put(catalog(_spec("a", **ENGINE), b2, errors={"b:3": "cut off"}))
    assert routes.table["infer", ""] == "b:2"
    routes.put(catalog(_spec("a", **ENGINE), errors={"b": "cut off"}))
    assert routes.table["infer", ""] == "b:2", "a broken model fails, and no other answers for it"
    routes.put(catalog(_spec("a", **ENGINE), b2))
    assert routes.table["infer", ""] == "b:2"
    routes.put(catalog(_spec("a", **ENGINE)))
    assert routes.table["infer", ""] == "a"


def test_a_model_that_changes_where_it_lies_is_served_until_the_new_one_is_ready() -> None:
    routes = ModelRoutes(catalog(_spec("a", **ENGINE)), "auto")
    routes.residents["a"].enter(READY, 0.0)
    routes.put(catalog(_spec("a", changed_ns=7, **ENGINE)))
    new = next(r for r in routes.residents.values() if r.upcoming)
    assert routes.table["infer", "a"] == "a"
    assert [m.name for m in model_messages(routes)] == ["a"]
    assert not routes.replaced()
    new.error = "bad"
    assert model_messages(routes)[0].error == "bad"
    new.enter(READY, 1.0)
    routes.switch()
    assert routes.table["infer", "a"] == new.key
    assert [r.key for r in routes.replaced()] == ["a"]
    routes.residents["a"].enter(ABSENT, 2.0)
    routes.switch()
    assert list(routes.residents) == [new.key]


def test_what_is_not_in_memory_is_replaced_at_once_and_what_is_gone_is_forgotten() -> None:
    routes = ModelRoutes(catalog(_spec("a", "1", **ENGINE), _spec("b", **ENGINE)), "auto")
    routes.put(catalog(_spec("a", "2", **ENGINE)))
    assert list(routes.residents) == ["a:2"]
    assert ("infer", "b") not in routes.table


def test_a_model_in_memory_outlives_its_broken_files() -> None:
    routes = ModelRoutes(catalog(_spec("a", "1", **ENGINE)), "auto")
    routes.residents["a:1"].enter(READY, 0.0)
    routes.put(catalog(errors={"a:2": "no weights"}))
    assert routes.table["infer", "a"] == "a:1"
    told = {f"{m.name}:{m.version}": m for m in model_messages(routes)}
    assert told["a:1"].current
    assert told["a:2"].error == "no weights"
    routes.residents["a:1"].enter(ABSENT, 1.0)
    routes.put(catalog(errors={"a:2": "no weights"}))
    assert not routes.table


def test_a_version_that_is_named_is_served_as_long_as_it_is_in_memory() -> None:
    routes = ModelRoutes(catalog(_spec("a", "1", **ENGINE)), "auto")
    routes.residents["a:1"].enter(READY, 0.0)
    routes.put(catalog(_spec("a", "2", **ENGINE)))  # "latest": it is the only one that is listed
    assert [routes.table["infer", name] for name in ("", "a", "a:1", "a:2")] == ["a:1", "a:1", "a:1", "a:2"]
    assert set(dict(routes.offers())["infer"]) == {"a", "a:1", "a:2"}
    assert not routes.replaced()
    routes.residents["a:2"].enter(READY, 1.0)
    routes.switch()
    assert [routes.table["infer", name] for name in ("", "a", "a:1", "a:2")] == ["a:2", "a:2", "a:1", "a:2"]
    assert set(dict(routes.offers())["infer"]) == {"a", "a:2"}, "nobody is to begin with it"
    assert [r.key for r in routes.replaced()] == ["a:1"]
    routes.put(catalog(_spec("a", "2", **ENGINE), errors={"a:3": "no weights"}))
    assert set(dict(routes.offers())["infer"]) == {"a", "a:2"}, "a broken version brings it back no more"
    routes.residents["a:1"].enter(UNLOADING, 2.0)
    routes.switch()
    assert ("infer", "a:1") not in routes.table
    routes.residents["a:1"].enter(ABSENT, 3.0)
    routes.switch()
    assert list(routes.residents) == ["a:2"]


def test_a_version_that_is_not_in_memory_goes_with_its_place_in_the_repository() -> None:
    routes = ModelRoutes(catalog(_spec("a", "1", **ENGINE)), "auto")
    routes.put(catalog(_spec("a", "2", **ENGINE)))
    assert ("infer", "a:1") not in routes.table
    assert unknown("infer", "a:1", ["a", "a:2", "a:3", "ab:1"]) == (
        "this worker has no model 'a:1' for 'infer'; the versions of 'a' that are served are a:2, a:3. "
        "It has: a, a:2, a:3, ab:1"
    )


def test_a_listed_version_stays_beside_the_newest() -> None:
    both = catalog(_spec("a", "1", **ENGINE), _spec("a", "2", **ENGINE))
    routes = ModelRoutes(both, "auto")
    for key in ("a:1", "a:2"):
        routes.residents[key].enter(READY, 0.0)
    routes.switch()
    assert not routes.replaced()
    routes.put(both)
    assert set(dict(routes.offers())["infer"]) == {"a", "a:1", "a:2"}


def test_the_size_of_a_new_model_is_looked_up_once() -> None:
    noted: list[str] = []

    def size_of(spec: ModelSpec) -> ModelSize:
        noted.append(spec.id)
        return ModelSize(memory_bytes=7)

    routes = ModelRoutes(catalog(_spec("a", **ENGINE)), "auto", size_of)
    routes.put(catalog(_spec("a", **ENGINE), _spec("b", **ENGINE)))
    assert noted == ["a", "b"]
    (told, _) = model_messages(routes)
    assert (told.memory_bytes, told.expected_memory_bytes) == (0, 7)
    routes.residents["a"].measured = True
    (told, _) = model_messages(routes)
    assert (told.memory_bytes, told.expected_memory_bytes) == (7, 0)

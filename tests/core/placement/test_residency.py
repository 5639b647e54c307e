"""Which models get a place where, one rule a story."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest
from multigpu._transport.names import MODELS_MAX
from multigpu.v1 import model_pb2, worker_service_pb2
from multigpu_master import settings
from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident, Telemetry, WorkerInfo
from multigpu_master.errors import InvalidMessageError, JournalError
from multigpu_master.ids import LeaseProofs
from multigpu_master.strategies.registry import load_strategies
from multigpu_master.wire import leases as wire_leases
from multigpu_master.wire import models as wire_models
from multigpu_master.wire import specs as wire_specs

from tests.core.stage import Stage, lease_of
from tests.sim.models import check

ROOM = 1000
NAMES = ("a", "b", "c", "d")


def model(name: str, **known: Any) -> Model:
    return Model(name=name, **{"files_bytes": 0, "memory_bytes": 400, "load_s": 2.0, **known})


def spec(name: str, **more: Any) -> Spec:
    return Spec(kind="run", model=name, wait_for_worker=True, **more)


class Models(Stage):
    """A stage whose workers offer models, and report loaded models only on request."""

    def offer(self, name: str = "w", models: tuple[Model, ...] = tuple(map(model, NAMES)), room: int = ROOM) -> None:
        names = tuple(m.model_id for m in models) + tuple(m.name for m in models if m.version and m.current)
        info = WorkerInfo(
            worker_id=name, capabilities=(Capability(kind="run", models=names),), slots=8, models=models,
            model_memory_bytes=room,
        )  # fmt: skip
        self.join(info)

    def says(
        self, *loaded: str | Resident, name: str = "w", after_s: float = 0.0, catalog: ev.Catalog | None = None
    ) -> list[ev.Command]:
        """A heartbeat: what is loaded, with leases as they are."""
        worker = self.core.fleet.workers[name]
        residents = tuple(Resident(model=x, memory_bytes=400) if isinstance(x, str) else x for x in loaded)
        held = [ev.HeldLease(x.lease_id, x.task.task_id, x.attempt) for x in worker.leases.values()]
        beat = ev.Heartbeat(worker.session, held, worker.dispatches_sent, Telemetry(), residents, catalog=catalog)
        return self.handle(beat, after_s)

    def ask(self, name: str, **more: Any) -> Task:
        return self.submit(1, spec(name, **more))[0]

    def why(self, task: Task) -> str:
        return "; ".join(w for c in explain(self.core, task, self.now).candidates for w in c.excluded_by)


@pytest.fixture
def stage() -> Models:
    return Models()


def where(task: Task) -> str:
    return lease_of(task).worker.worker_id


def test_a_model_waits_while_models_in_use_take_the_room(stage: Models) -> None:
    stage.offer()
    a, b = stage.ask("a"), stage.ask("b")
    stage.says("a", "b", after_s=9.0)
    c = stage.ask("c")
    assert c.lease is None
    assert stage.why(c) == "no room for model c: it needs 400 of 1000 bytes, and a, b are in use"
    stage.now += 9.0
    stage.report(lease_of(a))
    assert where(c) == "w", "a has no leases any more, so that it may go"
    assert b.lease is not None


def test_the_model_that_asked_first_is_loaded_first_though_another_is_checked_before(stage: Models) -> None:
    """The one whose timer fired got the worker."""
    stage.offer(models=(model("a"), model("b"), model("c", load_s=10.0), model("d", load_s=1.0)))
    stage.ask("a")
    stage.ask("b")
    for _ in range(3):
        stage.says("a", "b", after_s=30.0)
    begin_s = stage.now
    stage.ask("c")
    stage.handle(ev.Cordon("w"))
    residency = stage.core.fleet.workers["w"].residency
    while not residency.reserved_model:
        stage.says("a", "b", after_s=0.1)
        if round(stage.now - begin_s, 1) == 11.0:
            stage.ask("d")  # c asks for a reservation since 10.1
        elif round(stage.now - begin_s, 1) == 12.5:
            stage.handle(ev.Uncordon("w"))
    assert residency.reserved_model == "c"


def test_a_size_measured_on_one_worker_counts_on_the_others(stage: Models) -> None:
    stage.offer("w1", (model("a"), model("b", memory_bytes=0, files_bytes=100)))
    stage.offer("w2", (model("b", memory_bytes=0, files_bytes=100),))
    residency = stage.core.fleet.workers["w1"].residency
    assert residency.memory_of("b") == 130, "1.3 times its files"
    stage.says(Resident(model="b", memory_bytes=700), name="w2")
    assert residency.memory_of("b") == 700
    stage.core.handle(ev.Cordon("w2"), stage.now)
    stage.ask("a")
    assert stage.ask("b").lease is None, "700 and 400 bytes don't fit into 1000"


def test_a_workers_estimate_goes_before_the_masters(stage: Models) -> None:
    offered = model_pb2.Model(name="b", files_bytes=100, expected_memory_bytes=700)
    stage.offer(models=(model("a"), *wire_models.models_of([offered])))
    assert stage.core.fleet.workers["w"].residency.memory_of("b") == 700
    stage.ask("a")
    assert stage.ask("b").lease is None, "700 and 400 bytes don't fit into 1000"


def test_a_lease_that_waits_for_a_model_is_not_recalled_for_the_worker_that_loads_it(stage: Models) -> None:
    """It was given back and granted again while its worker loaded the model; and so by two such workers in turns."""
    stage.offer("w1")
    waiting = lease_of(stage.ask("a"))
    loading = Resident(model="a", state=ModelState.LOADING)

    def recalled() -> list[int]:
        commands = [c for _ in range(10) for c in stage.says(loading, name="w1", after_s=0.1)]
        commands += [c for _ in range(10) for c in stage.says(*has, name="w2", after_s=0.1)] if has else []
        return [lease_id for c in commands if isinstance(c, ev.Recall) for lease_id in c.lease_ids]

    has: tuple[str | Resident, ...] = ()
    assert recalled() == []
    stage.offer("w2")
    has = (loading,)
    assert recalled() == []
    has = ("a",)
    assert recalled() == [waiting.lease_id], "for the worker that has the model by now"


def test_a_lease_whose_model_is_loaded_again_is_recalled_for_a_worker_that_has_it(stage: Models) -> None:
    """Only workers with more leases than slots were looked at, unless the model was being loaded at the grant."""
    stage.offer("w1")
    stage.says("a", name="w1")
    lease = lease_of(stage.ask("a"))
    stage.says(Resident(model="a", state=ModelState.LOADING), name="w1", after_s=1.0)  # its engine died
    stage.offer("w2")
    commands = [c for _ in range(10) for c in stage.says("a", name="w2", after_s=0.1)]
    assert [c.lease_ids for c in commands if isinstance(c, ev.Recall)] == [[lease.lease_id]]


def test_a_model_that_fails_on_one_worker_is_no_reason_if_another_offers_it(stage: Models) -> None:
    broken = WorkerInfo(
        worker_id="broken", capabilities=(Capability(kind="run"),), models=(Model(name="a", error="its file is torn"),)
    )
    stage.join(broken)
    stage.offer()
    elsewhere = replace(spec("a", labels=(("zone", "x"),)), wait_for_worker=False)
    (answer,) = stage.submitted([Task(elsewhere, "", b"")]).results
    assert isinstance(answer, ev.Rejection)
    assert "w: needs the label zone=x" in answer.message
    assert "torn" not in answer.message


def test_a_kind_whose_worker_takes_any_model_lacks_none(stage: Models) -> None:
    stage.join(WorkerInfo(worker_id="any", capabilities=(Capability(kind="run"),)))
    stage.offer()
    elsewhere = replace(spec("x", labels=(("zone", "x"),)), wait_for_worker=False)
    (answer,) = stage.submitted([Task(elsewhere, "", b"")]).results
    assert isinstance(answer, ev.Rejection)
    assert "any: needs the label zone=x" in answer.message


def test_a_model_larger_than_all_room_is_the_workers_to_reject(stage: Models) -> None:
    stage.offer(models=(model("a"), model("huge", memory_bytes=5000)))
    assert stage.ask("huge").lease is not None
    assert stage.ask("a").lease is None


def test_auto_goes_where_the_model_is_and_then_where_nothing_is_unloaded(stage: Models) -> None:
    stage.offer("w1")
    stage.offer("w2")
    stage.says("a", "b", name="w1")
    stage.says("c", name="w2")
    assert where(stage.ask("a")) == "w1"
    assert where(stage.ask("c")) == "w2"
    assert where(stage.ask("d")) == "w2", "there is room; on w1 another model would have to go"


def test_a_busy_worker_rests_between_loadings_that_make_others_go(stage: Models) -> None:
    stage.offer()
    busy = stage.ask("a")
    stage.says("a", after_s=2.0)  # which has taken two seconds
    stage.now += 2.1
    first = stage.ask("b")
    stage.says("a", "b", after_s=3.0)  # three
    stage.report(lease_of(first), after_s=0.0)
    c = stage.ask("c")
    assert c.lease is None
    assert stage.why(c) == "model c: another would have to be unloaded, and the worker loads one or has just loaded one"
    stage.handle(ev.Tick(), 2.9)
    assert c.lease is None
    stage.handle(ev.Tick(), 0.2)
    assert where(c) == "w"
    assert busy.lease is not None


def test_streams_don_t_starve_a_model_that_waits(stage: Models) -> None:
    stage.offer()
    held = {name: stage.ask(name) for name in ("a", "b")}
    stage.says("a", "b", after_s=2.0)
    waits = stage.ask("c")
    for _ in range(45):  # each stream has its next task leased before the last one ends
        for name, last in list(held.items()):
            held[name] = stage.ask(name)
            if last.lease is not None:
                stage.report(lease_of(last), after_s=0.05)
        if waits.lease is not None:
            break
    assert waits.lease is not None
    assert stage.now - waits.submit_s < 2 * 2.0 + 0.5, "its loading time, and the rest from the last loading"
    assert [held["a"].lease is None, held["b"].lease is None].count(True) == 1, "one of them makes room"


def test_a_worker_that_has_rested_is_reserved_for_the_model_that_has_asked_longest(stage: Models) -> None:
    stage.offer(models=(model("a"), model("b"), model("c"), model("quick", load_s=0.01)))
    stage.ask("a")
    stage.ask("b")
    stage.says("a", "b", after_s=5.0)  # it rests for five seconds, too
    stage.ask("c")
    stage.says("a", "b", after_s=2.5)  # it asks after two seconds
    stage.ask("quick")  # it asks later, and is checked much more often
    for _ in range(60):
        stage.says("a", "b", after_s=0.1)
        if reserved_model := stage.core.fleet.workers["w"].residency.reserved_model:
            break
    assert reserved_model == "c"


def test_a_worker_is_reserved_as_soon_as_it_has_rested(stage: Models) -> None:
    """Not when the model that waits is next checked, a second later."""
    stage.offer()
    stage.ask("a")
    stage.ask("b")
    stage.says("a", "b", after_s=5.0)  # it rests for five seconds, too
    stage.ask("c")
    stage.says("a", "b", after_s=4.9)  # it asks after two seconds, and is checked every two
    residency, seen = stage.core.fleet.workers["w"].residency, list[str]()
    for _ in range(2):
        seen.append(residency.reserved_model)
        stage.says("a", "b", after_s=0.2)
    assert [*seen, residency.reserved_model] == ["", "c", "c"]


def test_a_reservation_spares_pinned_and_more_important_models(stage: Models) -> None:
    stage.offer()
    stage.handle(ev.LoadModel("w", "a"))
    stage.ask("a")
    important = stage.ask("b", priority=1)
    stage.says(Resident(model="a", memory_bytes=400, pinned=True), "b", after_s=2.0)
    waits = stage.ask("c")
    for _ in range(20):
        stage.handle(ev.Tick(), 1.0)
        stage.says(Resident(model="a", memory_bytes=400, pinned=True), "b")
    residency = stage.core.fleet.workers["w"].residency
    assert waits.lease is None
    assert not residency.retiring
    stage.report(lease_of(important))
    assert where(waits) == "w"


def test_a_reservation_ends_with_the_tasks_that_waited(stage: Models) -> None:
    stage.offer()
    stage.ask("a")
    stage.ask("b")
    stage.says("a", "b", after_s=2.0)
    waits = stage.ask("c")
    for _ in range(3):
        stage.handle(ev.Tick(), 1.5)
    residency = stage.core.fleet.workers["w"].residency
    assert residency.reserved_model == "c"
    assert list(residency.retiring) == ["a"], "the least recently used"
    blocked = stage.ask("a")
    assert blocked.lease is None
    assert "makes room there for a model that has waited longer" in stage.why(blocked)
    stage.handle(ev.Cancel([waits]))
    assert not residency.reserved_model
    assert blocked.lease is not None, "at once"


def test_a_worker_that_lacks_room_in_its_window_alone_is_not_reserved(stage: Models) -> None:
    """Such a reservation frees no memory anywhere, and the model waited for as long as the window was full."""
    stage.offer("a")
    full = WorkerInfo(
        worker_id="b", capabilities=(Capability(kind="run", models=NAMES), Capability(kind="other")), slots=1,
        window_tasks=1, models=tuple(map(model, NAMES)), model_memory_bytes=ROOM,
    )  # fmt: skip
    stage.join(full)
    stage.submit(1, Spec(kind="other", wait_for_worker=True))
    stage.ask("a")
    stage.ask("b")
    stage.says("a", "b", name="a", after_s=2.0)
    assert stage.ask("c").lease is None
    for _ in range(6):
        stage.says("a", "b", name="a", after_s=1.0)
        stage.says(name="b")
    reserved = {name: worker.residency.reserved_model for name, worker in stage.core.fleet.workers.items()}
    assert reserved == {"a": "c", "b": ""}


def test_an_unwanted_model_gets_no_leases_until_it_is_gone(stage: Models) -> None:
    stage.offer()
    a = stage.ask("a")
    stage.says("a", after_s=2.0)
    commands = stage.handle(ev.UnloadModel("w", "a"))
    assert any(isinstance(c, ev.SendDesiredState) for c in commands)
    later = stage.ask("a")
    assert later.lease is None
    assert "an operator unloads it there" in stage.why(later)
    stage.report(lease_of(a))
    stage.says("a")
    stage.says()
    assert later.lease is None, "that word may have been on its way already"
    commands = stage.says()
    assert where(later) == "w"
    assert any(isinstance(c, ev.SendDesiredState) for c in commands), "it is wanted again, and is told so"


def test_a_model_loaded_by_an_operator_is_wanted_by_every_session_and_every_master(stage: Models) -> None:
    stage.offer(models=(model("a", version="2", current=True), model("a", version="1")))
    stage.handle(ev.LoadModel("w", "a"))
    worker = stage.core.fleet.workers["w"]
    assert list(worker.residency.operator_pinned_ids()) == ["a:2"]
    catalog = ev.Catalog(worker.info.capabilities, (model("a", version="3", current=True),))
    commands = stage.says(catalog=catalog)
    assert list(worker.residency.operator_pinned_ids()) == ["a:3"], "the name stands for the current version"
    assert any(isinstance(c, ev.SendDesiredState) for c in commands)
    kept = settings.worker_setting(worker)
    core = Core(load_strategies(), Limits(), 1, lambda: 0.0)
    settings_kept = {k: v for k, v in kept.items() if v is not None}
    assert settings.restore(lambda event: core.handle(event, stage.now), core.ledger.strategies, settings_kept) == 1
    restored = core.fleet.workers["w"]
    assert list(restored.residency.operator_pins) == ["a"]
    commands = core.handle(ev.Hello(7, worker.info), stage.now)
    desired = worker_service_pb2.DesiredState()
    wire_models.fill_desired(desired, restored)
    assert list(desired.pinned_models) == ["a:3"]
    assert any(isinstance(c, ev.SendDesiredState) for c in commands)
    stage.handle(ev.UnloadModel("w", "a"))
    assert not worker.residency.operator_pins


def test_a_setting_with_damaged_pins_is_rejected(stage: Models) -> None:
    stage.offer()
    ((key, value),) = settings.worker_setting(stage.core.fleet.workers["w"]).items()
    assert value is not None
    damaged = json.dumps(json.loads(value) | {"pinned_models": [7]}).encode()
    with pytest.raises(JournalError, match="is damaged"):
        settings.restore(stage.handle, stage.core.ledger.strategies, {key: damaged})


def test_leases_given_back_for_want_of_room_are_no_losses(stage: Models) -> None:
    stage.offer()
    task = stage.ask("a")
    for _ in range(40):
        stage.fail(lease_of(task), "ModelMakesRoom", returned=True)
        assert task.lease is None, "it waits a little, or it would come and go"
        stage.handle(ev.Tick(), 0.2)
        assert task.outcome is None
        assert lease_of(task).attempt == 1
    assert stage.core.ledger.counters.requeued == 0


def test_a_long_id_is_the_same_when_offered_and_when_loaded() -> None:
    """The id of a loaded model was cut to the length of a name, so that the model never counted as loaded."""
    model = model_pb2.Model(name="n" * 200, version="v" * 200)
    (offered,) = wire_models.models_of([model])
    beat = worker_service_pb2.Heartbeat()
    beat.models.add(model=offered.model_id)
    assert [resident.model for resident in wire_models.residents(beat)] == [offered.model_id]


def test_invalid_reports_are_rejected_or_truncated() -> None:
    with pytest.raises(InvalidMessageError, match="no name"):
        wire_models.models_of([model_pb2.Model()])
    with pytest.raises(InvalidMessageError, match="rename"):
        wire_models.models_of([model_pb2.Model(name="m" * 300)])
    with pytest.raises(InvalidMessageError, match="capabilities are missing"):
        wire_models.catalog(worker_service_pb2.Catalog())
    many = wire_models.models_of(model_pb2.Model(name=f"m{n}") for n in range(2000))
    assert len(many) == MODELS_MAX
    large = worker_service_pb2.Catalog(models=[model_pb2.Model(name="m", facts={"f": "x" * (1 << 18)})])
    large.capabilities.add(kind="k")
    with pytest.raises(InvalidMessageError, match="at most 131072"):
        wire_models.catalog(large)
    odd = worker_service_pb2.Heartbeat()
    odd.models.add(model="m", state=cast("Any", 99))  # of some later version
    assert wire_models.residents(odd)[0].state is ModelState.UNLOADING


def test_a_new_attempt_gets_the_outputs_of_the_last_one() -> None:
    task = Task(spec("a"), "", b"", task_id=1)
    task.ensure_extra().partials, task.ensure_extra().outputs_and_log_bytes = [b"one", b"two"], 6
    stage = Models()
    stage.offer()
    lease = Lease(1, task, stage.core.fleet.workers["w"], 2, 0.0, 1, 0.0)

    def sent() -> worker_service_pb2.LeaseBatch:
        parts = wire_leases.lease_batch(wire_specs.SpecReader(), LeaseProofs(b"key"), [lease])
        (batch,) = worker_service_pb2.SessionResponse.FromString(b"".join(parts)).lease_batches
        return batch

    batch = sent()
    assert list(batch.extras[0].partials) == [b"one", b"two"]
    task.ensure_extra().outputs_and_log_bytes = wire_leases.RESENT_PARTIALS_BYTES_MAX + 1
    batch = sent()
    assert not batch.extras[0].partials
    assert batch.extras[0].partials_received == 2


def test_models_with_too_little_room_keep_the_bounds_whatever_the_order() -> None:
    """The short form of `python -m tests.sim.models`."""
    for seed in range(60):
        check(seed)


def test_another_worker_loads_a_model_as_soon_as_the_last_one_has_lost_it(stage: Models) -> None:
    """The worker that loses it is full: the change of its room alone would have nothing tried again."""
    stage.offer("w")
    stage.says("a", "b", name="w")
    stage.core.fleet.workers["w"].pace.leases_max = 1
    stage.ask("b")
    stage.offer("v")
    stage.says(name="v")
    waiting = stage.ask("a")
    assert waiting.lease is None, "w has the model, and one task is too little to load it on v"
    stage.says("b", name="w")
    assert lease_of(waiting).worker.worker_id == "v"

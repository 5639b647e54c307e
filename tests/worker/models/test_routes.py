"""The route table: which version of a model serves a name while the repository changes."""

from pathlib import Path

from multigpu_worker.models.catalog import unknown
from multigpu_worker.models.measured_sizes import ModelSize
from multigpu_worker.models.messages import model_messages
from multigpu_worker.models.residency import ModelState
from multigpu_worker.models.routes import ModelRoutes
from multigpu_worker.repository.model import ModelSpec, Scan

ABSENT, LOADING, READY, UNLOADING = ModelState


def spec_of(name: str, version: str = "", changed_ns: int = 0) -> ModelSpec:
    return ModelSpec(
        name=name, version=version, folder=Path("/nowhere"), kind="infer", engine="a:Class", changed_ns=changed_ns
    )


def catalog(*specs: ModelSpec, errors: dict[str, str] | None = None) -> Scan:
    return Scan(
        models={spec.id: spec for spec in specs}, errors=errors or {}, current={spec.name: spec.id for spec in specs}
    )


def test_tasks_may_name_a_model_a_version_or_none_and_then_keep_the_same_model() -> None:
    routes = ModelRoutes(catalog(spec_of("a", "1"), spec_of("a", "2"), spec_of("b")), "auto")
    assert routes.table["infer", ""] == routes.table["infer", "a"] == "a:2"
    assert routes.table["infer", "a:1"] == "a:1"
    ((kind, offered),) = routes.offers()
    assert kind == "infer"
    assert set(offered[:2]) == {"a", "a:2"}, "the default comes first"
    assert set(offered) == {"a", "a:1", "a:2", "b"}
    b, b2 = spec_of("b", "1"), spec_of("b", "2")
    routes = ModelRoutes(catalog(b), "auto")
    routes.put(catalog(spec_of("a"), b))
    assert routes.table["infer", ""] == "b:1", "although a new folder sorts earlier"
    assert dict(routes.offers())["infer"][0] in {"b", "b:1"}
    routes.put(catalog(spec_of("a"), b, b2))
    assert routes.table["infer", ""] == "b:2", "the newest version"
    routes.put(catalog(spec_of("a"), b2, errors={"b:3": "cut off"}))
    assert routes.table["infer", ""] == "b:2"
    routes.put(catalog(spec_of("a"), errors={"b": "cut off"}))
    assert routes.table["infer", ""] == "b:2", "a broken model is not replaced by another one"
    routes.put(catalog(spec_of("a"), b2))
    assert routes.table["infer", ""] == "b:2"
    routes.put(catalog(spec_of("a")))
    assert routes.table["infer", ""] == "a"


def test_a_model_whose_files_change_is_served_until_the_new_one_is_ready() -> None:
    routes = ModelRoutes(catalog(spec_of("a")), "auto")
    routes.residents["a"].enter(READY, 0.0)
    routes.put(catalog(spec_of("a", changed_ns=7)))
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


def test_a_model_or_version_that_is_not_in_memory_is_replaced_at_once() -> None:
    routes = ModelRoutes(catalog(spec_of("a", "1"), spec_of("b")), "auto")
    routes.put(catalog(spec_of("a", "2")))
    assert list(routes.residents) == ["a:2"]
    assert ("infer", "b") not in routes.table
    assert ("infer", "a:1") not in routes.table
    assert unknown("infer", "a:1", ["a", "a:2", "a:3", "ab:1"]) == (
        "this worker has no model 'a:1' for 'infer'; the versions of 'a' that are served are a:2, a:3. "
        "It has: a, a:2, a:3, ab:1"
    )


def test_a_model_in_memory_outlives_its_broken_files() -> None:
    routes = ModelRoutes(catalog(spec_of("a", "1")), "auto")
    routes.residents["a:1"].enter(READY, 0.0)
    routes.put(catalog(errors={"a:2": "no weights"}))
    assert routes.table["infer", "a"] == "a:1"
    found = {f"{m.name}:{m.version}": m for m in model_messages(routes)}
    assert found["a:1"].current
    assert found["a:2"].error == "no weights"
    routes.residents["a:1"].enter(ABSENT, 1.0)
    routes.put(catalog(errors={"a:2": "no weights"}))
    assert not routes.table


def test_a_version_is_served_while_it_is_in_memory() -> None:
    routes = ModelRoutes(catalog(spec_of("a", "1")), "auto")
    routes.residents["a:1"].enter(READY, 0.0)
    routes.put(catalog(spec_of("a", "2")))
    assert [routes.table["infer", name] for name in ("", "a", "a:1", "a:2")] == ["a:1", "a:1", "a:1", "a:2"]
    assert set(dict(routes.offers())["infer"]) == {"a", "a:1", "a:2"}
    assert not routes.replaced()
    routes.residents["a:2"].enter(READY, 1.0)
    routes.switch()
    assert [routes.table["infer", name] for name in ("", "a", "a:1", "a:2")] == ["a:2", "a:2", "a:1", "a:2"]
    assert set(dict(routes.offers())["infer"]) == {"a", "a:2"}, "a replaced version is not offered"
    assert [r.key for r in routes.replaced()] == ["a:1"]
    routes.put(catalog(spec_of("a", "2"), errors={"a:3": "no weights"}))
    assert set(dict(routes.offers())["infer"]) == {"a", "a:2"}, "also after a broken version appeared"
    routes.residents["a:1"].enter(UNLOADING, 2.0)
    routes.switch()
    assert ("infer", "a:1") not in routes.table
    routes.residents["a:1"].enter(ABSENT, 3.0)
    routes.switch()
    assert list(routes.residents) == ["a:2"]


def test_all_listed_versions_stay() -> None:
    both = catalog(spec_of("a", "1"), spec_of("a", "2"))
    routes = ModelRoutes(both, "auto")
    for resident in routes.residents.values():
        resident.enter(READY, 0.0)
    routes.switch()
    assert not routes.replaced()
    routes.put(both)
    assert set(dict(routes.offers())["infer"]) == {"a", "a:1", "a:2"}


def test_the_size_of_a_new_model_is_looked_up_once() -> None:
    noted: list[str] = []

    def size_of(spec: ModelSpec) -> ModelSize:
        noted.append(spec.id)
        return ModelSize(memory_bytes=7)

    routes = ModelRoutes(catalog(spec_of("a")), "auto", size_of)
    routes.put(catalog(spec_of("a"), spec_of("b")))
    assert noted == ["a", "b"]
    (message, _) = model_messages(routes)
    assert (message.memory_bytes, message.expected_memory_bytes) == (0, 7)
    routes.residents["a"].measured = True
    (message, _) = model_messages(routes)
    assert (message.memory_bytes, message.expected_memory_bytes) == (7, 0)

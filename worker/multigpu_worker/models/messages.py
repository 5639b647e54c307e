"""Protobuf messages about a worker's models: those that it offers, and those in memory."""

from multigpu.v1 import model_pb2

from multigpu_worker.models import catalog as catalogs
from multigpu_worker.models.residency import ModelState, Resident
from multigpu_worker.models.routes import ModelRoutes


def model_messages(routes: ModelRoutes) -> list[model_pb2.Model]:
    """Every model of the worker, including those that it cannot serve, with their errors."""
    found: dict[str, model_pb2.Model] = {}
    for resident in _serving_first(routes):
        if resident.model not in found:
            found[resident.model] = _model_message(routes, resident)
        elif resident.upcoming:  # a changed model: the old version's values, the new version's error
            found[resident.model].error = resident.error
    for model, error in routes.catalog.errors.items():
        name, _, version = model.partition(":")
        message = found.setdefault(model, model_pb2.Model(name=name, version=version))
        message.error = error
    return list(found.values())


def residency_messages(routes: ModelRoutes) -> list[model_pb2.ModelResidency]:
    """Every model that is in memory, is being loaded, or is being unloaded."""
    found: dict[str, model_pb2.ModelResidency] = {}
    for resident in _serving_first(routes):
        if resident.state is ModelState.ABSENT:
            continue
        if resident.model in found:  # the old and the new version of a changed model
            found[resident.model].memory_bytes += resident.memory_bytes
            continue
        message = found[resident.model] = model_pb2.ModelResidency(
            model=resident.model,
            state=resident.state.value,
            memory_bytes=resident.memory_bytes,
            loads=resident.loads,
            pinned=resident.pinned,
        )
        if resident.used_ns:
            message.last_use_time.FromNanoseconds(resident.used_ns)
    return list(found.values())


def _serving_first(routes: ModelRoutes) -> list[Resident]:
    return sorted(routes.residents.values(), key=lambda resident: resident.key not in routes.serving)


def _model_message(routes: ModelRoutes, resident: Resident) -> model_pb2.Model:
    spec = resident.spec
    message = model_pb2.Model(
        name=spec.name,
        version=spec.version,
        current=routes.table.get((spec.kind, spec.name)) == resident.key,
        kind=spec.kind,
        engine=resident.facts.get("engine") or catalogs.engine_of(spec, routes.engine),
        precision=resident.facts.get("precision") or spec.precision,
        source=spec.source,
        digest=resident.digest,
        files_bytes=spec.files_bytes,
        memory_bytes=resident.memory_bytes if resident.measured else 0,
        expected_memory_bytes=0 if resident.measured else resident.memory_bytes,
        labels=spec.labels,
        facts=resident.facts,
        error=resident.error,
    )
    if resident.load_s:
        message.load_duration.FromNanoseconds(int(resident.load_s * 1e9))
    return message

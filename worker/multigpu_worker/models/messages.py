"""Protobuf messages about a worker's models: the models that it offers, and the models in memory."""

from collections.abc import Sequence

from multigpu._transport.names import HELLO_BYTES_MAX, MODELS_MAX
from multigpu.v1 import model_pb2

from multigpu_worker.models import catalog as catalogs
from multigpu_worker.models.residency import ModelState, Resident
from multigpu_worker.models.routes import ModelRoutes

# The rest of a hello is for the worker's own description.
CATALOG_BYTES_MAX = HELLO_BYTES_MAX - (32 << 10)
SHORT_ERROR_CHARS = 100
# The name, which no model can have, of the entry about models that did not fit; and how many of them it names.
LEFT_OUT, NAMED_MAX = "(left out)", 5
# Size of a field's tag and length.
_FRAMING_BYTES = 4

Offers = Sequence[tuple[str, list[str]]]


def fitting(offers: Offers, models: Sequence[model_pb2.Model]) -> tuple[Offers, list[model_pb2.Model]]:
    """The offers and models that fit into CATALOG_BYTES_MAX.

    If not all fit, this removes facts, inputs and outputs, shortens errors, and then leaves out models. It keeps the
    first model of each kind, then small models before large ones, so that a large model displaces no other. The entry
    LEFT_OUT tells operators about the models that are left out.
    """
    if len(models) <= MODELS_MAX and sum(map(_cost_bytes, models)) <= CATALOG_BYTES_MAX:
        return offers, list(models)
    for model in models:
        for name in ("facts", "inputs", "outputs"):
            model.ClearField(name)
        model.error = model.error[:SHORT_ERROR_CHARS]
    first = {names[0] for _, names in offers if names}
    room_bytes = CATALOG_BYTES_MAX
    kept: list[model_pb2.Model] = []
    for model in sorted(models, key=lambda m: (not m.kind, first.isdisjoint(_names_of(m)), _cost_bytes(m))):
        if _cost_bytes(model) <= room_bytes and len(kept) < MODELS_MAX - 1:
            room_bytes -= _cost_bytes(model)
            kept.append(model)
    names = {name for model in kept for name in _names_of(model)}
    known = [(kind, [name for name in offered if name in names], not offered) for kind, offered in offers]
    if left_out := [f"{_names_of(m)[0]} {m.error}".strip() for m in models if _names_of(m)[0] not in names]:
        text = f"{len(left_out)} models are not offered, because a worker can describe no more: divide its repository. "
        kept.append(model_pb2.Model(name=LEFT_OUT, error=f"{text}The first: {', '.join(left_out[:NAMED_MAX])}"))
    return [(kind, offered) for kind, offered, empty in known if offered or empty], kept


def _names_of(model: model_pb2.Model) -> list[str]:
    """The names that tasks may use for a model."""
    own = f"{model.name}:{model.version}" if model.version else model.name
    return [own, model.name] if model.current and model.version else [own]


def _cost_bytes(model: model_pb2.Model) -> int:
    """Bytes of the model's message, and of its names among the offers."""
    names_bytes = sum(len(name.encode()) + _FRAMING_BYTES for name in _names_of(model))
    return model.ByteSize() + _FRAMING_BYTES + names_bytes


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
        inputs=[tensor.message() for tensor in resident.signature.inputs],
        outputs=[tensor.message() for tensor in resident.signature.outputs],
    )
    if resident.load_s:
        message.load_duration.FromNanoseconds(int(resident.load_s * 1e9))
    return message

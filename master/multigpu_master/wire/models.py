"""Converts messages about models: from workers for the core, and from the core for operators and workers."""

import itertools
from collections.abc import Iterable

from multigpu._transport.names import HELLO_BYTES_MAX, MODEL_BYTES_MAX, MODELS_MAX
from multigpu.v1 import model_pb2, worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident
from multigpu_master.errors import InvalidMessageError
from multigpu_master.wire.times import seconds_of, set_time
from multigpu_master.wire.validation import check_printable

# Limit of a model's id, NAME or NAME:VERSION.
ID_CHARS_MAX = 2 * MODEL_BYTES_MAX + 1
# Limit of the tasks that a slot runs at the same time.
CONCURRENCY_MAX = 1 << 20
# Fields with the same name in a message and in Model. The size limit of a hello or a catalog bounds their texts.
_SAME_FIELDS = ("name", "version", "current", "files_bytes", "memory_bytes", "error")
_RESIDENT_FIELDS = ("memory_bytes", "loads", "pinned")
_STATES = {
    ModelState.LOADING: model_pb2.MODEL_STATE_LOADING,
    ModelState.READY: model_pb2.MODEL_STATE_READY,
    ModelState.UNLOADING: model_pb2.MODEL_STATE_UNLOADING,
}


def models_of(messages: Iterable[model_pb2.Model]) -> tuple[Model, ...]:
    """Returns at most MODELS_MAX of the models that a worker offers, one for each id. Raises InvalidMessageError if a
    model is invalid.
    """
    found: dict[str, Model] = {}
    for message in itertools.islice(messages, MODELS_MAX):
        model = _model(message)
        found.setdefault(model.model_id, model)
    return tuple(found.values())


def _model(m: model_pb2.Model) -> Model:
    for field, value in (("name", m.name), ("version", m.version)):
        if len(value.encode()) > MODEL_BYTES_MAX or "\0" in value:
            raise InvalidMessageError(
                f"a model's {field} may have at most {MODEL_BYTES_MAX} bytes, and no NUL; rename the model"
            )
        check_printable(f"a model's {field}", value)
    if not m.name:
        raise InvalidMessageError("a model has no name; give it one")
    m.DiscardUnknownFields()
    return Model(
        **{name: getattr(m, name) for name in _SAME_FIELDS},
        expected_bytes=m.expected_memory_bytes,
        load_s=max(0.0, seconds_of(m.load_duration)) if m.HasField("load_duration") else 0.0,
        wire=m.SerializeToString(),
    )


def capabilities_of(messages: Iterable[worker_service_pb2.Capability]) -> tuple[Capability, ...]:
    """Returns what a worker can run. Raises InvalidMessageError if it can run nothing, or a name is invalid."""
    found = tuple(
        Capability(kind=c.kind, models=tuple(c.models), concurrency=min(max(1, c.concurrency), CONCURRENCY_MAX))
        for c in messages
    )
    if not found:
        raise InvalidMessageError("capabilities are missing: name at least one kind that the worker runs")
    for capability in found:
        check_printable("kind", capability.kind)
        for model in capability.models:
            check_printable("model", model)
    return found


def catalog(m: worker_service_pb2.Catalog) -> ev.Catalog:
    """Returns the event for a worker's new catalog. Raises InvalidMessageError if the catalog is invalid."""
    capabilities = capabilities_of(m.capabilities)
    if m.ByteSize() > HELLO_BYTES_MAX:
        raise InvalidMessageError(
            f"the worker describes its models in {m.ByteSize()} bytes; at most {HELLO_BYTES_MAX} are allowed: "
            "serve fewer kinds and models, or give the models fewer labels"
        )
    return ev.Catalog(capabilities, models_of(m.models))


def residents(m: worker_service_pb2.Heartbeat) -> tuple[Resident, ...]:
    """At most MODELS_MAX of the models in a worker's memory, sorted by id."""
    found = {each.model: each for each in map(_resident, itertools.islice(m.models, MODELS_MAX))}
    return tuple(found[model] for model in sorted(found))


def _resident(m: model_pb2.ModelResidency) -> Resident:
    # A model in a state that this master does not know cannot be used, and its memory is not counted.
    state = next((s for s, number in _STATES.items() if number == m.state), ModelState.UNLOADING)
    return Resident(
        model=m.model[:ID_CHARS_MAX],
        state=state,
        last_use_s=seconds_of(m.last_use_time) if m.HasField("last_use_time") else 0.0,
        **{name: getattr(m, name) for name in _RESIDENT_FIELDS},
    )


def resident_message(resident: Resident) -> model_pb2.ModelResidency:
    """A model in a worker's memory, as operators see it."""
    message = model_pb2.ModelResidency(
        model=resident.model,
        state=_STATES[resident.state],
        **{name: getattr(resident, name) for name in _RESIDENT_FIELDS},
    )
    if resident.last_use_s:
        set_time(message.last_use_time, resident.last_use_s)
    return message


def fill_desired(desired: worker_service_pb2.DesiredState, worker: Worker) -> None:
    """Fills in the models that a worker must keep loaded, and the models that it must unload."""
    desired.pinned_models.extend(worker.residency.operator_pinned_ids())
    desired.unwanted_models.extend(worker.residency.unwanted)

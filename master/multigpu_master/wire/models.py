"""What workers say of models: read for the core, freed of what makes no sense; and told to those who ask."""

import itertools
import re
from collections.abc import Iterable

from multigpu.v1 import model_pb2, task_pb2, worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident
from multigpu_master.wire import messages as wire

# What a worker may say of one model, beside its name.
TEXTS_MAX, TEXT_CHARS_MAX = 64, 1 << 10
# Control characters, and those that show nothing or change how the rest is shown.
_CONTROL = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_STATES = {
    ModelState.LOADING: model_pb2.MODEL_STATE_LOADING,
    ModelState.READY: model_pb2.MODEL_STATE_READY,
    ModelState.UNLOADING: model_pb2.MODEL_STATE_UNLOADING,
}


def plain_name(field: str, value: str) -> None:
    """InvalidTaskError: a terminal or a log would not show the name as it is. The journal may hold older ones."""
    if _CONTROL.search(value):
        raise wire.InvalidTaskError(f"{field} {value!r} contains control or invisible characters; remove them")


def plain_spec(m: task_pb2.TaskSpec) -> None:
    """InvalidTaskError, as `plain_name`: of a task's names."""
    for field in ("content_type", "kind", "model", "queue"):
        plain_name(field, getattr(m, field))


def plain_hello(m: worker_service_pb2.Hello) -> None:
    """InvalidTaskError, as `plain_name`: of a worker's names."""
    plain_name("worker_id", m.worker_id)
    plain_name("host", m.host)
    for capability in m.capabilities:
        plain_name("kind", capability.kind)
        for model in capability.models:
            plain_name("model", model)


def models_of(messages: Iterable[model_pb2.Model]) -> tuple[Model, ...]:
    """The models that a worker offers, those of one id once. InvalidTaskError: one of them makes no sense."""
    found: dict[str, Model] = {}
    for message in itertools.islice(messages, wire.MODELS_MAX):
        model = _model(message)
        found.setdefault(model.model_id, model)
    return tuple(found.values())


def _model(m: model_pb2.Model) -> Model:
    for field, value in (("name", m.name), ("version", m.version)):
        if len(value.encode()) > wire.MODEL_BYTES_MAX or "\0" in value:
            raise wire.InvalidTaskError(
                f"a model's {field} has at most {wire.MODEL_BYTES_MAX} bytes, and no NUL; rename the model"
            )
        plain_name(f"a model's {field}", value)
    if not m.name:
        raise wire.InvalidTaskError("a model has no name; give it one")
    m.DiscardUnknownFields()
    m.error = m.error[: wire.MESSAGE_CHARS_MAX]
    for texts in (m.labels, m.facts):
        for key in list(texts)[TEXTS_MAX:]:
            del texts[key]
        for key, text in list(texts.items()):
            texts[key] = text[:TEXT_CHARS_MAX]
    return Model(
        name=m.name,
        version=m.version,
        current=m.current,
        files_bytes=m.files_bytes,
        memory_bytes=m.memory_bytes,
        expected_bytes=m.expected_memory_bytes,
        load_s=max(0.0, wire.seconds_of(m.load_duration)) if m.HasField("load_duration") else 0.0,
        error=m.error,
        wire=m.SerializeToString(),
    )


def catalog(m: worker_service_pb2.Catalog) -> ev.Catalog:
    """What a worker offers now. InvalidTaskError: it makes no sense."""
    if not m.capabilities:
        raise wire.InvalidTaskError("capabilities are missing: a worker that can run nothing is of no use")
    if m.ByteSize() > wire.HELLO_BYTES_MAX:
        raise wire.InvalidTaskError(
            f"the worker says {m.ByteSize()} bytes of its models; at most {wire.HELLO_BYTES_MAX} are allowed: "
            "serve fewer, or give them fewer labels"
        )
    return ev.Catalog(
        tuple(Capability(kind=c.kind, models=tuple(c.models)) for c in m.capabilities), models_of(m.models)
    )


def residents(m: worker_service_pb2.Heartbeat) -> tuple[Resident, ...]:
    """The models that a worker says it has in memory, by id."""
    found = {each.model: each for each in map(_resident, itertools.islice(m.models, wire.MODELS_MAX))}
    return tuple(found[model] for model in sorted(found))


def _resident(m: model_pb2.ModelResidency) -> Resident:
    # What is in a state that this master doesn't know takes memory, and is not to be counted on.
    state = next((s for s, told in _STATES.items() if told == m.state), ModelState.UNLOADING)
    return Resident(
        model=m.model[: wire.MODEL_BYTES_MAX],
        state=state,
        memory_bytes=m.memory_bytes,
        last_use_s=wire.seconds_of(m.last_use_time) if m.HasField("last_use_time") else 0.0,
        loads=m.loads,
        pinned=m.pinned,
    )


def resident_message(resident: Resident) -> model_pb2.ModelResidency:
    """A model in a worker's memory, as operators see it."""
    message = model_pb2.ModelResidency(
        model=resident.model,
        state=_STATES[resident.state],
        memory_bytes=resident.memory_bytes,
        loads=resident.loads,
        pinned=resident.pinned,
    )
    if resident.last_use_s:
        wire.set_time(message.last_use_time, resident.last_use_s)
    return message


def fill_desired(desired: worker_service_pb2.DesiredState, worker: Worker) -> None:
    """Which models are to stay on a worker, and which to go."""
    desired.pinned_models.extend(worker.residency.pinned())
    desired.unwanted_models.extend(worker.residency.unwanted)

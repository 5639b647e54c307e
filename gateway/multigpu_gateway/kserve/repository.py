"""The models of all workers as one repository: RepositoryIndex, RepositoryModelLoad, RepositoryModelUnload."""

import asyncio

from multigpu.fleet import ModelEntry, ModelState

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, INTERNAL, LATE, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.models import id_of, served
from multigpu_gateway.tasks import Call

POLL_S = 0.2
# The protocol's names of states. The first one that a model has on any worker is its state.
_STATES = {ModelState.READY: "READY", ModelState.LOADING: "LOADING", ModelState.UNLOADING: "UNLOADING"}
_ABSENT, _ABSENT_REASON = "UNAVAILABLE", "unloaded"


async def index(request: pb.RepositoryIndexRequest, pair: ClientPair) -> pb.RepositoryIndexResponse:
    """Lists every version of every model, with the first state of _STATES that it has on any worker."""
    found: dict[tuple[str, str], list[ModelEntry]] = {}
    for entry in await served(pair):
        found.setdefault((entry.model.name, entry.model.version), []).append(entry)
    response = pb.RepositoryIndexResponse()
    for (name, version), entries in found.items():
        states = {place.residency.state for entry in entries for place in entry.places}
        state = next((text for each, text in _STATES.items() if each in states), _ABSENT)
        if request.ready and state != "READY":
            continue
        errors = [entry.model.error for entry in entries if entry.model.error]
        reason = "" if state != _ABSENT else next(iter(errors), _ABSENT_REASON)
        response.models.add(name=name, version=version, state=state, reason=reason)
    return response


async def load(request: pb.RepositoryModelLoadRequest, pair: ClientPair, call: Call) -> pb.RepositoryModelLoadResponse:
    """Has the master load a model, and returns when it is ready. Raises HttpError if it can't be loaded in time."""
    if rejected := sorted(request.parameters):
        why = "a fleet's models are files on its workers, with their model.toml"
        raise HttpError(BAD_REQUEST, f"the parameter {rejected[0]!r} is not served: {why}", param=rejected[0])
    name = request.model_name
    worker_ids = set(await pair.admin.load_model(name))
    try:
        async with asyncio.timeout(call.timeout_s):
            while True:
                if await _is_ready(pair, name, worker_ids):
                    return pb.RepositoryModelLoadResponse()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise HttpError(LATE, f"{name} is not ready after {call.timeout_s:g} s; it is still being loaded") from None


async def _is_ready(pair: ClientPair, model: str, worker_ids: set[str]) -> bool:
    """Whether a model is ready on one of these workers. Raises HttpError if loading has failed."""
    name = model.partition(":")[0]
    entries = [
        entry
        for entry in await served(pair, name)
        if model == id_of(name, entry.model.version) or (model == name and entry.model.current)
    ]
    places = [place for entry in entries for place in entry.places if place.worker_id in worker_ids]
    if any(place.residency.state is ModelState.READY for place in places):
        return True
    failures = [entry.model.error for entry in entries if entry.model.error and worker_ids & {*entry.worker_ids}]
    if failures and not places:
        raise HttpError(INTERNAL, f"failed to load {model!r}: {failures[0]}; the worker retries until it is unloaded")
    return False


async def unload(request: pb.RepositoryModelUnloadRequest, pair: ClientPair) -> pb.RepositoryModelUnloadResponse:
    """Makes workers unload a model once its tasks have ended. Returns at once."""
    await pair.admin.unload_model(request.model_name)
    return pb.RepositoryModelUnloadResponse()

"""Information on the server and its models: ServerMetadata, ModelReady, ModelMetadata, ModelConfig, ModelStatistics."""

from multigpu.fleet import ModelEntry, WorkerState

from multigpu_gateway import VERSION
from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import NOT_FOUND, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.kinds import GENERATE, KINDS, tensors_of
from multigpu_gateway.kserve.statistics import Statistics
from multigpu_gateway.kserve.tensors import BYTES

# Triton's names of the supported extensions of the protocol.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "schedule_policy",
              "statistics")  # fmt: skip
SHARED_MEMORY = "system_shared_memory"
# The version, in statistics, of a model without versions: perf_analyzer fails if the version is not a number.
ONLY_VERSION = "1"


def server_metadata(*, shared_memory: bool) -> pb.ServerMetadataResponse:
    """Returns the gateway's name, version and extensions. `shared_memory`: whether it is on."""
    extensions = (*EXTENSIONS, SHARED_MEMORY) if shared_memory else EXTENSIONS
    return pb.ServerMetadataResponse(name="multigpu", version=VERSION, extensions=extensions)


def id_of(name: str, version: str) -> str:
    """Returns the name of a model in the options of a task."""
    return f"{name}:{version}" if version else name


async def served(pair: ClientPair, name: str = "") -> list[ModelEntry]:
    """Returns the models, of one name or of all, whose kind the protocol can serve."""
    return [entry for entry in await pair.admin.list_models(name) if entry.model.kind in KINDS]


async def versions_of(pair: ClientPair, name: str, version: str) -> list[ModelEntry]:
    """Returns the entries of a version of a model, those without an error first. `version` "": the current version, or
    all if none is current. Raises HttpError if there is no entry.
    """
    entries = await served(pair, name)
    chosen = [each for each in entries if (each.model.version == version if version else each.model.current)]
    if not (chosen := chosen or ([] if version else entries)):
        raise HttpError(NOT_FOUND, f"there is no model {id_of(name, version)!r}", code="model_not_found", param="name")
    return sorted(chosen, key=lambda entry: (bool(entry.model.error), not entry.model.inputs))


async def ready(request: pb.ModelReadyRequest, pair: ClientPair) -> pb.ModelReadyResponse:
    """Whether a connected worker offers the model without an error. Raises HttpError if there is no such model."""
    offering = {
        worker_id
        for entry in await versions_of(pair, request.name, request.version)
        if not entry.model.error
        for worker_id in entry.worker_ids
    }
    workers = await pair.admin.list_workers()
    active = {worker.worker_id for worker in workers if worker.state is WorkerState.ACTIVE}
    return pb.ModelReadyResponse(ready=not offering.isdisjoint(active))


async def metadata(request: pb.ModelMetadataRequest, pair: ClientPair) -> pb.ModelMetadataResponse:
    """Returns the versions, inputs and outputs of a model. Raises HttpError if there is no such model, or if its inputs
    are not known yet.
    """
    model = (await versions_of(pair, request.name, request.version))[0].model
    versions = {entry.model.version for entry in await served(pair, request.name)} - {""}
    response = pb.ModelMetadataResponse(name=model.name, versions=sorted(versions), platform=model.engine)
    for messages, tensors in zip((response.inputs, response.outputs), tensors_of(model), strict=True):
        for tensor in tensors:
            messages.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response


async def config(request: pb.ModelConfigRequest, pair: ClientPair) -> pb.ModelConfigResponse:
    """As `metadata`, in the form of Triton's model configuration."""
    model = (await versions_of(pair, request.name, request.version))[0].model
    inputs, outputs = tensors_of(model)
    found = pb.ModelConfig(name=model.name, platform=model.engine, backend=model.engine)
    for each in inputs:
        found.input.add(name=each.name, data_type=_type(each.datatype), dims=each.shape, optional=each.optional)
    for each in outputs:
        found.output.add(name=each.name, data_type=_type(each.datatype), dims=each.shape)
    found.model_transaction_policy.decoupled = model.kind == GENERATE
    return pb.ModelConfigResponse(config=found)


def _type(datatype: str) -> pb.DataType:
    name = "STRING" if datatype == BYTES else datatype or "INVALID"
    found: pb.DataType = getattr(pb, f"TYPE_{name}")
    return found


async def statistics(
    request: pb.ModelStatisticsRequest, pair: ClientPair, counted: Statistics
) -> pb.ModelStatisticsResponse:
    """Returns this gateway's counters of one model or of all. Raises HttpError if there is no such model."""
    if request.name:
        entries = await versions_of(pair, request.name, request.version)
    else:
        entries = await served(pair)
    current = {(entry.model.name, entry.model.version): entry.model.current for entry in entries}
    found = [counted.of(name, version, current=current[name, version]) for name, version in current]
    for each in found:
        each.version = each.version or ONLY_VERSION
    return pb.ModelStatisticsResponse(model_stats=found)

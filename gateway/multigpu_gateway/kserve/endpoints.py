"""The protocol over HTTP, with the routes and the error statuses of Triton."""

import re
from typing import Annotated, Any

import msgspec
from multigpu import errors

from multigpu_gateway.clients import ClientPair, Clients
from multigpu_gateway.errors import BAD_REQUEST, CONFLICT, NOT_FOUND, HttpError, http_error, not_allowed
from multigpu_gateway.http import JSON, Request, decode
from multigpu_gateway.kserve import models, repository
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.bodies import json_value, read_infer, write_infer
from multigpu_gateway.kserve.inference import Inference
from multigpu_gateway.kserve.shared_memory import Regions
from multigpu_gateway.routes import Route, Serve

MODELS, REPOSITORY = "/v2/models", "/v2/repository/models"
_MODEL = re.compile(f"{MODELS}/(.+?)(?:/versions/([^/]+))?(?:/(ready|config|stats|infer))?")
_REPOSITORY_MODEL = re.compile(f"{REPOSITORY}/(.+)/(load|unload)")
MEMORY, CUDA_MEMORY = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_MEMORY = re.compile(f"{MEMORY}(?:/region/(.+))?/(status|register|unregister)")
_JSON_LENGTH = b"inference-header-content-length"
_OCTETS = b"application/octet-stream"


class _Index(msgspec.Struct):
    ready: bool = False


class _Change(msgspec.Struct):
    parameters: dict[str, Any] = {}


class _Region(msgspec.Struct):
    key: str
    byte_size: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


_index = msgspec.json.Decoder(_Index)
_change = msgspec.json.Decoder(_Change)
_region = msgspec.json.Decoder(_Region)


def error_body(error: HttpError) -> dict[str, str]:
    return {"error": error.message}


def routes(inference: Inference, clients: Clients) -> dict[str, Route]:
    """Returns the routes by path."""
    endpoints = Endpoints(inference, clients)

    def route(*, prefix: bool = False, **methods: Serve) -> Route:
        return Route(
            {name: _with_tritons_statuses(serve) for name, serve in methods.items()}, error_body, prefix=prefix
        )

    memory: dict[str, Route] = {}
    if inference.regions is not None:
        regions = MemoryEndpoints(inference.regions)
        memory = {
            MEMORY: route(GET=regions.status, POST=regions.change, prefix=True),
            f"{CUDA_MEMORY}/status": route(GET=regions.cuda_status),
            f"{CUDA_MEMORY}/unregister": route(POST=regions.cuda_unregister),
        }
    return memory | {
        "/v2": route(GET=endpoints.metadata),
        "/v2/health/live": route(GET=endpoints.live),
        "/v2/health/ready": route(GET=endpoints.ready),
        f"{MODELS}/stats": route(GET=endpoints.statistics),
        MODELS: route(GET=endpoints.describe, POST=endpoints.infer, prefix=True),
        "/v2/repository/index": route(POST=endpoints.index),
        REPOSITORY: route(POST=endpoints.change, prefix=True),
    }


class Endpoints:
    """The functions that serve the routes."""

    def __init__(self, inference: Inference, clients: Clients) -> None:
        self._inference = inference
        self._clients = clients

    async def live(self, request: Request, _pair: ClientPair) -> None:
        """Responds 200."""
        await request.respond(200, b"")

    async def ready(self, request: Request, _pair: ClientPair) -> None:
        """Responds 200 if the master answers, else 400."""
        try:
            await self._clients.check_master()
        except errors.MultigpuError as error:
            raise HttpError(BAD_REQUEST, str(error)) from error
        await request.respond(200, b"")

    async def metadata(self, request: Request, _pair: ClientPair) -> None:
        """Responds with the gateway's name, version and extensions."""
        await _respond(request, json_value(models.server_metadata(shared_memory=self._inference.regions is not None)))

    async def statistics(self, request: Request, pair: ClientPair) -> None:
        """Responds with the statistics of all models."""
        grpc_request = pb.ModelStatisticsRequest()
        await _respond(request, json_value(await models.statistics(grpc_request, pair, self._inference.statistics)))

    async def describe(self, request: Request, pair: ClientPair) -> None:
        """Responds with a model's metadata, configuration or statistics, or for `ready` with 200 or 400."""
        name, version, operation = _model_of(request)
        named: dict[str, str] = {"name": name, "version": version}
        if operation == "":
            await _respond(request, json_value(await models.metadata(pb.ModelMetadataRequest(**named), pair)))
        elif operation == "config":
            found = await models.config(pb.ModelConfigRequest(**named), pair)
            await _respond(request, json_value(found.config))
        elif operation == "stats":
            grpc_request = pb.ModelStatisticsRequest(**named)
            await _respond(request, json_value(await models.statistics(grpc_request, pair, self._inference.statistics)))
        elif operation == "ready":
            if not (await models.ready(pb.ModelReadyRequest(**named), pair)).ready:
                raise HttpError(BAD_REQUEST, f"no connected worker has the model {name!r}")
            await request.respond(200, b"")
        else:
            raise not_allowed(request.path, "GET", "POST")

    async def infer(self, request: Request, pair: ClientPair) -> None:
        """ModelInfer. A client disconnect cancels the task."""
        name, version, operation = _model_of(request)
        if operation != "infer":
            raise not_allowed(request.path, "POST", "GET")
        grpc_request, raw = read_infer(name, version, await request.body(), request.header(_JSON_LENGTH))
        async with request.while_connected():
            outputs = await self._inference.run(grpc_request, raw, pair, request)
        body, json_length = write_infer(grpc_request, outputs)
        headers = [(_JSON_LENGTH, b"%d" % json_length)] if json_length else []
        await request.respond(200, body, _OCTETS if json_length else JSON, headers)

    async def index(self, request: Request, pair: ClientPair) -> None:
        """RepositoryIndex. The body may be empty."""
        body = await request.body()
        grpc_request = pb.RepositoryIndexRequest(ready=bool(body) and decode(_index, body).ready)
        await _respond(request, json_value(await repository.index(grpc_request, pair))["models"])

    async def change(self, request: Request, pair: ClientPair) -> None:
        """Loads or unloads a model. The body may be empty."""
        found = _REPOSITORY_MODEL.fullmatch(request.path)
        if found is None:
            raise HttpError(NOT_FOUND, f"there is no {request.path}: {REPOSITORY}/NAME/load and …/unload are served")
        name, operation = found.groups()
        body = await request.body()
        parameters = decode(_change, body).parameters if body else {}
        async with request.while_connected():
            if operation == "load":
                grpc_request = pb.RepositoryModelLoadRequest(model_name=name)
                for parameter in parameters:
                    grpc_request.parameters[parameter].SetInParent()
                await repository.load(grpc_request, pair, request)
            else:
                await repository.unload(pb.RepositoryModelUnloadRequest(model_name=name), pair)
        await request.respond(200, b"")


class MemoryEndpoints:
    """The functions that serve the routes of shared memory."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    async def status(self, request: Request, pair: ClientPair) -> None:
        """Lists all regions, or the one in the path."""
        name, operation = _region_of(request)
        if operation != "status":
            raise not_allowed(request.path, "GET", "POST")
        found = await self._regions.status(pb.SystemSharedMemoryStatusRequest(name=name), pair)
        await _respond(request, [json_value(each) for each in found.regions.values()])

    async def change(self, request: Request, pair: ClientPair) -> None:
        """Registers or unregisters the region in the path, or unregisters all."""
        name, operation = _region_of(request)
        if operation == "status":
            raise not_allowed(request.path, "POST", "GET")
        if operation == "register":
            body = await request.json(_region)
            fields: dict[str, Any] = {"key": body.key, "offset": body.offset, "byte_size": body.byte_size}
            await self._regions.register(pb.SystemSharedMemoryRegisterRequest(name=name, **fields), pair)
        else:
            await self._regions.unregister(pb.SystemSharedMemoryUnregisterRequest(name=name), pair)
        await request.respond(200, b"")

    async def cuda_status(self, request: Request, _pair: ClientPair) -> None:
        """Responds with no regions: GPU memory can't be shared. Clients call this before they start."""
        await _respond(request, [])

    async def cuda_unregister(self, request: Request, _pair: ClientPair) -> None:
        """Does nothing: no region can be registered. Clients call this before they start."""
        await request.respond(200, b"")


def _region_of(request: Request) -> tuple[str, str]:
    """Returns the name ("": all regions) and the operation in a path below MEMORY. Raises HttpError for other paths."""
    found = _MEMORY.fullmatch(request.path)
    if found is None:
        raise HttpError(NOT_FOUND, f"there is no {request.path}: {MEMORY}/region/NAME/register and …/status are served")
    name, operation = found.groups(default="")
    return name, operation


def _model_of(request: Request) -> tuple[str, str, str]:
    """Returns the name, version and operation in a path below MODELS; a missing one is "". Raises HttpError if there
    is no name.
    """
    found = _MODEL.fullmatch(request.path)
    if found is None:
        raise HttpError(NOT_FOUND, f"name a model in the path: {MODELS}/NAME")
    name, version, operation = found.groups(default="")
    return name, version, operation


async def _respond(request: Request, value: Any) -> None:
    await request.respond(200, msgspec.json.encode(value))


def _with_tritons_statuses(serve: Serve) -> Serve:
    """Returns a function that serves as `serve` does, but with Triton's status 400 instead of 409."""

    async def served(request: Request, pair: ClientPair) -> None:
        try:
            await serve(request, pair)
        except Exception as error:
            failure = http_error(error)
            if failure.status == CONFLICT:
                failure.status = BAD_REQUEST
            raise failure from error

    return served

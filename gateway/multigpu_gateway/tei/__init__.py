"""The HTTP API of Hugging Face's text-embeddings-inference (TEI).

https://huggingface.github.io/text-embeddings-inference, and for details router/src/http/ in TEI's source.

A TEI server has one model. Here the header X-Multigpu-Model names the model, or the path does: /tei/MODEL/embed, or
/tei/MODEL, which `huggingface_hub.InferenceClient(model=url)` calls. Without a name, the workers' default model of the
task's kind is used.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import NOT_FOUND, HttpError, http_error, not_allowed
from multigpu_gateway.http import Headers, Request
from multigpu_gateway.http import decode as decode_body
from multigpu_gateway.openai.embeddings import embed as openai_embed
from multigpu_gateway.openai.requests import EmbeddingsRequest
from multigpu_gateway.routes import Operation, Paths, Route, Serve
from multigpu_gateway.tasks import TASK_HEADERS
from multigpu_gateway.tei.call import Answer, Call
from multigpu_gateway.tei.embedding import EmbedRequest, SimilarityRequest, embed, similarity
from multigpu_gateway.tei.errors import BACKEND_FAILED, UNPROCESSABLE, as_tei, error_body, openai_error_body
from multigpu_gateway.tei.models import health, info, kind_of
from multigpu_gateway.tei.scoring import PredictRequest, RerankRequest, predict, rerank
from multigpu_gateway.tei.tokens import DecodeRequest, EmbedAllRequest, TokenizeRequest, decode, embed_all, tokenize

PREFIX = "/tei"
# A path below /tei/MODEL: TEI has this route of OpenAI's API, too.
OPENAI_PATH = "/v1/embeddings"
MODEL = b"x-multigpu-model"
# Serves a call. The operations in BODIES take the decoded request body as a second argument.
OperationFunction = Callable[..., Awaitable[Answer]]


class OpenAiRequest(EmbeddingsRequest, kw_only=True):
    """The request body for OPENAI_PATH. The path names the model."""

    model: str = ""


_openai_request = msgspec.json.Decoder(OpenAiRequest)


class _Shape(msgspec.Struct):
    """The fields by which `by_kind` distinguishes requests."""

    inputs: msgspec.Raw = msgspec.Raw(b"null")
    query: msgspec.Raw = msgspec.Raw(b"null")


_shape = msgspec.json.Decoder(_Shape)


async def by_kind(call: Call, body: msgspec.Raw) -> Answer:
    """Embeds, reranks or classifies, according to the model's kind. If `inputs` is an object, compares sentences."""
    shape = decode_body(_shape, bytes(body))
    default = "embed" if bytes(shape.query) == b"null" else "rerank"
    kind = await kind_of(call) if call.model else default
    if kind == "embed" and bytes(shape.inputs).startswith(b"{"):
        return await _run(similarity, call, bytes(body))
    operations: dict[str, OperationFunction] = {"embed": embed, "rerank": rerank, "classify": predict}
    return await _run(operations[kind], call, bytes(body))


async def not_served(_call: Call) -> Answer:
    """Raises HttpError, for a path that TEI serves and the gateway does not."""
    message = f"this path is not served: of TEI's API there are {', '.join(SERVED)}; docs/compatibility.md"
    raise HttpError(NOT_FOUND, message)


SERVED = ("/embed", "/embed_all", "/rerank", "/predict", "/similarity", "/tokenize", "/decode", "/info", "/health")
# By the last part of a path ("" for /tei/MODEL and /), then by method.
OPERATIONS: dict[str, Mapping[str, OperationFunction]] = {
    "": {"POST": by_kind, "GET": health},
    "embed": {"POST": embed},
    "rerank": {"POST": rerank},
    "predict": {"POST": predict},
    "similarity": {"POST": similarity},
    "info": {"GET": info},
    "health": {"GET": health},
    "embed_all": {"POST": embed_all},
    "tokenize": {"POST": tokenize},
    "decode": {"POST": decode},
    "embed_sparse": {"POST": not_served},
}

BODIES: dict[OperationFunction, Any] = {
    by_kind: (EmbedRequest, SimilarityRequest, RerankRequest, PredictRequest), embed: EmbedRequest,
    similarity: SimilarityRequest, rerank: RerankRequest, predict: PredictRequest,
    embed_all: EmbedAllRequest, tokenize: TokenizeRequest, decode: DecodeRequest,
}  # fmt: skip
_decoders = {each: msgspec.json.Decoder(msgspec.Raw if each is by_kind else type_) for each, type_ in BODIES.items()}


async def _run(operation: OperationFunction, call: Call, body: bytes) -> Answer:
    """Runs an operation. Raises HttpError if the request body can't be decoded."""
    if (decoder := _decoders.get(operation)) is None:
        return await operation(call)
    return await operation(call, decode_body(decoder, body))


async def _respond(operation: OperationFunction, request: Request, pair: ClientPair, model: str) -> None:
    """Responds with the result of an operation. Raises HttpError with TEI's statuses."""
    begun_at = time.perf_counter()
    try:
        body = await request.body()
        call = Call(request, pair, request.header(MODEL) or model)
        async with request.while_connected():
            answer = await _run(operation, call, body)
    except Exception as error:
        raise as_tei(http_error(error)) from error
    headers: Headers = []
    if answer.characters is not None:
        took = b"%d" % round(1000 * (time.perf_counter() - begun_at))
        headers = [(b"x-compute-characters", b"%d" % answer.characters)]
        headers += [(b"x-compute-time", took), (b"x-total-time", took)]
    if answer.tokens is not None:
        headers.append((b"x-compute-tokens", b"%d" % answer.tokens))
    await request.respond(200, msgspec.json.encode(answer.value), headers=headers)


async def _below(request: Request, pair: ClientPair) -> None:
    """Serves /tei/MODEL and all paths below it. A model's name may contain slashes."""
    path = request.path.removeprefix(PREFIX).strip("/")
    if not path:
        raise HttpError(NOT_FOUND, f"name a model in the path: {PREFIX}/MODEL, or {PREFIX}/MODEL/embed")
    if (model := path.removesuffix(OPENAI_PATH)) != path:
        if request.method != "POST":
            raise not_allowed(request.path, request.method, "POST")
        await _openai_embeddings(request, pair, model)
        return
    model, _, name = path.rpartition("/")
    if not model or name not in OPERATIONS:
        model, name = path, ""
    methods = OPERATIONS[name]
    operation = methods.get("GET" if request.method == "HEAD" else request.method)
    if operation is None:
        raise not_allowed(request.path, request.method, *methods)
    await _respond(operation, request, pair, model)


async def _openai_embeddings(request: Request, pair: ClientPair, model: str) -> None:
    """Returns a vector for each input, in OpenAI's format. The path names the model."""
    try:
        parsed = await request.json(_openai_request)
        parsed.model = model
        await openai_embed(request, pair, parsed)
    except Exception as error:
        failure = as_tei(http_error(error))
        if request.responded:
            raise failure from error
        body = msgspec.json.encode(openai_error_body(failure))
        await request.respond(failure.status, body, headers=failure.headers)


def _at_root(operation: OperationFunction) -> Serve:
    async def serve(request: Request, pair: ClientPair) -> None:
        await _respond(operation, request, pair, "")

    return serve


def _described(path: str, methods: Mapping[str, OperationFunction]) -> Paths:
    more: dict[str, Any] = {"headers": (MODEL, *TASK_HEADERS), "errors": (NOT_FOUND, UNPROCESSABLE, BACKEND_FAILED)}
    there = {method: each for method, each in methods.items() if each is not not_served}
    found = {method: Operation(each, body=BODIES.get(each), **more) for method, each in there.items()}
    return {path: found} if found else {}


def _root_routes() -> dict[str, Route]:
    """Returns TEI's routes at the root, without its GET / and /health: there the gateway has its own."""
    routes = {}
    for name, methods in OPERATIONS.items():
        served = {method: each for method, each in methods.items() if each is not health}
        if served:
            at_root = {method: _at_root(each) for method, each in served.items()}
            routes[f"/{name}"] = Route(at_root, error_body, paths=_described(f"/{name}", served))
    return routes


_below_paths: dict[str, Mapping[str, Operation]] = {}
for _name, _methods in OPERATIONS.items():
    _below_paths |= _described(f"{PREFIX}/{{model}}/{_name}".rstrip("/"), _methods)
_openai_operation = Operation(_openai_embeddings, body=OpenAiRequest, headers=TASK_HEADERS)
_below_paths[f"{PREFIX}/{{model}}{OPENAI_PATH}"] = {"POST": _openai_operation}
ROUTES = {**_root_routes(), PREFIX: Route({"GET": _below, "POST": _below}, error_body, prefix=True, paths=_below_paths)}

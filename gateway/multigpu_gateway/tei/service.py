"""TEI's gRPC services tei.v1.Info, Embed, Predict, Rerank and Tokenize: they share the operations of the HTTP API."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from multigpu.config.config import GatewayConfig

from multigpu_gateway.clients import ClientPair, Clients
from multigpu_gateway.errors import BAD_REQUEST, NOT_IMPLEMENTED, TOO_LARGE, HttpError
from multigpu_gateway.grpc_calls import GrpcCall, GrpcCalls, parsed
from multigpu_gateway.metrics import Metrics
from multigpu_gateway.tei import MODEL
from multigpu_gateway.tei import tei_pb2 as pb
from multigpu_gateway.tei.call import Answer, Call, check_count
from multigpu_gateway.tei.embedding import EmbedRequest, embed
from multigpu_gateway.tei.models import info
from multigpu_gateway.tei.scoring import PredictRequest, RerankRequest, predict, rerank
from multigpu_gateway.tei.tokens import DecodeRequest, EmbedAllRequest, TokenizeRequest, decode, embed_all, tokenize

PACKAGE = "tei.v1"
_TYPES = {
    "embedding": pb.MODEL_TYPE_EMBEDDING, "classifier": pb.MODEL_TYPE_CLASSIFIER, "reranker": pb.MODEL_TYPE_RERANKER,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Method:
    """An operation as a gRPC method. `body_of` converts a request to the operation's argument, `response` the
    operation's value to the response.
    """

    request_type: type[Message]
    run: Callable[[Call, Any], Awaitable[Answer]]
    body_of: Callable[[Any], Any]
    response: Callable[[Any], Any]

    async def __call__(self, request: Message, pair: ClientPair, grpc_call: GrpcCall) -> Message:
        begun_ns = time.perf_counter_ns()
        call = Call(grpc_call, pair, grpc_call.header(MODEL))
        answer = await self.run(call, self.body_of(request))
        response = self.response(answer.value)
        if answer.characters is not None:
            took_ns = time.perf_counter_ns() - begun_ns
            counted = pb.Metadata(compute_chars=answer.characters, compute_tokens=answer.tokens, total_time_ns=took_ns)
            response.metadata.CopyFrom(counted)
        return cast("Message", response)


def _truncated(request: Any) -> dict[str, Any]:
    """Returns the fields of Truncated. `truncate` false becomes None: over gRPC it may not have been set."""
    right = request.truncation_direction == pb.TRUNCATION_DIRECTION_RIGHT
    return {"truncate": request.truncate or None, "truncation_direction": "Right" if right else "Left"}


def _given(request: Message, *names: str) -> dict[str, Any]:
    """Returns those of the named optional fields that the request has."""
    return {name: getattr(request, name) for name in names if request.HasField(name)}


def _embed(request: pb.EmbedRequest) -> EmbedRequest:
    optional = _given(request, "normalize", "prompt_name", "dimensions")
    return EmbedRequest(inputs=request.inputs, **optional, **_truncated(request))


def _embed_all(request: pb.EmbedAllRequest) -> EmbedAllRequest:
    return EmbedAllRequest(inputs=request.inputs, **_given(request, "prompt_name"), **_truncated(request))


def _token_vectors(value: Any) -> pb.EmbedAllResponse:
    return pb.EmbedAllResponse(token_embeddings=[pb.TokenEmbedding(embeddings=each) for each in value[0]])


def _predict(request: pb.PredictRequest) -> PredictRequest:
    return PredictRequest(inputs=request.inputs, raw_scores=request.raw_scores, **_truncated(request))


def _predict_pair(request: pb.PredictPairRequest) -> PredictRequest:
    return PredictRequest(inputs=list(request.inputs), raw_scores=request.raw_scores, **_truncated(request))


def _predictions(value: Any) -> pb.PredictResponse:
    return pb.PredictResponse(predictions=value)


def _rerank(request: pb.RerankRequest) -> RerankRequest:
    flags: dict[str, Any] = {"raw_scores": request.raw_scores, "return_text": request.return_text}
    return RerankRequest(query=request.query, texts=list(request.texts), **flags, **_truncated(request))


def _tokenize(request: pb.EncodeRequest) -> TokenizeRequest:
    given = {"add_special_tokens": request.add_special_tokens, **_given(request, "prompt_name")}
    return TokenizeRequest(inputs=request.inputs, **given)


def _decode(request: pb.DecodeRequest) -> DecodeRequest:
    return DecodeRequest(ids=list(request.ids), skip_special_tokens=request.skip_special_tokens)


def _info(value: Any) -> pb.InfoResponse:
    found = {name: each for name, each in value.items() if name in pb.InfoResponse.DESCRIPTOR.fields_by_name}
    return pb.InfoResponse(**found | {"model_type": _TYPES[next(iter(value["model_type"]))]})


# Each of these two has its name as the name of the service and of the method.
INFO = Method(pb.InfoRequest, lambda call, _body: info(call), lambda request: request, _info)
RERANK = Method(pb.RerankRequest, rerank, _rerank, lambda value: pb.RerankResponse(ranks=value))
# By service and method. Each method also exists as a stream, NAMEStream.
STREAMED = {
    "Embed": {
        "Embed": Method(pb.EmbedRequest, embed, _embed, lambda value: pb.EmbedResponse(embeddings=value[0])),
        "EmbedAll": Method(pb.EmbedAllRequest, embed_all, _embed_all, _token_vectors),
    },
    "Predict": {
        "Predict": Method(pb.PredictRequest, predict, _predict, _predictions),
        "PredictPair": Method(pb.PredictPairRequest, predict, _predict_pair, _predictions),
    },
    "Tokenize": {
        "Tokenize": Method(pb.EncodeRequest, tokenize, _tokenize, lambda value: pb.EncodeResponse(tokens=value[0])),
        "Decode": Method(pb.DecodeRequest, decode, _decode, lambda value: pb.DecodeResponse(text=value[0])),
    },
}


def services(config: GatewayConfig, clients: Clients, metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Returns the handlers of each service, for add_registered_method_handlers."""
    found: dict[str, dict[str, Any]] = {}

    def calls_of(service: str) -> tuple[GrpcCalls, dict[str, Any]]:
        name = f"{PACKAGE}.{service}"
        return GrpcCalls(name, config, clients, metrics), found.setdefault(name, {})

    for service, methods in STREAMED.items():
        calls, handlers = calls_of(service)
        for name, method in methods.items():
            handlers[name] = calls.unary(name, method.request_type, method)
            handlers[f"{name}Stream"] = calls.stream(f"{name}Stream", method.request_type, method)
    calls, handlers = calls_of("Embed")
    handlers["EmbedSparse"] = calls.unary("EmbedSparse", pb.EmbedSparseRequest, _not_served)
    handlers["EmbedSparseStream"] = calls.stream("EmbedSparseStream", pb.EmbedSparseRequest, _not_served)
    calls, handlers = calls_of("Info")
    handlers["Info"] = calls.unary("Info", INFO.request_type, INFO)
    calls, handlers = calls_of("Rerank")
    handlers["Rerank"] = calls.unary("Rerank", RERANK.request_type, RERANK)
    stream = partial(_rerank_stream, calls, config.body_bytes_max)
    handlers["RerankStream"] = calls.stream_unary("RerankStream", stream)
    return found


async def _not_served(_request: Message, _pair: ClientPair, _call: GrpcCall) -> Message:
    raise HttpError(NOT_IMPLEMENTED, "sparse vectors are not served: Embed and EmbedAll are; docs/compatibility.md")


async def _rerank_stream(calls: GrpcCalls, bytes_max: int, context: Any, pair: ClientPair) -> Message:
    """Responds once, for the texts of all requests of the stream. Raises HttpError if they are too many or too large,
    or if the requests have different queries.
    """
    whole = pb.RerankRequest()
    size = 0
    while (data := await context.read()) is not grpc.aio.EOF:
        request = parsed(pb.RerankStreamRequest, data)
        if not whole.texts:
            whole.query, whole.raw_scores, whole.return_text = request.query, request.raw_scores, request.return_text
        size += len(data)
        if size > bytes_max:
            raise HttpError(TOO_LARGE, f"the requests of the stream have more than {bytes_max:,} bytes")
        if request.query != whole.query:
            raise HttpError(BAD_REQUEST, "query is to be the same in all requests of the stream", param="query")
        whole.truncation_direction = max(whole.truncation_direction, request.truncation_direction)
        whole.texts.append(request.text)
        check_count(len(whole.texts), "texts")
    return await RERANK(whole, pair, calls.call_of(context))

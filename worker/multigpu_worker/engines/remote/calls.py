"""Tasks as requests to a server, and its answers as results, for each kind.

APIs: https://platform.openai.com/docs/api-reference (vLLM, TGI, mgpu-gateway),
https://huggingface.github.io/text-embeddings-inference/,
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from multigpu.v1 import embed_pb2, rerank_pb2
from multigpu.v1 import generate_pb2 as pb

from multigpu_worker.engines.base import Batch, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.engines.embed.payload import parse_texts
from multigpu_worker.engines.generate import payload as generate_payload
from multigpu_worker.engines.infer import payload as infer_payload
from multigpu_worker.engines.remote.server import Cancelled, RequestFailedError, Server, wrong_answer
from multigpu_worker.engines.rerank import payload as rerank_payload
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

T = TypeVar("T")
# KServe's types as NumPy's names.
DATATYPES = {
    "BOOL": "bool", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "UINT8": "uint8",
    "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
NAMES = {name: datatype for datatype, name in DATATYPES.items()}
FINISHED = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Call:
    """How the tasks of a kind become requests. `apis`: those that have something for the kind."""

    apis: ClassVar[tuple[str, ...]]

    def __init__(self, spec: ModelSpec, server: Server) -> None:
        self._server = server
        self._openai = spec.remote.api == "openai"
        self._model = spec.remote.model or spec.name
        self._url = spec.remote.url

    def run(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        """The result and its content type. Raises BadInputError, and what Server raises."""
        raise NotImplementedError

    def forget(self, item: Item) -> None:
        """The task has ended, or its attempt has failed."""

    def check(self) -> dict[str, str]:
        """Asks the server for the model, and returns facts for people. ModelFolderError: it does not have it."""
        if not self._openai:
            return {"model": str(read(lambda: self._server.get("/info")["model_id"]))}
        names = read(lambda: [str(each["id"]) for each in self._server.get("/v1/models")["data"]])
        if self._model not in names:
            there = f"it has {', '.join(names)}" if names else "it has none"
            raise ModelFolderError(
                f"{self._url} has no model {self._model!r} ({there}): set remote.model in model.toml"
            )
        return {"model": self._model}


def read(part: Callable[[], T]) -> T:
    """A part of an answer. RequestFailedError: it is not there."""
    try:
        return part()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise wrong_answer(repr(error)) from error


class Embed(Call):
    apis = ("openai", "tei")

    def run(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        cancelled = partial(reporter.cancelled, item)
        asked = parse_texts(item.payload, batch.content_type)
        if asked.output:
            raise BadInputError("a remote model gives vectors of texts only, neither those of tokens nor tokens")
        texts, tokens = list(asked.texts), 0
        if self._openai:
            body = {"model": self._model, "input": texts, "encoding_format": "base64"}
            answer = self._server.post("/v1/embeddings", body, cancelled)
            rows = read(lambda: {int(each["index"]): vector_of(each["embedding"]) for each in answer["data"]})
            vectors = read(lambda: [rows[n] for n in range(len(texts))])
            if asked.count_tokens:
                tokens = read(lambda: int(answer["usage"]["prompt_tokens"]))
        else:
            if asked.count_tokens or not isinstance(texts[0], str):
                raise BadInputError("text-embeddings-inference takes texts, and does not tell the number of tokens")
            answer = self._server.post("/embed", {"inputs": texts, "truncate": True}, cancelled)
            vectors = read(lambda: [vector_of(each) for each in answer])
        if len(vectors) != len(texts) or len({vector.shape for vector in vectors}) != 1:
            raise wrong_answer(f"{len(vectors)} vectors for {len(texts)} texts, or of different lengths")
        if batch.content_type == JSON:
            return json.dumps([vector.tolist() for vector in vectors]).encode(), JSON
        values = np.stack(vectors).astype("<f4")
        return embed_pb2.EmbedResult(
            dimension=values.shape[1], values=values.tobytes(), tokens=tokens
        ).SerializeToString(), ""


def vector_of(value: Any) -> Any:
    """A vector from base64 of little-endian binary32, or from a list of numbers. Raises ValueError, TypeError."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), "<f4")
    return np.asarray(value, np.float32)


class Rerank(Call):
    apis = ("tei", "openai")

    def run(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        cancelled = partial(reporter.cancelled, item)
        asked = rerank_payload.parse(item.payload, batch.content_type)
        documents = list(asked.documents)
        if asked.count_tokens or (self._openai and asked.raw_scores):
            raise BadInputError("this server tells neither the number of tokens nor, with the API openai, raw scores")
        if self._openai:
            answer = self._server.post("/v1/rerank", self._body(asked, documents), cancelled)
            found = read(lambda: {int(e["index"]): float(e["relevance_score"]) for e in answer["results"]})
        else:
            body = {"query": asked.query, "texts": documents, "raw_scores": asked.raw_scores, "truncate": True}
            answer = self._server.post("/rerank", body, cancelled)
            found = read(lambda: {int(e["index"]): float(e["score"]) for e in answer})
        scores = read(lambda: [found[n] for n in range(len(documents))])
        return rerank_payload.result(scores, 0, batch.content_type), batch.content_type

    def _body(self, asked: rerank_pb2.RerankPayload, documents: list[str]) -> dict[str, Any]:
        return {"model": self._model, "query": asked.query, "documents": documents, "top_n": len(documents)}


class Generate(Call):
    """The text is sent on as it comes. A later attempt asks for it again, and skips what was sent: the server must give
    the same text, which greedy decoding and the seed that is always sent should bring about.
    """

    apis = ("openai",)

    def run(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        asked = generate_payload.decode(pb.GeneratePayload, item.payload, batch.content_type)
        generate_payload.check(asked)
        if asked.HasField("logprobs"):
            raise BadInputError("a remote model gives no log probabilities: leave logprobs out")
        if len(item.partials) < item.partials_received:
            raise BadInputError("the attempt before has sent too much text for a remote model to go on from")
        before = generate_payload.read_before(item.partials, batch.content_type)
        drawn = asked.temperature > 0 and not asked.HasField("seed")
        seed = generate_payload.seed_of(item.task_id, item.payload) >> 1 if drawn else asked.seed
        sent, seed_sent, text = self._sent.get(item.lease_id, before.text), before.seed_sent, ""
        result = pb.GenerateResult(finish_reason=pb.FINISH_REASON_STOP)
        path, body = self._request(asked, seed)
        for event in self._server.events(path, body, partial(reporter.cancelled, item)):
            text += self._read(event, result)
            if not (text.startswith(sent) or sent.startswith(text)):
                raise RequestFailedError(
                    "RemoteError", "the server gave another text than before the interruption", retryable=False
                )
            if len(text) > len(sent):
                chunk = pb.GenerateChunk(text=text[len(sent) :])
                if drawn and not seed_sent:
                    chunk.seed, seed_sent = seed, True
                reporter.partial(item, generate_payload.encode(chunk, batch.content_type), batch.content_type)
                sent = self._sent[item.lease_id] = text
        result.text = text
        return generate_payload.encode(result, batch.content_type), batch.content_type

    def __init__(self, spec: ModelSpec, server: Server) -> None:
        super().__init__(spec, server)
        # By lease_id: the text that was sent on before the server became unavailable.
        self._sent: dict[int, str] = {}

    def forget(self, item: Item) -> None:
        self._sent.pop(item.lease_id, None)

    def _request(self, asked: pb.GeneratePayload, seed: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model, "stream": True, "stream_options": {"include_usage": True},
            "temperature": asked.temperature, "seed": seed,
        }  # fmt: skip
        if asked.max_tokens != generate_payload.TO_THE_END:
            body["max_tokens"] = asked.max_tokens or generate_payload.MAX_TOKENS
        # Not in OpenAI's API: only sent if they are given.
        given = {"top_p": asked.top_p, "top_k": asked.top_k, "repetition_penalty": asked.repetition_penalty}
        body |= {name: value for name, value in given.items() if value}
        if asked.stop:
            body["stop"] = list(asked.stop)
        if asked.json_schema:
            schema = {"name": "answer", "schema": json.loads(asked.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if asked.messages:
            said = [{"role": each.role, "content": each.content} for each in asked.messages]
            return "/v1/chat/completions", body | {"messages": said}
        return "/v1/completions", body | {"prompt": asked.prompt or list(asked.prompt_ids)}

    @staticmethod
    def _read(event: dict[str, Any], result: pb.GenerateResult) -> str:
        """The text of an event; what it says of the end goes to the result."""
        if usage := event.get("usage"):
            result.prompt_tokens = read(lambda: int(usage["prompt_tokens"]))
            result.completion_tokens = read(lambda: int(usage["completion_tokens"]))
        for choice in event.get("choices") or ():
            if reason := choice.get("finish_reason"):
                result.finish_reason = FINISHED.get(reason, pb.FINISH_REASON_STOP)
            return str(read(lambda: choice.get("text") or choice.get("delta", {}).get("content") or ""))  # noqa: B023
        return ""


class Infer(Call):
    apis = ("kserve",)

    def __init__(self, spec: ModelSpec, server: Server) -> None:
        super().__init__(spec, server)
        self._path = f"/v2/models/{self._model}"
        self._forward: _Forward | None = None

    def check(self) -> dict[str, str]:
        forward = self._metadata()
        return {"model": self._model, "inputs": "; ".join(map(str, forward.inputs))}

    def _metadata(self, cancelled: Cancelled = lambda: False) -> "_Forward":
        if self._forward is None:
            found = self._server.get(self._path, cancelled)
            self._forward = read(lambda: _Forward(found))
        return self._forward

    def run(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        cancelled = partial(reporter.cancelled, item)
        asked = infer_payload.parse(item.payload, batch.content_type, self._metadata(cancelled))
        body: dict[str, Any] = {"inputs": [_tensor(name, array) for name, array in asked.inputs.items()]}
        if asked.outputs:
            body["outputs"] = [{"name": name} for name in asked.outputs]
        answer = self._server.post(f"{self._path}/infer", body, cancelled)
        outputs = read(lambda: {str(each["name"]): _array(each) for each in answer["outputs"]})
        return infer_payload.result(outputs, asked.outputs, batch.content_type), batch.content_type


class _Forward:
    """What infer_payload.parse needs to know of a model: the tensors of its metadata."""

    per_example = None
    examples_max = 1

    def __init__(self, metadata: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError: it makes no sense."""
        self.inputs, self.outputs = (tuple(map(_spec, metadata[name])) for name in ("inputs", "outputs"))

    def __call__(self, inputs: Arrays) -> Arrays:
        raise NotImplementedError("the server runs it")


def _spec(tensor: dict[str, Any]) -> TensorSpec:
    shape = tuple(None if int(size) < 0 else int(size) for size in tensor["shape"])
    return TensorSpec(name=str(tensor["name"]), dtype=DATATYPES[tensor["datatype"]], shape=shape)


def _tensor(name: str, array: Any) -> dict[str, Any]:
    if array.dtype.name not in NAMES:
        raise BadInputError(f"the input {name!r} is {array.dtype.name}, which has no form in JSON")
    return {
        "name": name, "datatype": NAMES[array.dtype.name], "shape": list(array.shape), "data": array.ravel().tolist()
    }  # fmt: skip


def _array(tensor: dict[str, Any]) -> Any:
    return np.asarray(tensor["data"], DATATYPES[tensor["datatype"]]).reshape(tensor["shape"])

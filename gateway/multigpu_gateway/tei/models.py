"""GET /info and /health, and the kind of a model."""

import asyncio
from typing import Any

from multigpu import errors
from multigpu.fleet import Model, WorkerState

from multigpu_gateway import VERSION
from multigpu_gateway.errors import BAD_REQUEST, NOT_FOUND, UNAVAILABLE, HttpError
from multigpu_gateway.tei.call import INPUTS_MAX, Answer, Call
from multigpu_gateway.tei.errors import backend_error

HEALTH_TIMEOUT_S = 2.0
# TEI's model_type for each kind. Its details (pooling, names of classes) are empty: workers do not report them.
TYPES = {
    "embed": {"embedding": {}},
    "rerank": {"reranker": {"id2label": {}, "label2id": {}}},
    "classify": {"classifier": {"id2label": {}, "label2id": {}}},
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}


async def kind_of(call: Call) -> str:
    """Returns the kind of the call's model. Raises HttpError if there is no such model, or if TEI has no such kind."""
    return (await _model_of(call)).kind


async def info(call: Call) -> Answer:
    """Returns TEI's description of a model. Without a name, of the fleet's only embedding model."""
    model = await _model_of(call) if call.model else await _only_embedding_model(call)
    return Answer(_info(model, call.model or model.name))


def _info(model: Model, name: str) -> dict[str, Any]:
    return {
        "model_id": name,
        "model_sha": model.digest or None,
        "model_dtype": _DTYPES.get(model.precision, model.precision),
        "served_model_name": name,
        "model_type": TYPES[model.kind],
        # Unknown here: limits of the queue and of the workers apply.
        "max_concurrent_requests": None,
        "max_input_length": None,
        "max_batch_tokens": None,
        "max_batch_requests": None,
        "max_client_batch_size": INPUTS_MAX,
        "auto_truncate": True,
        "tokenization_workers": None,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


async def health(call: Call) -> Answer:
    """Checks that the master answers, and that a connected worker has the model. If the master rejects the token
    (health checks often send none), the model is not checked. Raises HttpError if a check fails.
    """
    name, _, _ = call.model.partition(":")
    admin = call.pair.admin
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            entries, workers = await admin.list_models(name), await admin.list_workers()
    except errors.AccessError:
        return Answer({"status": "ok"})
    except TimeoutError:
        raise HttpError(UNAVAILABLE, f"the master did not answer within {HEALTH_TIMEOUT_S:g} s", retry_s=1.0) from None
    if not entries:
        raise _unknown(call.model)
    connected = {worker.worker_id for worker in workers if worker.state is not WorkerState.LOST}
    if not any(connected.intersection(entry.worker_ids) for entry in entries if not entry.model.error):
        raise HttpError(UNAVAILABLE, f"no connected worker has model {call.model!r}", retry_s=1.0)
    return Answer({"status": "ok"})


async def _model_of(call: Call) -> Model:
    model = await call.find_model()
    if model is None:
        raise _unknown(call.model)
    if model.kind not in TYPES:
        raise backend_error(f"model {call.model!r} serves {model.kind}: TEI's API is for {', '.join(TYPES)}")
    return model


def _unknown(model: str) -> HttpError:
    message = f"there is no model {model!r}: GET /v1/models lists what there is"
    return HttpError(NOT_FOUND, message, code="model_not_found", param="model")


async def _only_embedding_model(call: Call) -> Model:
    entries = await call.pair.admin.list_models()
    models = {each.model.name: each.model for each in entries if not each.model.error and each.model.kind == "embed"}
    if len(models) != 1:
        message = f"the fleet has {len(models)} models to embed: name one in X-Multigpu-Model, or GET /tei/MODEL/info"
        raise HttpError(BAD_REQUEST, message, param="model")
    return next(iter(models.values()))

"""Requests for models through a worker's stream, and the models that it reported."""

from collections.abc import Callable

from multigpu.v1 import model_pb2

from tests.waiting import until_async
from tests.worker.scripted_master import SUCCEEDED, Stream
from tests.worker.toy_models import Answer

READY = model_pb2.MODEL_STATE_READY


async def ask(stream: Stream, lease_id: int, model: str, payload: bytes = b"x", timeout_s: float = 20.0) -> Answer:
    word = await stream.run(lease_id, payload, kind="infer", model=model, timeout_s=timeout_s)
    assert word.state == SUCCEEDED, word
    return Answer.of(word.result)


def resident(stream: Stream) -> dict[str, model_pb2.ModelResidency]:
    return {entry.model: entry for entry in stream.heartbeats[-1].models} if stream.heartbeats else {}


def ready(stream: Stream) -> set[str]:
    return {model for model, entry in resident(stream).items() if entry.state == READY}


def models(stream: Stream) -> dict[str, model_pb2.Model]:
    """The latest word about each model."""
    offered = list(stream.hello.models)
    for beat in stream.heartbeats:
        if beat.HasField("catalog"):
            offered = list(beat.catalog.models)
    return {f"{m.name}:{m.version}" if m.version else m.name: m for m in offered}


async def until(condition: Callable[[], object], what: str) -> None:
    await until_async(condition, what=what)

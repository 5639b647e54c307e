"""ModelInfer and ModelStreamInfer: a task for each request."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multigpu import errors
from multigpu.config.config import GatewayConfig
from multigpu.outcome import Outcome

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.kinds import InferenceTask, task_of, tensors_of, text_output
from multigpu_gateway.kserve.models import id_of, versions_of
from multigpu_gateway.kserve.shared_memory import Place, Regions
from multigpu_gateway.kserve.statistics import Statistics
from multigpu_gateway.kserve.tensors import NamedTensor, values_of, wrong
from multigpu_gateway.tasks import Call, TaskSettings

PRIORITY_MAX = 5
_EMPTY_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response of ModelStreamInfer. `final`: it is the last one of its request."""

    outputs: list[NamedTensor]
    final: bool


class Inference:
    """Runs the inference requests of all clients, and counts them in `statistics`."""

    def __init__(self, config: GatewayConfig) -> None:
        self.statistics = Statistics()
        # None: shared memory is off.
        self.regions = Regions(config.body_bytes_max) if config.kserve_shared_memory else None

    async def run(
        self, request: pb.ModelInferRequest, raw: Sequence[bytes], pair: ClientPair, call: Call
    ) -> list[NamedTensor]:
        """Returns the outputs. `raw`: the bytes of the inputs that are not in shared memory, in order; empty: these
        inputs have contents. Raises HttpError, MultigpuError or TaskError.
        """
        raw, places = self._resolve(request, raw)
        return await self._run(request, task_of(request, raw), places, pair, call)

    async def stream(self, request: pb.ModelInferRequest, pair: ClientPair, call: Call) -> AsyncGenerator[Answer, None]:
        """As `run`, but yields an Answer for each piece of a generated text as it arrives, and a last one without text.
        Other models give a single Answer.
        """
        raw, places = self._resolve(request, request.raw_input_contents)
        task = task_of(request, raw, stream=True)
        if task.read_chunk is None:
            yield Answer(outputs=await self._run(request, task, places, pair, call), final=True)
            return
        if places:
            raise wrong(next(iter(places)), "each piece would overwrite the one before in its shared memory")
        options = _options(request, call)
        began_ns = time.perf_counter_ns()
        try:
            async with pair.client.stream(task.kind, task.payload, units=task.units, **options) as parts:
                async for data in parts:
                    if outputs := task.read_chunk(data):
                        yield Answer(outputs=outputs, final=False)
                outcome = parts.outcome
        except errors.UnplaceableError:
            await _reject_other_kind(request, pair, task)
            raise
        self._count_and_raise(request, task, outcome, began_ns)
        empty = values_of(request.parameters).get(_EMPTY_FINAL) is True
        yield Answer(outputs=[] if empty else text_output(""), final=True)

    def _resolve(
        self, request: pb.ModelInferRequest, raw: Sequence[bytes]
    ) -> tuple[Sequence[bytes], Mapping[str, Place]]:
        """As Regions.resolve, if shared memory is on."""
        return (raw, {}) if self.regions is None else self.regions.resolve(request, raw)

    async def _run(
        self,
        request: pb.ModelInferRequest,
        task: InferenceTask,
        places: Mapping[str, Place],
        pair: ClientPair,
        call: Call,
    ) -> list[NamedTensor]:
        options = _options(request, call)
        began_ns = time.perf_counter_ns()
        try:
            outcome = await pair.client.run_outcome(task.kind, task.payload, units=task.units, **options)
        except errors.UnplaceableError:
            await _reject_other_kind(request, pair, task)
            raise
        self._count_and_raise(request, task, outcome, began_ns)
        outputs = task.read(outcome)
        return [places[each.name].put(each) if each.name in places else each for each in outputs]

    def _count_and_raise(
        self, request: pb.ModelInferRequest, task: InferenceTask, outcome: Outcome, began_ns: int
    ) -> None:
        """Counts a request that has ended. Raises the error of a task that did not succeed."""
        took_ns = time.perf_counter_ns() - began_ns
        self.statistics.add(request.model_name, request.model_version, outcome, task.units, took_ns)
        if not outcome.succeeded:
            raise outcome.to_error()


async def _reject_other_kind(request: pb.ModelInferRequest, pair: ClientPair, task: InferenceTask) -> None:
    """Raises HttpError if there is no such model, or if its kind takes other inputs than the request has."""
    entry = (await versions_of(pair, request.model_name, request.model_version))[0]
    if entry.model.kind != task.kind:
        takes = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in tensors_of(entry.model)[0])
        raise HttpError(BAD_REQUEST, f"the model {request.model_name} takes {takes}", param="inputs")


def _options(request: pb.ModelInferRequest, call: Call) -> dict[str, Any]:
    """Returns the options of the task. Raises HttpError if a parameter is invalid or not supported."""
    options = next(TaskSettings(call, id_of(request.model_name, request.model_version)).options_of_tasks())
    values = values_of(request.parameters)
    if rejected := [name for name in values if name.startswith("sequence_")]:
        message = f"the parameter {rejected[0]!r} is not served: no model keeps anything from one request to the next"
        raise HttpError(BAD_REQUEST, message, param=rejected[0])
    if priority := _whole(values, "priority"):
        if priority > PRIORITY_MAX:
            message = f"priority is {priority}: make it 1 (served first) to {PRIORITY_MAX}"
            raise HttpError(BAD_REQUEST, message, param="priority")
        options["priority"] = priority
    if timeout_us := _whole(values, "timeout"):
        options["timeout"] = min(options["timeout"], timeout_us / 1e6)
    return options


def _whole(values: dict[str, Any], name: str) -> int:
    """Returns a parameter that is a whole number, 0 if it is not set. Raises HttpError for any other value."""
    value = values.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise HttpError(BAD_REQUEST, f"{name} is {value!r}: make it a whole number from 0", param=name)
    return value

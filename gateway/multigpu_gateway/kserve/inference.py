"""ModelInfer: a task for each request."""

import time
from typing import Any

from multigpu import errors
from multigpu.outcome import Outcome

from multigpu_gateway.clients import Connected
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.kinds import Work, tensors_of, values_of, work_of
from multigpu_gateway.kserve.models import id_of, versions_of
from multigpu_gateway.kserve.statistics import Statistics
from multigpu_gateway.kserve.tensors import response_of
from multigpu_gateway.tasks import Call, TaskSettings

PRIORITY_MAX = 5


async def infer(
    request: pb.ModelInferRequest, connected: Connected, call: Call, statistics: Statistics
) -> pb.ModelInferResponse:
    """Runs the model. Raises HttpError, MultigpuError."""
    if not request.model_name:
        raise HttpError(BAD_REQUEST, "model_name is missing", param="model_name")
    options = _options(request, call)
    work = work_of(request)
    began_ns = time.perf_counter_ns()
    outcome = await _outcome(request, connected, work, options)
    took_ns = time.perf_counter_ns() - began_ns
    statistics.add(request.model_name, request.model_version, outcome, work.units, took_ns)
    if not outcome.succeeded:
        raise outcome.to_error()
    return response_of(request, work.read(outcome))


async def _outcome(request: pb.ModelInferRequest, connected: Connected, work: Work, options: dict[str, Any]) -> Outcome:
    try:
        return await connected.client.run_outcome(work.kind, work.payload, units=work.units, **options)
    except errors.UnplaceableError:
        # No worker runs a task of this kind with the model: perhaps it is of another kind, and takes other inputs.
        entry = (await versions_of(connected, request.model_name, request.model_version))[0]
        if entry.model.kind == work.kind:
            raise
        takes = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in tensors_of(entry.model)[0])
        raise HttpError(BAD_REQUEST, f"the model {request.model_name} takes {takes}", param="inputs") from None


def _options(request: pb.ModelInferRequest, call: Call) -> dict[str, Any]:
    """The options of the task. HttpError: a parameter is wrong."""
    options = next(TaskSettings(call, id_of(request.model_name, request.model_version)).each())
    values = values_of(request)
    if refused := [name for name in values if name.startswith("sequence_")]:
        message = f"the parameter {refused[0]!r} is not served: no model keeps anything from one request to the next"
        raise HttpError(BAD_REQUEST, message, param=refused[0])
    if priority := _whole(values, "priority"):
        if priority > PRIORITY_MAX:
            message = f"priority is {priority}: make it 1 (served first) to {PRIORITY_MAX}"
            raise HttpError(BAD_REQUEST, message, param="priority")
        options["priority"] = priority
    if timeout_us := _whole(values, "timeout"):
        options["timeout"] = min(options["timeout"], timeout_us / 1e6)
    return options


def _whole(values: dict[str, Any], name: str) -> int:
    """A parameter that is a whole number; 0: not given. HttpError: it is something else."""
    value = values.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise HttpError(BAD_REQUEST, f"{name} is {value!r}: make it a whole number from 0", param=name)
    return value

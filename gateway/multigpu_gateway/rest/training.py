"""The training routes of Onyx' multi-GPU training (/multigpu/training/…), for fine-tuning jobs (docs/training.md)."""

import re
import secrets
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from multigpu import NotFoundError, Task, TaskState
from multigpu._kinds.finetuning import Finetune
from multigpu._kinds.job_history import History, by_step
from multigpu._kinds.training import KIND

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.http import Request, decode
from multigpu_gateway.rest.earlier import available, numbered_workers
from multigpu_gateway.rest.requests import query_of, wrong
from multigpu_gateway.routes import Operation

ACCEPTED = 202
CURVE_POINTS = 200
STRATEGIES = {"dataparallel": "dp", "distributed": "ddp", "auto": "auto"}
Natural = Annotated[int, Meta(ge=1, le=1_000_000)]


class DatasetConfig(msgspec.Struct, forbid_unknown_fields=True):
    texts: Annotated[list[str], Meta(min_length=1)]
    max_length: Natural = 512


class TrainingConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The training fields of Onyx, those of its GPUConfig, and `method`, which is ours."""

    epochs: Annotated[float, Meta(gt=0)] = 3.0
    learning_rate: Annotated[float, Meta(gt=0, le=1)] | None = None
    batch_size_per_gpu: Natural = 8
    gradient_accumulation_steps: Natural = 1
    mixed_precision: bool = True
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    # No effect: language models have no batch normalization.
    sync_batch_norm: bool = True
    # No effect: the backend follows from the workers' devices.
    backend: Literal["nccl", "gloo"] | None = None
    use_multi_gpu: bool = True
    distributed_training: bool = False
    gpu_ids: list[int] = []
    method: Literal["full", "lora"] = "full"


class TrainingRequest(msgspec.Struct, forbid_unknown_fields=True):
    model_name: Annotated[str, Meta(min_length=1)]
    dataset_config: DatasetConfig
    training_config: TrainingConfig = msgspec.field(default_factory=TrainingConfig)
    # Becomes part of the job's name.
    user_id: int | str | None = None
    training_type: Literal["dataparallel", "distributed", "auto"] | None = None
    # Default: 1 for dataparallel or without use_multi_gpu, else the number of workers that take training tasks.
    world_size: Annotated[int, Meta(ge=1, le=1024)] | None = None


class HistoryQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


_request = msgspec.json.Decoder(TrainingRequest)
_config = msgspec.json.Decoder(TrainingConfig)


async def train(request: Request, pair: ClientPair) -> None:
    """Starts a job that fine-tunes a model on texts."""
    kind = request.path.rpartition("/")[2]
    body = decode(_request, await request.body())
    config = body.training_config
    if body.training_type not in (None, kind):
        raise wrong("training_type", f"it is {body.training_type!r}, and the route {request.path}")
    _check(config)
    workers = await numbered_workers(pair)
    trainers = [each for each in workers if available(each) and any(c.kind == KIND for c in each.capabilities)]
    alone = kind == "dataparallel" or not config.use_multi_gpu
    world_size = body.world_size or (1 if alone else max(1, len(trainers)))
    strategy = "ddp" if kind == "auto" and config.distributed_training else STRATEGIES[kind]
    options: dict[str, Any] = {
        "world_size": world_size,
        "strategy": strategy,
        "method": config.method,
        "epochs": config.epochs,
        "learning_rate": config.learning_rate or 0.0,
        "batch": config.batch_size_per_gpu * config.gradient_accumulation_steps * world_size,
        "accumulation": config.gradient_accumulation_steps,
        "length": body.dataset_config.max_length,
        "precision": "auto" if config.mixed_precision else "fp32",
        "memory_fraction": config.memory_fraction,
    }
    try:
        handle = await pair.client.finetune(body.model_name, body.dataset_config.texts, name=_name(body), **options)
    except ValueError as error:
        raise wrong("training_config", str(error)) from error
    answer = {"status": "started", "job": handle.request_id, "task_id": str(handle.id), "training_type": kind}
    await request.respond(ACCEPTED, msgspec.json.encode(answer | {"world_size": world_size, "strategy": strategy}))


async def configure(request: Request, pair: ClientPair) -> None:
    """Checks settings, and returns them with the defaults. Nothing is stored: send them as `training_config`."""
    del pair
    config = decode(_config, await request.body())
    _check(config)
    await request.respond(200, msgspec.json.encode({"training_config": config}))


async def history(request: Request, pair: ClientPair) -> None:
    """Jobs, the newest first: settings, curves, device hours, energy, and advice from measurements."""
    limit = query_of(request, HistoryQuery).limit
    jobs: dict[str, dict[str, Any]] = {}
    async for listed in pair.client.list_tasks(kind=KIND):
        if listed.request_id not in jobs:  # a job that was resumed has several tasks
            with suppress(NotFoundError):  # the master has forgotten the task since it was listed
                jobs[listed.request_id] = _job(await pair.client.get(listed.task_id))
        if len(jobs) == limit:
            break
    await request.respond(200, msgspec.json.encode({"jobs": [*jobs.values()]}))


def _job(task: Task) -> dict[str, Any]:
    outcome = task.outcome
    past = History.of(outcome.message.partials if outcome is not None else ())
    job, reports = past.job, by_step(past)
    found = past.finetuned or {}
    every = -(-len(reports) // CURVE_POINTS) or 1
    return {
        "job": task.request_id,
        "task_id": str(task.task_id),
        "status": outcome.state.name if outcome is not None else task.state.name,
        "progress": 1.0 if task.state is TaskState.SETTLED else task.message.progress.fraction,
        "submit_time": task.submit_time,
        "attempts": task.attempts,
        "world_size": past.attempts[-1]["world_size"] if past.attempts else task.message.spec.world_size or 1,
        "settings": _settings(job.finetune) if job is not None and job.finetune is not None else None,
        "gpu_hours": round(past.device_hours, 6),
        "energy_joules": outcome.energy.joules if outcome is not None and outcome.energy is not None else None,
        "curve": [{"step": each["step"], **each["metrics"]} for each in reports[::-every][::-1]],
        "trained": {name: value for name, value in found.items() if name not in ("model", "advice", "evaluations")},
        "model": found.get("model"),
        "recommendations": found.get("advice", []),
        "error": outcome.error_message if outcome is not None else "",
    }


def _settings(tuning: Finetune) -> dict[str, Any]:
    return {name: value for name, value in tuning.plain().items() if name != "texts"}


def _check(config: TrainingConfig) -> None:
    if config.gpu_ids:
        raise wrong("gpu_ids", "the master chooses the GPUs: leave it out, and cordon those that are not to train")


def _name(body: TrainingRequest) -> str:
    parts = [re.sub(r"[^A-Za-z0-9]+", "-", str(each)).strip("-") for each in (body.model_name, body.user_id or "")]
    return "-".join([*(part[:24] for part in parts if part), secrets.token_hex(4)])


_train = Operation(train, body=TrainingRequest, status=ACCEPTED)
METHODS = {
    "/multigpu/training/dataparallel": {"POST": _train},
    "/multigpu/training/distributed": {"POST": _train},
    "/multigpu/training/auto": {"POST": _train},
    "/multigpu/training/config": {"POST": Operation(configure, body=TrainingConfig)},
    "/multigpu/training/history": {"GET": Operation(history, query=HistoryQuery)},
}

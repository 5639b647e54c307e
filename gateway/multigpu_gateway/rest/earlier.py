"""The monitoring routes of two earlier systems, so that their dashboards keep working: one in the form of LangChain's
SAP HANA integration with many GPUs (/api/v1/gpu/stats), one of Onyx' multi-GPU training (/multigpu/…).

Here a GPU is a worker. Workers are numbered from 0, sorted by host, device and worker_id. Values that a device does
not measure are null.
"""

import time
from typing import Any, Literal

import msgspec
from multigpu import OutcomeState
from multigpu.fleet import HealthState, Stats, Worker, WorkerState

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import NOT_FOUND, UNAVAILABLE, HttpError
from multigpu_gateway.http import Request, decode
from multigpu_gateway.rest.requests import wrong
from multigpu_gateway.routes import Operation, Paths

MIB = 1 << 20
GPU, GPU_STATS, RECOMMENDATIONS = "/multigpu/gpu", "/stats", "/multigpu/gpu/recommendations"
GPU_TEST = "/multigpu/gpu/test"
# Training fields of Onyx' GPUConfig. Here each job sets them, so they are null.
_TRAINING = (
    "distributed_training", "backend", "batch_size_per_gpu", "gradient_accumulation_steps", "sync_batch_norm",
    "mixed_precision", "memory_fraction",
)  # fmt: skip


class TestRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`gpu_ids` None: all GPUs."""

    gpu_ids: list[int] | None = None


class ManageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`action`: see `manage`. `gpu_ids` None: all GPUs."""

    action: Literal["cleanup", "cordon", "uncordon"]
    gpu_ids: list[int] | None = None


_manage = msgspec.json.Decoder(ManageRequest)
_test = msgspec.json.Decoder(TestRequest)
# avg_time_per_batch_ms is the mean over this many of the newest successful tasks.
SAMPLE_TASKS = 100


async def langchain_stats(request: Request, pair: ClientPair) -> None:
    """Every GPU and the tasks of the fleet, in the form of LangChain."""
    workers, stats = await _fleet(pair)
    devices = [
        {
            "index": index,
            "name": worker.device.product or worker.device.name,
            "compute_capability": worker.device.compute_capability or None,
            "memory_total_mb": _mib(_memory(worker)[0]),
            "memory_free_mb": _mib(_free(worker)),
            "memory_usage_percent": _memory_percent(worker),
            "utilization": worker.telemetry.utilization if worker.telemetry else None,
            "temperature_c": worker.telemetry.temperature_celsius if worker.telemetry else None,
            "active_tasks": worker.leases,
            "completed_tasks": worker.succeeded,
        }
        for index, worker in enumerate(workers)
    ]
    answer = {
        "timestamp": int(stats.server_time.timestamp() if stats.server_time else time.time()),
        "devices": devices,
        "total_tasks_completed": stats.succeeded,
        "total_tasks_pending": stats.queued,
        "avg_time_per_batch_ms": await _batch_ms(pair),
    }
    await request.respond(200, msgspec.json.encode(answer))


async def health(request: Request, pair: ClientPair) -> None:
    """How many GPUs take tasks. The status is 503 if none does."""
    workers, _ = await _fleet(pair)
    usable = sum(map(available, workers))
    status = "unhealthy" if not usable else "healthy" if usable == len(workers) else "degraded"
    answer = {"status": status, "total_gpus": len(workers), "available_gpus": usable}
    await request.respond(200 if usable else UNAVAILABLE, msgspec.json.encode(answer))


async def onyx_stats(request: Request, pair: ClientPair) -> None:
    """Every GPU, in the form of Onyx."""
    workers, _ = await _fleet(pair)
    answer = {
        "available_gpus": [index for index, worker in enumerate(workers) if available(worker)],
        "gpu_info": [_gpu(index, worker) for index, worker in enumerate(workers)],
    }
    await request.respond(200, msgspec.json.encode(answer))


async def onyx_config(request: Request, pair: ClientPair) -> None:
    """Which GPUs take tasks, in the form of Onyx."""
    workers, _ = await _fleet(pair)
    ids = [index for index, worker in enumerate(workers) if available(worker)]
    answer = {"use_multi_gpu": len(ids) > 1, "gpu_ids": ids} | dict.fromkeys(_TRAINING)
    await request.respond(200, msgspec.json.encode(answer))


async def recommendations(request: Request, pair: ClientPair) -> None:
    """What is wrong with GPUs, and the remedy."""
    workers, _ = await _fleet(pair)
    found = [
        {"gpu_id": index, "code": reason.code, "message": reason.message}
        for index, worker in enumerate(workers) if worker.health is not None
        for reason in worker.health.reasons
    ]  # fmt: skip
    await request.respond(200, msgspec.json.encode({"recommendations": found}))


async def gpu_test(request: Request, pair: ClientPair) -> None:
    """Runs the health check of the GPUs in `gpu_ids`, or of all, one after the other. A lost worker fails it."""
    body = decode(_test, await request.body() or b"{}")
    chosen = _workers_by_number(await numbered_workers(pair), body.gpu_ids)
    tests = []
    async with request.while_connected():
        for index, chosen_worker in chosen.items():
            worker = chosen_worker
            if worker.state is not WorkerState.LOST:
                worker = await pair.admin.check_worker(worker.worker_id)
            tests.append({"gpu_id": index, "worker_id": worker.worker_id, **_test_result(worker)})
    if not tests:
        raise HttpError(UNAVAILABLE, "there is no GPU to test: no worker has connected, or gpu_ids is empty")
    answer = {"passed": all(test["passed"] for test in tests), "tests": tests}
    await request.respond(200, msgspec.json.encode(answer))


async def manage(request: Request, pair: ClientPair) -> None:
    """Unloads the models of GPUs (`cleanup`), or stops (`cordon`) or resumes (`uncordon`) sending tasks to GPUs."""
    body = decode(_manage, await request.body())
    chosen = _workers_by_number(await numbered_workers(pair), body.gpu_ids)
    done = []
    for index, worker in chosen.items():
        models = worker.resident_models if body.action == "cleanup" else ()
        for model in models:
            await pair.admin.unload_model(model, [worker.worker_id])
        if body.action == "cordon":
            await pair.admin.cordon_worker(worker.worker_id, reason="POST /multigpu/resources/manage")
        elif body.action == "uncordon":
            await pair.admin.uncordon_worker(worker.worker_id)
        done.append({"gpu_id": index, "worker_id": worker.worker_id, "unloaded_models": list(models)})
    await request.respond(200, msgspec.json.encode({"action": body.action, "gpus": done}))


def _workers_by_number(workers: list[Worker], gpu_ids: list[int] | None) -> dict[int, Worker]:
    """Returns the workers by number: those in `gpu_ids`, or all. Raises HttpError if there is no such number."""
    if unknown := [index for index in gpu_ids or () if not 0 <= index < len(workers)]:
        raise wrong("gpu_ids", f"{unknown[0]} is no number of a GPU; /multigpu/stats lists them")
    return {index: workers[index] for index in (range(len(workers)) if gpu_ids is None else gpu_ids)}


def _test_result(worker: Worker) -> dict[str, Any]:
    health = worker.health
    if worker.state is WorkerState.LOST or health is None:
        message = "its worker is not connected: start it, or see its log"
        return {"passed": False, "faults": [{"code": "lost", "message": message}]}
    faults = [{"code": reason.code, "message": reason.message} for reason in health.reasons]
    return {"passed": health.state in (HealthState.HEALTHY, HealthState.DEGRADED), "faults": faults}


async def gpu_stats(request: Request, pair: ClientPair) -> None:
    """One GPU, in the form of Onyx."""
    text = request.path.removeprefix(f"{GPU}/")
    number = text.removesuffix(GPU_STATS)
    if number == text:
        raise HttpError(NOT_FOUND, f"there is no {request.path}; there is {GPU}/ID{GPU_STATS}")
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise wrong("gpu_id", f"{number!r} is no number of a GPU; /multigpu/stats lists them")
    workers, _ = await _fleet(pair)
    index = int(number)
    if index >= len(workers):
        raise HttpError(NOT_FOUND, f"there is no GPU {index}; the fleet has {len(workers)}", param="gpu_id")
    await request.respond(200, msgspec.json.encode(_gpu(index, workers[index])))


async def resources(request: Request, pair: ClientPair) -> None:
    """The memory, tasks and models of every GPU."""
    workers, stats = await _fleet(pair)
    gpus = [
        {"gpu_id": index, "memory_total_bytes": _memory(worker)[0], "memory_used_bytes": _memory(worker)[1],
         "memory_free_bytes": _free(worker), "slots": worker.slots, "active_tasks": worker.leases,
         "models": list(worker.resident_models)}
        for index, worker in enumerate(workers)
    ]  # fmt: skip
    answer = {"gpus": gpus, "queued_tasks": stats.queued, "running_tasks": stats.leased}
    await request.respond(200, msgspec.json.encode(answer))


async def performance(request: Request, pair: ClientPair) -> None:
    """Counters of tasks since the master started, the mean utilization of the GPUs, and the mean time of a batch."""
    workers, stats = await _fleet(pair)
    names = ("submitted", "succeeded", "failed", "cancelled", "expired", "dead_lettered", "requeued")
    used = [each.telemetry.utilization for each in workers if each.telemetry and each.telemetry.utilization is not None]
    answer: dict[str, Any] = {f"tasks_{name}": getattr(stats, name) for name in names}
    answer |= {
        "avg_gpu_utilization": round(100 * sum(used) / len(used), 1) if used else None,
        "avg_time_per_batch_ms": await _batch_ms(pair),
    }
    await request.respond(200, msgspec.json.encode(answer))


GPU_PATHS: Paths = {f"{GPU}/{{gpu_id}}{GPU_STATS}": {"GET": Operation(gpu_stats)}}


async def numbered_workers(pair: ClientPair) -> list[Worker]:
    """Returns all workers. The number of a GPU is its index here."""
    workers = await pair.admin.list_workers()
    workers.sort(key=lambda each: (each.host, each.device.pci_bus_id, each.device.name, each.worker_id))
    return workers


async def _fleet(pair: ClientPair) -> tuple[list[Worker], Stats]:
    return await numbered_workers(pair), await pair.admin.stats()


async def _batch_ms(pair: ClientPair) -> float | None:
    """Returns the mean duration of the batches in which the newest successful tasks ran; None if there are none."""
    tasks, _ = await pair.client.list_page(page_size=SAMPLE_TASKS, outcomes=[OutcomeState.SUCCEEDED])
    outcomes = [task.outcome for task in tasks if task.outcome is not None]
    batches = {(each.worker_id, each.start_time, each.finish_time) for each in outcomes}
    times = [1000 * (end - begin).total_seconds() for _, begin, end in batches if begin is not None and end is not None]
    return round(sum(times) / len(times), 3) if times else None


def _gpu(index: int, worker: Worker) -> dict[str, Any]:
    found = worker.telemetry
    utilization = found.utilization if found is not None else None
    return {
        "gpu_id": index,
        "name": worker.device.product or worker.device.name,
        "worker_id": worker.worker_id,
        "available": available(worker),
        "memory_total_bytes": _memory(worker)[0],
        "memory_used_bytes": _memory(worker)[1],
        "memory_utilization": _memory_percent(worker),
        "gpu_utilization": round(100 * utilization, 1) if utilization is not None else None,
        "temperature": found.temperature_celsius if found is not None else None,
        "power_watts": found.power_watts if found is not None else None,
        "active_tasks": worker.leases,
        "completed_tasks": worker.succeeded,
    }


def available(worker: Worker) -> bool:
    """Whether the worker takes tasks."""
    unusable = worker.health is not None and worker.health.unusable
    return worker.state is WorkerState.ACTIVE and not (worker.cordoned or worker.quarantined or unusable)


def _memory(worker: Worker) -> tuple[int | None, int | None]:
    """Returns the total and the used bytes of the device; None: unknown."""
    found = worker.telemetry
    total = (found.memory_total_bytes if found is not None else None) or worker.device.memory_total_bytes or None
    return total, found.memory_used_bytes if found is not None else None


def _free(worker: Worker) -> int | None:
    total, used = _memory(worker)
    return total - used if total is not None and used is not None else None


def _memory_percent(worker: Worker) -> float | None:
    total, used = _memory(worker)
    return round(100 * used / total, 1) if total and used is not None else None


def _mib(size_bytes: int | None) -> int | None:
    return size_bytes // MIB if size_bytes is not None else None

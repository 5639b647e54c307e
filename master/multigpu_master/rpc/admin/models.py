"""AdminService's calls about models."""

from collections.abc import Iterable
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as pb
from multigpu.v1 import model_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.residency import is_version
from multigpu_master.driver import Driver
from multigpu_master.journal.protocol import JournalError
from multigpu_master.rpc.status import count_of, make_token, page_size_of, read_token, reject
from multigpu_master.settings import worker_setting
from multigpu_master.wire import models as wire_models

WORKERS_MAX = 1000


class ModelCalls:
    """See protos/multigpu/v1/admin_service.proto."""

    _driver: Driver

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        size = await page_size_of(context, request.page_size)
        start = await read_token(context, request.page_token, "page_token")
        entries = _entries(self._driver.core.fleet.workers.values(), request.name)
        response = pb.ListModelsResponse(models=entries[start : start + size])
        if start + size < len(entries):
            response.next_page_token = make_token(start + size)
        return response

    async def LoadModel(self, request: Any, context: Any) -> pb.LoadModelResponse:
        workers = await self._workers(context, request.worker_ids)
        offering = [w for w in workers if w.session and request.model in w.residency.names]
        lacking = [w.worker_id for w in workers if w not in offering]
        if not offering or (request.worker_ids and lacking):
            where = f"worker {', '.join(lacking)}" if request.worker_ids else "any worker that is connected"
            await reject(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"model {request.model!r} is not offered by {where}; `mgpuctl models list` shows what is",
            )
        fitting = [w for w in offering if not _lacks(w, request.model)]
        if not fitting or (request.worker_ids and len(fitting) < len(offering)):
            worker = next(w for w in offering if _lacks(w, request.model))
            await reject(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"model {request.model!r} does not fit beside what is pinned on {worker.worker_id}: "
                f"{_lacks(worker, request.model)}; unload one of them first with `mgpuctl models unload`",
            )
        if not request.worker_ids:
            fitting = [max(fitting, key=lambda w: _suits(w, request.model))]
        await self._tell(context, [ev.LoadModel(w.worker_id, request.model) for w in fitting])
        return pb.LoadModelResponse(worker_ids=[w.worker_id for w in fitting])

    async def UnloadModel(self, request: Any, context: Any) -> pb.UnloadModelResponse:
        workers = await self._workers(context, request.worker_ids)
        known = [m for w in workers for m in (*w.residency.offered, *w.residency.reported, *w.residency.pins)]
        if not any(is_version(m, request.model) for m in known):
            await reject(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"no model {request.model!r} is offered or loaded there; `mgpuctl models list` shows what is",
            )
        told = [w for w in workers if _holds(w, request.model)]
        await self._tell(context, [ev.UnloadModel(w.worker_id, request.model) for w in told])
        return pb.UnloadModelResponse(worker_ids=[w.worker_id for w in told])

    async def _workers(self, context: Any, worker_ids: Iterable[str]) -> list[Worker]:
        """The workers of these ids, or all, by worker_id. NOT_FOUND: there is no such worker."""
        workers, ids = self._driver.core.fleet.workers, sorted(set(worker_ids))
        await count_of(context, len(ids), WORKERS_MAX, "workers in one call")
        for worker_id in ids:
            if worker_id not in workers:
                known = ", ".join(sorted(workers)[:10]) or "none"
                await reject(context, grpc.StatusCode.NOT_FOUND, f"no worker {worker_id!r}; known: {known}")
        return [workers[worker_id] for worker_id in ids or sorted(workers)]

    async def _tell(self, context: Any, events: list[ev.LoadModel] | list[ev.UnloadModel]) -> None:
        """Tells the core, and returns once what is pinned is on the disk."""
        settings: dict[str, bytes | None] = {}
        for event in events:
            self._driver.handle(event)
            settings |= worker_setting(self._driver.core.fleet.workers[event.worker_id])
        try:
            await self._driver.journaling.save(settings)
        except JournalError as error:
            await reject(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"done, but it may not survive a restart of the master: {error}",
            )


def _lacks(worker: Worker, name: str) -> str:
    """Why a model does not fit beside what is pinned on a worker; "" if it does."""
    residency = worker.residency
    model, limit = residency.names[name], residency.limit_bytes
    others = sorted(m for m in residency.pinned() if m != model)
    taken, needed = sum(residency.memory_of(m) for m in others), residency.memory_of(model)
    if not limit or taken + needed <= limit:
        return ""
    return f"it takes {needed} of {limit} bytes, and {', '.join(others) or 'nothing'} {taken}"


def _suits(worker: Worker, name: str) -> tuple[bool, bool, bool, int]:
    """How well a worker suits a model that is to stay loaded: where it is pinned or loaded already, else where most
    room is beside what can't be unloaded.
    """
    residency = worker.residency
    model = residency.names[name]
    used = sum(residency.memory_of(m) for m in residency.in_use())
    room = residency.limit_bytes - used if residency.limit_bytes else -used
    return model in residency.pinned(), worker.accepting, residency.placed(model), room


def _holds(worker: Worker, name: str) -> bool:
    """Whether a worker has a model of that name loaded, pinned, or about to be loaded."""
    residency = worker.residency
    held = (*residency.reported, *residency.granted, *residency.uses, *residency.pins, *residency.pinned())
    return any(is_version(m, name) for m in held)


def _entries(workers: Iterable[Worker], name: str) -> list[pb.ModelEntry]:
    """What workers have offered, by name and version. What one of them has measured of a model stands for all that
    have the same files.
    """
    groups: dict[str, list[pb.ModelEntry]] = {}
    for worker in sorted(workers, key=lambda w: w.worker_id):
        residency = worker.residency
        for model_id, offered in residency.offered.items():
            if name and offered.name != name:
                continue
            message = model_pb2.Model.FromString(offered.wire)
            alike = groups.setdefault(model_id, [])
            entry = next((e for e in alike if _same(e.model, message)), None)
            if entry is None:
                entry = pb.ModelEntry(model=message)
                alike.append(entry)
            elif message.memory_bytes > entry.model.memory_bytes or not (entry.model.digest or not message.digest):
                entry.model.CopyFrom(message)
            entry.worker_ids.append(worker.worker_id)
            if (said := residency.reported.get(model_id)) is not None:
                residency_message = wire_models.resident_message(said)
                entry.places.add(worker_id=worker.worker_id, residency=residency_message)
    return [entry for model_id in sorted(groups) for entry in groups[model_id]]


def _same(one: model_pb2.Model, other: model_pb2.Model) -> bool:
    """Whether two workers offer the same files of a model, in the same way."""
    digests = {d for d in (one.digest, other.digest) if d}
    return len(digests) < 2 and (one.kind, one.source, one.files_bytes, one.current, one.error) == (
        other.kind, other.source, other.files_bytes, other.current, other.error,
    )  # fmt: skip

"""AdminService's methods for models."""

from collections.abc import Iterable, Sequence
from typing import Any

from multigpu.v1 import admin_service_pb2 as pb
from multigpu.v1 import model_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.residency import is_version
from multigpu_master.driver import Driver
from multigpu_master.errors import ExhaustedError, NotFoundError
from multigpu_master.rpc.admin.saving import save
from multigpu_master.rpc.queries import pausing
from multigpu_master.rpc.requests import check_count, page_of
from multigpu_master.wire.models import resident_message

WORKERS_MAX = 1000  # workers that one call can name


class ModelCalls:
    """See protos/multigpu/v1/admin_service.proto."""

    _driver: Driver

    async def ListModels(self, request: Any, _context: Any) -> pb.ListModelsResponse:
        entries, token = page_of(await _model_entries(self._driver.core.fleet.workers.values(), request.name), request)
        return pb.ListModelsResponse(models=entries, next_page_token=token)

    async def LoadModel(self, request: Any, _context: Any) -> pb.LoadModelResponse:
        workers, name = self._workers(request.worker_ids), request.model
        if not request.worker_ids:
            workers = [_best_worker(workers, name)]
        elif lacking := [w.worker_id for w in workers if not _can_load(w, name)]:
            raise NotFoundError(
                f"workers that are not connected, or do not offer model {name!r}: {', '.join(lacking)}; "
                "`mgpuctl models list` shows which workers offer which models"
            )
        for worker in workers:
            if reason := _why_too_large(worker, name):
                raise ExhaustedError(f"model {name!r} does not fit on {worker.worker_id}: {reason}")
        await self._handle([ev.LoadModel(w.worker_id, name) for w in workers])
        return pb.LoadModelResponse(worker_ids=[w.worker_id for w in workers])

    async def UnloadModel(self, request: Any, _context: Any) -> pb.UnloadModelResponse:
        workers = self._workers(request.worker_ids)
        names = [m for w in workers for m in (*w.residency.offered, *w.residency.reported, *w.residency.operator_pins)]
        if not any(is_version(m, request.model) for m in names):
            where = "on these workers" if request.worker_ids else "on any worker"
            raise NotFoundError(
                f"no model {request.model!r} is offered, loaded or pinned {where}; `mgpuctl models list` shows all"
            )
        holders = [w for w in workers if _holds(w, request.model)]
        await self._handle([ev.UnloadModel(w.worker_id, request.model) for w in holders])
        return pb.UnloadModelResponse(worker_ids=[w.worker_id for w in holders])

    def _known_worker(self, worker_id: str) -> Worker:
        """Returns the worker with this id, connected or not. Raises NotFoundError if it does not exist."""
        workers = self._driver.core.fleet.workers
        if worker_id not in workers:
            raise NotFoundError(f"no worker {worker_id!r}; known: {', '.join(sorted(workers)[:10]) or 'none'}")
        return workers[worker_id]

    def _workers(self, worker_ids: Iterable[str]) -> list[Worker]:
        """Returns the workers with these ids, or all known workers if there are no ids; sorted by id. Raises
        NotFoundError if a worker is not known.
        """
        ids = sorted(set(worker_ids))
        check_count(len(ids), WORKERS_MAX, "workers in one call", "make several")
        return [self._known_worker(worker_id) for worker_id in ids or sorted(self._driver.core.fleet.workers)]

    async def _handle(self, events: Sequence[ev.LoadModel | ev.UnloadModel]) -> None:
        """Handles the events, and returns when the journal has written the pins to the disk."""
        workers = self._driver.core.fleet.workers
        async for event in pausing(events):
            if event.worker_id in workers:  # the fleet has not forgotten it meanwhile
                self._driver.handle(event)
        await save(self._driver, {})  # the journal writes in order, and the events have appended the settings


def _can_load(worker: Worker, name: str) -> bool:
    """Whether the worker is connected and offers the model."""
    return bool(worker.session) and name in worker.residency.id_of_name


def _best_worker(workers: Iterable[Worker], name: str) -> Worker:
    """Returns the best worker on which to pin a model; if the model fits on none, the first worker that offers it.
    Raises NotFoundError if no connected worker offers it.
    """
    offering = [w for w in workers if _can_load(w, name)]
    if not offering:
        raise NotFoundError(
            f"no connected worker offers model {name!r}; `mgpuctl models list` shows which workers offer which models"
        )
    fitting = [w for w in offering if not _why_too_large(w, name)]
    return max(fitting, key=lambda w: _preference(w, name)) if fitting else offering[0]


def _why_too_large(worker: Worker, name: str) -> str:
    """Returns why a model does not fit into a worker's memory beside the worker's pinned models, or "" if it fits."""
    residency = worker.residency
    model, limit = residency.id_of_name[name], residency.limit_bytes
    others = sorted(m for m in residency.operator_pinned_ids() if m != model)
    taken, needed = sum(map(residency.memory_of, others)), residency.memory_of(model)
    if not limit or taken + needed <= limit:
        return ""
    text = f"it needs {needed} bytes, and the limit for all models is {limit} bytes"
    if others:
        text += (
            f", of which the pinned models {', '.join(others)} take {taken}; unload one of them first with "
            "`mgpuctl models unload`"
        )
    return text


def _preference(worker: Worker, name: str) -> tuple[bool, bool, bool, int]:
    """Sort key of workers on which to pin a model; the best is the last. A worker that has the model pinned is best,
    then one that accepts leases, then one that has the model loaded, then the one whose models in use leave the most of
    the memory limit. An unknown limit counts as 0.
    """
    residency = worker.residency
    model = residency.id_of_name[name]
    used = sum(residency.memory_of(m) for m in residency.in_use())
    room = residency.limit_bytes - used if residency.limit_bytes else -used
    return model in residency.operator_pinned_ids(), worker.accepting, residency.placed(model), room


def _holds(worker: Worker, name: str) -> bool:
    """Whether a worker has a model of this name or id loaded, pinned, or about to be loaded."""
    residency = worker.residency
    held = (
        *residency.reported,
        *residency.unacknowledged_dispatches,
        *residency.lease_counts,
        *residency.operator_pins,
        *residency.operator_pinned_ids(),
    )
    return any(is_version(m, name) for m in held)


async def _model_entries(workers: Iterable[Worker], name: str) -> list[pb.ModelEntry]:
    """Returns the models that workers offer, sorted by id (name and version). `name`: only models with that name; "":
    all. Workers that offer the same files of a model share one entry. An entry has the values of one of its workers;
    the digest may come from another worker.
    """
    groups: dict[str, list[pb.ModelEntry]] = {}
    async for worker in pausing(sorted(workers, key=lambda w: w.worker_id)):
        residency = worker.residency
        for model_id, offered in residency.offered.items():
            if name and offered.name != name:
                continue
            message = model_pb2.Model.FromString(offered.wire)
            variants = groups.setdefault(model_id, [])
            entry = next((e for e in variants if _same_files(e.model, message)), None)
            if entry is None:
                entry = pb.ModelEntry(model=message)
                variants.append(entry)
            elif message.memory_bytes > entry.model.memory_bytes or (message.digest and not entry.model.digest):
                # Show this worker's values: the model takes more memory there, or only this worker has a digest.
                digest = message.digest or entry.model.digest
                entry.model.CopyFrom(message)
                entry.model.digest = digest
            entry.worker_ids.append(worker.worker_id)
            if (resident := residency.reported.get(model_id)) is not None:
                entry.places.add(worker_id=worker.worker_id, residency=resident_message(resident))
    return [entry for model_id in sorted(groups) for entry in groups[model_id]]


def _same_files(one: model_pb2.Model, other: model_pb2.Model) -> bool:
    """Whether two workers offer the same files of a model, and agree on its kind, its source, its error, whether it is
    the current version, and its engine, once both have loaded it. An empty digest equals any digest.
    """
    digests = {d for d in (one.digest, other.digest) if d}
    engines = {model.engine for model in (one, other) if model.facts}  # a worker has no facts before it loads the model
    alike = (one.kind, one.source, one.files_bytes, one.current, one.error) == (
        other.kind, other.source, other.files_bytes, other.current, other.error,
    )  # fmt: skip
    return alike and len(digests) < 2 and len(engines) < 2

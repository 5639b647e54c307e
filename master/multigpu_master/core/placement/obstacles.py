"""Reasons why an eligible worker can't get a task now, for dispatch, recall and explain."""

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.residency import Block

# Limit of the models that an explanation names.
NAMED_MAX = 8


def free_if_short(worker: Worker, shape: Shape) -> int | None:
    """The worker's free device memory, in bytes, if it is too little for the shape; None: enough, or unknown."""
    if not shape.memory_bytes:
        return None
    free = worker.memory_free_bytes()
    if free is None:
        return None
    if shape.world_size > 1:  # a rank is its worker's only lease, so all other models can be unloaded
        residency = worker.residency
        own = residency.id_of_name.get(shape.model, shape.model)
        free += sum([model.memory_bytes for model in residency.reported.values() if model.model != own])
    free -= worker.leased_memory_bytes
    return free if free < shape.memory_bytes else None


def blocked_now(fleet: Fleet, strategy: Strategy, shape: Shape, worker: Worker) -> bool:
    """Whether memory, strategy or model keeps an eligible, accepting worker from getting a task of this shape now."""
    if free_if_short(worker, shape) is not None or strategy.excludes(shape, worker, fleet) is not None:
        return True
    return fleet.models_by_id and fleet.model_block(worker, shape) is not None


def backlog_suffices(fleet: Fleet, strategy: Strategy, shape: Shape, worker: Worker, queued: int) -> bool:
    """Whether `queued` tasks are enough for the worker to get one, or it has a load reservation for their model."""
    return strategy.min_backlog(shape, worker, fleet) <= queued or fleet.reserved(worker, shape)


def is_one_of(worker: Worker, named: tuple[str, ...]) -> bool:
    """Whether a worker, or its device, is among these worker_ids and device_keys."""
    return worker.device_key in named or worker.worker_id in named


def obstacles(fleet: Fleet, strategy: Strategy, shape: Shape, worker: Worker) -> list[str]:
    """Why an eligible worker can't get a task of this shape now, as texts for people; empty if it can."""
    why = []
    if not worker.session:
        why.append("lost")
    if worker.cordon is not None:
        why.append(f"cordoned: {worker.cordon.reason}" if worker.cordon.reason else "cordoned")
    if worker.quarantined:
        why.append(f"quarantined: {_illness(worker)}")
    if worker.draining:
        why.append("draining")
    if worker.stopping:
        why.append("stopping")
    if worker.gang_leases_limit is not None and len(worker.leases) >= worker.gang_leases_limit:
        task_id = next((lease.task.task_id for lease in worker.leases.values() if lease.gang is not None), 0)
        why.append(f"runs a rank of task {task_id}" if task_id else "reserved for a task that several workers run")
    if worker.window_full:
        leases, allowed = len(worker.leases), worker.pace.leases_max
        if worker.shares:
            why.append(f"window full ({leases} leases)")
        elif leases > allowed:
            why.append(f"window full ({leases} leases; the limit was lowered to {allowed})")
        else:
            why.append(f"window full ({leases} of {allowed} leases)")
    if worker.leased_bytes >= worker.info.window_bytes:
        why.append(f"window full ({worker.leased_bytes} of {worker.info.window_bytes} bytes)")
    if (free := free_if_short(worker, shape)) is not None:
        why.append(f"{shape.memory_bytes} bytes of device memory required, {free} free")
    if (block := fleet.model_block(worker, shape)) is not None:
        why.append(_model_blocked(fleet, worker, shape, block))
    if (excluded := strategy.excludes(shape, worker, fleet)) is not None:
        why.append(excluded)
    return why


def _model_blocked(fleet: Fleet, worker: Worker, shape: Shape, block: Block) -> str:
    residency, model = worker.residency, fleet.model_id(worker, shape.kind, shape.model)
    if block is not Block.NO_ROOM:
        return f"model {model}: {block.value}"
    others = sorted(m for m in residency.in_use() if m != model)
    named = ", ".join(others[:NAMED_MAX]) + (", ..." if len(others) > NAMED_MAX else "")
    needed, limit = residency.memory_of(model), residency.limit_bytes
    return f"no room for model {model} ({needed} of {limit} bytes): {named} are in use"


def _illness(worker: Worker) -> str:
    reasons = [reason.message or reason.code for reason in worker.health.reasons]
    if worker.check_open:
        asked = "an operator asked for a check" if worker.check_at_once else "different tasks failed on it"
        reasons.append(f"{asked}, and its device has not passed a check yet")
    return "; ".join(reasons) or "its device is being checked"

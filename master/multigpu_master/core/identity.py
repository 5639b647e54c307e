"""Decides whether a resubmit (a submit with a known request_id) means the same task as the first submit: kind, model,
content type, parameters and payload must be equal. Queue, priority, labels, limits and timeouts may differ: those of
the first submit apply. What is not known counts as equal: without a fingerprint only kind and model are compared, and a
payload without a known CRC is not compared. A durable resubmit of an ephemeral task is rejected: the task would not
survive a restart.

The journal keeps a fingerprint of each task that had a request_id: the CRC-32 of its payload and 31
bits of the CRC of its kind, model, content type and parameters.
"""

import zlib

from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState, Task

ALREADY_EXISTS = 6

SPEC_BITS = 31
# Values of Task.payload_crc below zero.
NOT_COMPUTED, UNKNOWN = -1, -2
# Stored in place of the fingerprint of a withdrawn task, whose request_id is free.
REQUEST_ID_FREE = -1


def payload_crc(task: Task) -> int:
    """The CRC-32 of a task's payload; UNKNOWN if the payload was in a shared file when this was first called, and its
    sender gave no CRC.
    """
    if task.payload_crc == NOT_COMPUTED:
        payload = task.payload
        crc = zlib.crc32(payload) if isinstance(payload, bytes) else payload.crc
        task.payload_crc = crc if crc >= 0 else UNKNOWN
    return task.payload_crc


def fingerprint(task: Task) -> int | None:
    """A task's fingerprint for the journal; REQUEST_ID_FREE if the task was withdrawn. None: the task has no
    request_id, or the CRC of its payload is unknown.
    """
    if not task.request_id:
        return None
    outcome = task.outcome
    if outcome is not None and outcome.withdrawn:
        return REQUEST_ID_FREE
    crc = task.payload_crc if task.payload_crc >= 0 else payload_crc(task)
    return None if crc < 0 else crc << SPEC_BITS | task.spec.identity


def conflict(
    task_id: int, kind: str, model: str, known_fingerprint: int | None, resubmit: Task, state: int | None, *,
    durable: bool = True,
) -> ev.Rejection | None:  # fmt: skip
    """Compares a resubmit with the known task that has its request_id, which the other arguments describe. Returns a
    rejection if they differ. `known_fingerprint` None: unknown. `state`: of the known task's outcome; None: unsettled.
    """
    difference = _difference(kind, model, known_fingerprint, resubmit)
    if resubmit.spec.durable and not durable:
        difference = "durability EPHEMERAL, not DURABLE"
    if not difference:
        return None
    advice = "use another request_id"
    if state not in (None, OutcomeState.SUCCEEDED):
        advice = f"set retry_failed to run this task in place of task {task_id}, which did not succeed; or {advice}"
    name = f"request_id {resubmit.request_id!r} is that of task {task_id}"
    return ev.Rejection(ALREADY_EXISTS, f"{name}, which has {difference}; {advice}")


def _difference(kind: str, model: str, known_fingerprint: int | None, resubmit: Task) -> str:
    spec = resubmit.spec
    if kind != spec.kind:
        return f"kind {kind!r}, not {spec.kind!r}"
    if model != spec.model:
        return f"model {model!r}, not {spec.model!r}"
    if known_fingerprint is None:
        return ""
    if known_fingerprint & (1 << SPEC_BITS) - 1 != spec.identity:
        return "other parameters or another content_type"
    crc = payload_crc(resubmit)
    return "another payload" if crc >= 0 and crc != known_fingerprint >> SPEC_BITS else ""

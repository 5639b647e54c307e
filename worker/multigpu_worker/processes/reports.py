"""Reads what an engine reports about a batch or a loaded model from the engine's frames."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.processes.ipc import frames
from multigpu_worker.repository.signature import UNKNOWN, Signature
from multigpu_worker.session.lease import Lease
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.session.session import Report, ReportState, TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReports:
    start_ns: int
    finish_ns: int
    checkpoints: list[tuple[Lease, bytes]]
    progress: list[tuple[Lease, float, str]]
    partials: list[tuple[Lease, bytes, str]]
    logs: list[tuple[Lease, str]]
    reports: list[Report]
    done: bool
    work_ns: int
    embedding_cache: pb.EmbeddingCache | None


def pin_results(sharing: Sharing, succeeded: list[Any]) -> tuple[list[Any], list[Any], int]:
    """Pin results in shared files, so that they outlive the engine.

    Returns the results, failures for the results whose files are gone, and the number of results in files.
    """
    if not any(type(result) is tuple for _, result, _ in succeeded):
        return succeeded, [], 0
    held: list[Any] = []
    lost: list[Any] = []
    places = 0
    for lease_id, result, content_type in succeeded:
        if type(result) is tuple:
            places += 1
            try:
                result = sharing.pin(*result)  # noqa: PLW2901  a reference instead of the result's place
            except OSError as error:
                lost.append((lease_id, "ResultLost", f"the file of the result is gone: {error}", True, ""))
                continue
        held.append((lease_id, result, content_type))
    return held, lost, places


def read_reports(
    leases: Mapping[int, Lease],
    blobs: list[bytes],
    start_ns: int,
    finish_ns: int,
    succeeded: list[Any],
    failed: list[Any],
    partials: list[Any],
    progress: list[Any],
    checkpoints: list[Any],
    logs: list[Any],
    done: bool,
    work_ns: int,
    cache: dict[str, int],
) -> BatchReports:
    """Read the whole frame before any of it is applied: one that makes no sense must leave every lease in its batch.

    Raises TypeError, ValueError or LookupError if the frame makes no sense.
    """
    for number in (start_ns, finish_ns, work_ns):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"times that are {start_ns!r}, {finish_ns!r}, {work_ns!r}")
    reports = [
        Report(leases[lease_id], ReportState.SUCCEEDED, blobs[result] if type(result) is int else result, content_type)
        for lease_id, result, content_type in succeeded
    ]
    for lease_id, error_type, text, retryable, traceback in failed:
        error = TaskError(type=error_type, message=text, retryable=retryable, traceback=traceback)
        reports.append(Report(leases[lease_id], ReportState.FAILED, error=error))
    return BatchReports(
        start_ns=start_ns,
        finish_ns=finish_ns,
        checkpoints=[(leases[lease_id], _bytes_of(data, blobs)) for lease_id, data in checkpoints],
        progress=[(leases[lease_id], float(fraction), str(note)) for lease_id, fraction, note in progress],
        logs=[(leases[lease_id], str(text)) for lease_id, text in logs],
        partials=[(leases[lease_id], _bytes_of(data, blobs), str(form)) for lease_id, data, form in partials],
        reports=reports,
        done=bool(done),
        work_ns=work_ns,
        embedding_cache=pb.EmbeddingCache(**cache) if cache else None,
    )


def _bytes_of(data: bytes | int, blobs: list[bytes]) -> bytes:
    return data if type(data) is bytes else blobs[int(data)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded:
    """What an engine reports about a model that it has loaded."""

    facts: dict[str, str]
    load_s: float
    one_by_one: bool
    # GPU memory that the engine itself counts; 0: none.
    device_bytes: int
    signature: Signature = UNKNOWN


def read_loaded(message: frames.Message) -> ModelLoaded:
    _, facts, load_s, one_by_one, device_bytes, signature = message
    return ModelLoaded(
        facts=read_facts(facts), load_s=float(load_s), one_by_one=bool(one_by_one), device_bytes=int(device_bytes),
        signature=Signature.of(signature),
    )  # fmt: skip


def read_facts(facts: Any) -> dict[str, str]:
    return {str(name): str(fact) for name, fact in dict(facts).items()}

"""What an engine reports of a batch, read from its frame."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.processes.ipc import frames
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.session.session import Lease, Report, ReportState, TaskError


@dataclass(slots=True)
class RawReports:
    """The frame as it came."""

    batch_id: int
    start_ns: int
    finish_ns: int
    succeeded: list[Any]
    failed: list[Any]
    partials: list[Any]
    progress: list[Any]
    checkpoints: list[Any]
    done: bool
    work_ns: int
    cache: dict[str, int]

    def pin(self, sharing: Sharing) -> int:
        """Pin results in shared files, so that they outlive the engine. Returns how many places there were."""
        if not any(type(result) is tuple for _, result, _ in self.succeeded):
            return 0
        held, places = [], 0
        for lease_id, result, content_type in self.succeeded:
            if type(result) is tuple:
                places += 1
                try:
                    result = sharing.pin(*result)  # noqa: PLW2901  it was only its place
                except OSError as error:
                    message = f"the file of the result is gone: {error}"
                    self.failed = [*self.failed, (lease_id, "ResultLost", message, True, "")]
                    continue
            held.append((lease_id, result, content_type))
        self.succeeded = held
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReports:
    """The frame, with leases."""

    start_ns: int
    finish_ns: int
    checkpoints: list[tuple[Lease, bytes]]
    progress: list[tuple[Lease, float, str]]
    partials: list[tuple[Lease, bytes, str]]
    reports: list[Report]
    done: bool
    work_ns: int
    embedding_cache: pb.EmbeddingCache | None


def read_reports(raw: RawReports, leases: Mapping[int, Lease], blobs: list[bytes]) -> BatchReports:
    """All of it is read before any of it counts: a frame that makes no sense must leave every lease with its batch.

    TypeError, ValueError, LookupError: it makes no sense.
    """
    for number in (raw.start_ns, raw.finish_ns, raw.work_ns):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"times that are {raw.start_ns!r}, {raw.finish_ns!r}, {raw.work_ns!r}")
    reports = [
        Report(leases[lease_id], ReportState.SUCCEEDED, blobs[result] if type(result) is int else result, content_type)
        for lease_id, result, content_type in raw.succeeded
    ]
    for lease_id, error_type, text, retryable, traceback in raw.failed:
        error = TaskError(type=error_type, message=text, retryable=retryable, traceback=traceback)
        reports.append(Report(leases[lease_id], ReportState.FAILED, error=error))
    return BatchReports(
        start_ns=raw.start_ns,
        finish_ns=raw.finish_ns,
        checkpoints=[(leases[lease_id], _bytes_of(data, blobs)) for lease_id, data in raw.checkpoints],
        progress=[(leases[lease_id], float(fraction), str(note)) for lease_id, fraction, note in raw.progress],
        partials=[(leases[lease_id], _bytes_of(data, blobs), str(form)) for lease_id, data, form in raw.partials],
        reports=reports,
        done=bool(raw.done),
        work_ns=raw.work_ns,
        embedding_cache=pb.EmbeddingCache(**raw.cache) if raw.cache else None,
    )


def _bytes_of(data: bytes | int, blobs: list[bytes]) -> bytes:
    return data if type(data) is bytes else blobs[int(data)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded:
    """What an engine reports of a model that it has loaded."""

    facts: dict[str, str]
    load_s: float
    one_by_one: bool
    # GPU memory by the engine's own account; 0: none.
    device_bytes: int


def read_loaded(message: frames.Message) -> ModelLoaded:
    _, facts, load_s, one_by_one, device_bytes = message
    return ModelLoaded(
        facts=read_facts(facts), load_s=float(load_s), one_by_one=bool(one_by_one), device_bytes=int(device_bytes)
    )


def read_facts(facts: Any) -> dict[str, str]:
    return {str(name): str(fact) for name, fact in dict(facts).items()}

"""Log lines about workers: lost and stopped workers, devices quarantined and returned to service."""

import structlog

from multigpu_master.core.model import Worker
from multigpu_master.driver import Driver

log = structlog.get_logger()


class WorkerLog:
    """Logs the changes of workers. Keeps the session and the logged state of each worker."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # By worker_id: (session or 0, last logged state). State True: quarantined. False: in service, or nothing was
        # logged yet. None: quarantined before this master started, for a reason that the worker has not reported yet.
        self._seen: dict[str, tuple[int, bool | None]] = {}

    def on_changed(self, worker: Worker) -> None:
        """Called for every WorkerChanged. Streams that end because the master stops cause none."""
        session, last_state = self._seen.get(worker.worker_id, (0, False))
        reason_unknown = worker.quarantined and not last_state and not worker.health.since_s
        self._seen[worker.worker_id] = worker.session, None if reason_unknown else worker.quarantined
        if session and not worker.session:
            self._log_lost(worker, session)
        # After None, the first known state is always logged.
        if worker.quarantined != last_state and not reason_unknown:
            self._log_quarantine(worker)

    def forget(self, worker: Worker) -> None:
        self._seen.pop(worker.worker_id, None)

    def _log_lost(self, worker: Worker, session: int) -> None:
        """Logs that a worker was lost, or has stopped. `session`: the session that ended."""
        driver = self._driver
        # Counts the leases of all workers that were lost in the current event; usually that is one worker.
        requeued = driver.core.ledger.counters.requeued - driver.requeued_before
        reason = driver.workers.end_reasons.get(session, "its stream ended")
        if worker.stopping and not requeued:
            log.info("worker stopped", worker_id=worker.worker_id, session=session)
        else:
            log.warning(
                "worker lost", worker_id=worker.worker_id, session=session, reason=reason, leases_requeued=requeued
            )

    def _log_quarantine(self, worker: Worker) -> None:
        """Logs that a worker was quarantined or returned to service. A degraded device in service has reasons too."""
        reasons = "; ".join(f"{r.code}: {r.message}" for r in worker.health.reasons)
        if worker.quarantined:
            reasons = reasons or "it is being checked"
            log.warning("device quarantined", worker_id=worker.worker_id, reason=reasons)
        else:
            log.info("device back from quarantine", worker_id=worker.worker_id, reason=reasons or "it passed a check")

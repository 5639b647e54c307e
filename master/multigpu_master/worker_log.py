"""Log lines about workers: lost and stopped workers, devices quarantined and returned to service."""

import structlog

from multigpu_master.core.model import Worker
from multigpu_master.driver import Driver

log = structlog.get_logger()


class WorkerLog:
    """Logs the changes of workers. It keeps what it last logged of each."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # By worker_id: its session, and whether its quarantine was logged. None: it was not logged, because the
        # worker was quarantined before this master started and has not yet reported the reason.
        self._seen: dict[str, tuple[int, bool | None]] = {}

    def changed(self, worker: Worker) -> None:
        """Called with every WorkerChanged while the master is not stopping."""
        session, logged = self._seen.get(worker.worker_id, (0, False))
        silent = worker.quarantined and not logged and not worker.health.since_s
        self._seen[worker.worker_id] = worker.session, None if silent else worker.quarantined
        if session and not worker.session:
            self._lost(worker, session)
        if worker.quarantined != logged and not silent:
            self._quarantined(worker)

    def forget(self, worker: Worker) -> None:
        self._seen.pop(worker.worker_id, None)

    def _lost(self, worker: Worker, session: int) -> None:
        driver = self._driver
        # Counts the leases of all workers that were lost in this event; usually that is one worker.
        requeued = driver.core.ledger.counters.requeued - driver.requeued_before
        reason = driver.workers.end_reasons.get(session, "its stream ended")
        if worker.stopping and not requeued:
            log.info("worker stopped", worker_id=worker.worker_id, session=session)
        else:
            log.warning(
                "worker lost", worker_id=worker.worker_id, session=session, reason=reason, leases_requeued=requeued
            )

    def _quarantined(self, worker: Worker) -> None:
        reasons = "; ".join(f"{r.code}: {r.message}" for r in worker.health.reasons)
        if worker.quarantined:
            reasons = reasons or "it is being checked"
            log.warning("device quarantined", worker_id=worker.worker_id, reason=reasons)
        else:
            log.info("device back from quarantine", worker_id=worker.worker_id, reason=reasons or "it passed a check")

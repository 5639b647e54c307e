"""The master's metrics, for Prometheus and OTLP.

The event loop, which owns the counters, takes a snapshot once a second. Scrapes and exports get the newest snapshot.
The search for the oldest task of each queue takes several rounds of the event loop, so that other coroutines run
meanwhile. The final snapshot, which `stop` takes, has the result of the last search that ended.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
from cryptography import x509
from multigpu._transport.credentials import is_loopback
from multigpu.config.config import MasterConfig, TelemetryConfig
from multigpu.daemon.metrics import Metric, OtlpMetrics, configure_metrics, metric, sample, serve_prometheus
from multigpu.daemon.metrics_server import MetricsServer
from multigpu.v1 import worker_service_pb2

from multigpu_master import VERSION
from multigpu_master.core.model import Worker
from multigpu_master.core.scheduler import Core
from multigpu_master.core.usage import UsageSums
from multigpu_master.core.workers.info import ModelState, Resident
from multigpu_master.driver import Driver
from multigpu_master.journal.protocol import UsageKey
from multigpu_master.metrics.devices import DeviceSnapshot, device_metrics, snapshots
from multigpu_master.metrics.jobs import job_metrics, running_jobs
from multigpu_master.rpc.queries import oldest_submits, rss_bytes
from multigpu_master.telemetry.latencies import Latencies

log = structlog.get_logger()

INTERVAL_S = 1.0


class MasterMetrics:
    """Serves and exports the master's metrics as configured."""

    def __init__(self, driver: Driver, config: MasterConfig, telemetry: TelemetryConfig) -> None:
        self._driver = driver
        self._listen = config.metrics_listen
        self._telemetry = telemetry
        paths = [str(Path(p).expanduser()) for p in (config.tls_cert, config.tls_key, config.tls_client_ca)]
        # Paths of the certificate, the key and the client CA, if the endpoint is served over TLS: scrapers then need a
        # certificate.
        self._tls: tuple[str, str, str] | None = None
        if self._listen and config.tls_client_ca and not is_loopback(self._listen):
            self._tls = paths[0], paths[1], paths[2]
        self._certificate = _Certificate(self._tls or paths[:1]) if config.tls_cert else None
        self._snapshot: tuple[Metric, ...] = ()  # the newest snapshot, except the devices
        self._devices: list[DeviceSnapshot] = []
        self._oldest: dict[str, float] = {}  # by queue: when its oldest queued task was submitted
        self._loop_task: asyncio.Task[None] | None = None
        self._prometheus: MetricsServer | None = None
        self._otlp: OtlpMetrics | None = None

    def start(self) -> None:
        """Starts the endpoint and the exporter if they are configured. Raises ConfigError if the address is not
        available, or the exporter is not installed.
        """
        resource = {"service.name": "mgpu-master", "service.version": VERSION}
        self._otlp = configure_metrics(self._telemetry, resource, self._collect)
        if self._listen:
            self._prometheus = serve_prometheus(self._listen, self._collect, self._tls)
            log.info("metrics are served", address=f"{self._listen.rpartition(':')[0]}:{self._prometheus.port}")
        if self._otlp is not None or self._prometheus is not None:
            self._driver.history.latencies = Latencies()
            self._take_snapshot()
            self._loop_task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Takes and exports a final snapshot, and ends the exporter and the endpoint."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            self._take_snapshot()
        if self._otlp is not None:
            self._otlp.close()
        if self._prometheus is not None:
            self._prometheus.close()

    async def _run(self) -> None:
        core = self._driver.core
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self._oldest = await oldest_submits(core, core.ledger.queues)
                self._take_snapshot()
            except Exception:
                log.exception("no snapshot of the metrics was taken")

    def _take_snapshot(self) -> None:
        if self._certificate is not None:
            self._certificate.use_if_changed(self._reload_certificate)
        self._devices = snapshots(self._driver.core.fleet.workers.values())
        certificate = self._certificate.metrics() if self._certificate is not None else ()
        self._snapshot = (*_metrics(self._driver, self._oldest), *certificate)

    def _reload_certificate(self) -> None:
        if self._tls is not None:
            assert self._prometheus is not None, "_tls needs an endpoint"
            self._prometheus.reload_certificate(*self._tls)

    def _collect(self) -> Iterator[Metric]:
        """Runs on the scraper's thread, because a thousand devices have tens of thousands of samples."""
        yield from self._snapshot
        yield from device_metrics(self._devices)


class _Certificate:
    """The file of the master's certificate, and the other files of the TLS endpoint, if there is one."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [Path(path) for path in paths]
        self._used: list[bytes] = []  # contents of the files
        self._expire_s = 0.0  # in seconds since 1970; 0.0: no certificate was read yet
        self._logged = ""  # why the files were last rejected

    def use_if_changed(self, use: Callable[[], None]) -> None:
        """Calls `use` if the contents of a file have changed since the last call of `use` that raised no error. Logs an
        error of `use`, or of reading the files.
        """
        try:
            contents = [path.read_bytes() for path in self._paths]
            if contents == self._used:
                self._logged = ""
                return
            expire_s = x509.load_pem_x509_certificate(contents[0]).not_valid_after_utc.timestamp()
            use()
        except (OSError, ValueError, x509.InvalidVersion) as error:
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning(
                    "a new certificate is not used for metrics", certificate=str(self._paths[0]), error=str(error)
                )
            return
        self._used, self._expire_s, self._logged = contents, expire_s, ""

    def metrics(self) -> Iterator[Metric]:
        if self._expire_s:
            text = "When the master's certificate expires, in seconds since 1970."
            yield metric("mgpu_certificate_expiry_timestamp_seconds", text, sample(self._expire_s))


def _metrics(driver: Driver, oldest: Mapping[str, float]) -> Iterator[Metric]:
    core, journal = driver.core, driver.journal
    yield from _of_tasks(core)
    yield from _of_usage(driver.usage.totals)
    ages = [
        sample(max(0.0, driver.now() - oldest[q.name]), queue=q.name)
        for q in core.ledger.queues.values()
        if q.queued and q.name in oldest
    ]
    yield metric("mgpu_queue_oldest_age_seconds", "Waiting time of the oldest queued task.", *ages)
    yield from _of_fleet(core, driver.now())
    if (latencies := driver.history.latencies) is not None:
        yield from latencies.metrics()
    yield metric("mgpu_journal_bytes", "Size of the journal on disk.", sample(journal.size_bytes()))
    writable = float(driver.write_buffer.writable)
    yield metric("mgpu_journal_writable", "1 if durable tasks can be accepted.", sample(writable))
    yield metric("mgpu_master_memory_bytes", "Resident memory of the master.", sample(rss_bytes()))
    workers = list(core.fleet.workers.values())
    yield from _of_workers(workers)
    yield from _of_models([w for w in workers if w.residency.offered or w.residency.reported])
    yield from _of_caches(workers)
    yield from job_metrics(running_jobs(workers))


def _of_tasks(core: Core) -> Iterator[Metric]:
    c = core.ledger.counters
    yield metric("mgpu_tasks_submitted_total", "Accepted tasks.", sample(c.submitted))
    states = ("succeeded", "failed", "cancelled", "expired", "dead_lettered")
    settled = [sample(getattr(c, state), outcome=state) for state in states]
    yield metric("mgpu_tasks_settled_total", "Settled tasks, by outcome.", *settled)
    text = "Leases whose task was requeued or became a dead letter because the worker was lost or returned the lease, "
    text += "or the master revoked it. Not counted: leases returned after a recall, for lack of room for the model, or "
    text += "because the payload could not be read."
    yield metric("mgpu_leases_requeued_total", text, sample(c.requeued))
    yield metric("mgpu_reports_stale_total", "Reports that came too late to count.", sample(c.stale_reports))
    queues = list(core.ledger.queues.values())
    yield metric("mgpu_queue_tasks", "Queued tasks.", *[sample(q.queued, queue=q.name) for q in queues])
    text = "Payload bytes of queued tasks."
    yield metric("mgpu_queue_bytes", text, *[sample(q.queued_bytes, queue=q.name) for q in queues])
    yield metric("mgpu_queue_leases", "Tasks leased to workers.", *[sample(q.leased, queue=q.name) for q in queues])


def _of_usage(totals: Mapping[UsageKey, UsageSums]) -> Iterator[Metric]:
    def each(name: str, text: str, value: Callable[[UsageSums], float]) -> Metric:
        return metric(name, text, *[sample(value(used), **key._asdict()) for key, used in totals.items()])

    yield each("mgpu_usage_device_seconds_total", "Device time of tasks.", lambda used: used.device_s)
    text = "Device time of tasks for which energy was measured."
    yield each("mgpu_usage_measured_device_seconds_total", text, lambda used: used.measured_s)
    yield each(
        "mgpu_usage_energy_joules_total",
        "Energy used in the measured device time of tasks, including idle power.",
        lambda used: used.joules,
    )


def _of_fleet(core: Core, now: float) -> Iterator[Metric]:
    active, workers = len(core.fleet.sessions), core.fleet.workers.values()
    yield metric("mgpu_workers_connected", "Connected workers, including those that get no tasks.", sample(active))
    yield metric("mgpu_workers_lost", "Known workers that are not connected.", sample(len(workers) - active))
    held = {
        "cordoned": sum(w.cordon is not None for w in workers),
        "draining": sum(w.draining for w in workers),
        "quarantined": sum(w.quarantined for w in workers),
    }
    samples = [sample(count, reason=reason) for reason, count in held.items()]
    yield metric("mgpu_workers_held", "Workers that get no tasks, by reason; a worker can have several.", *samples)
    breaker = core.quarantine.breaker
    tripped = float(breaker.tripped_s > 0)
    yield metric("mgpu_breaker_tripped", "1 if the circuit breaker has tripped.", sample(tripped))
    text = "Devices that fell sick within the breaker's window, including the device that tripped it."
    yield metric("mgpu_breaker_quarantines", text, sample(breaker.count(now)))


def _of_workers(workers: list[Worker]) -> Iterator[Metric]:
    def each(name: str, text: str, value: Callable[[Worker], float]) -> Metric:
        return metric(
            name, text, *[sample(value(w), worker_id=w.worker_id, device_id=w.info.device_id) for w in workers]
        )

    yield each("mgpu_worker_leases", "Leases that the worker holds.", lambda w: len(w.leases))
    yield each("mgpu_worker_succeeded_total", "Tasks that succeeded on the worker.", lambda w: w.succeeded)
    yield each("mgpu_worker_failed_total", "Attempts that failed on the worker.", lambda w: w.failed)


def _of_models(workers: list[Worker]) -> Iterator[Metric]:
    def each(name: str, text: str, value: Callable[[Resident], float]) -> Metric:
        found = [(w.worker_id, r) for w in workers for r in w.residency.reported.values()]
        return metric(name, text, *[sample(value(r), worker_id=worker_id, model=r.model) for worker_id, r in found])

    ready = [
        sample(sum(r.state is ModelState.READY for r in w.residency.reported.values()), worker_id=w.worker_id)
        for w in workers
    ]
    yield metric("mgpu_models_resident", "Models that are loaded and ready.", *ready)
    yield each("mgpu_model_memory_bytes", "Device memory that a loaded model takes.", lambda r: r.memory_bytes)
    yield each("mgpu_model_loads_total", "How often the worker has loaded the model.", lambda r: r.loads)


def _of_caches(workers: list[Worker]) -> Iterator[Metric]:
    caches = [
        (w.worker_id, worker_service_pb2.EmbeddingCache.FromString(w.engine.embedding_cache))
        for w in workers
        if w.engine.embedding_cache is not None
    ]
    texts = [
        sample(value, worker_id=worker_id, result=result)
        for worker_id, c in caches
        for result, value in (("hit", c.hits), ("joined", c.joined), ("miss", c.misses))
    ]
    text = "Embedded texts by cache result: hit, joined (was being computed for another task), miss."
    yield metric("mgpu_embedding_cache_texts_total", text, *texts)
    entries = [sample(c.entries, worker_id=worker_id) for worker_id, c in caches]
    yield metric("mgpu_embedding_cache_entries", "Vectors in the cache's memory.", *entries)
    size = [sample(c.size_bytes, worker_id=worker_id) for worker_id, c in caches]
    yield metric("mgpu_embedding_cache_bytes", "Size of the vectors in the cache's memory.", *size)

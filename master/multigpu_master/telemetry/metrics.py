"""The master's numbers, for Prometheus and OTLP: all kept by the core anyway, read when somebody asks.

The snapshot is taken on the event loop, which owns the numbers, once a second; whoever scrapes gets the last one.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from cryptography import x509
from multigpu._transport.credentials import is_loopback
from multigpu.config.config import MasterConfig, TelemetryConfig
from multigpu.daemon.metrics import Metric, OtlpMetrics, PrometheusServer, Sample, configure_metrics, serve_prometheus

from multigpu_master import VERSION
from multigpu_master.core.model import Worker
from multigpu_master.core.workers.info import EmbeddingCache, ModelState, Resident
from multigpu_master.driver import Driver
from multigpu_master.telemetry import device_metrics as metrics_devices
from multigpu_master.telemetry.latencies import Latencies
from multigpu_master.telemetry.process_memory import resident_bytes

log = structlog.get_logger()

INTERVAL_S = 1.0


class MasterMetrics:
    """Serves the master's metrics as configured; does nothing where nothing is."""

    def __init__(self, driver: Driver, config: MasterConfig, telemetry: TelemetryConfig) -> None:
        self._driver = driver
        self._listen = config.metrics_listen
        # On loopback everybody may scrape; elsewhere, those with a certificate.
        self._tls: tuple[str, str, str] | None = None
        if self._listen and config.tls_client_ca and not is_loopback(self._listen):
            cert, key, ca = (str(Path(p).expanduser()) for p in (config.tls_cert, config.tls_key, config.tls_client_ca))
            self._tls = cert, key, ca
        self._certificate_ns = Path(self._tls[0]).stat().st_mtime_ns if self._tls is not None else 0
        self._certificate = Path(config.tls_cert).expanduser() if config.tls_cert else None
        # When its file was last changed, and when it expires.
        self._expiry = 0, 0.0
        self._telemetry = telemetry
        self._last: tuple[Metric, ...] = ()
        self._devices: list[metrics_devices.Words] = []
        self._timer: asyncio.TimerHandle | None = None
        self._prometheus: PrometheusServer | None = None
        self._otlp: OtlpMetrics | None = None

    def start(self) -> None:
        """ConfigError: the address can't be had, or the exporter is not installed."""
        self._otlp = configure_metrics(
            self._telemetry,
            {"service.name": "mgpu-master", "service.version": VERSION},
            lambda: self._collect(hardware=True),
        )
        if self._listen:
            self._prometheus = serve_prometheus(self._listen, self._collect, self._tls)
            log.info("metrics are served", address=f"{self._listen.rpartition(':')[0]}:{self._prometheus.port}")
        if self._otlp is not None or self._prometheus is not None:
            self._driver.latencies = Latencies()
            self._snapshot()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._take()
        if self._otlp is not None:
            self._otlp.close()
        if self._prometheus is not None:
            self._prometheus.close()

    def _take(self) -> None:
        self._devices = metrics_devices.words(self._driver.core.fleet.workers.values())
        self._last = (*_metrics(self._driver), *self._of_certificate())

    def _of_certificate(self) -> Iterator[Metric]:
        if not self._certificate:
            return
        try:
            changed_ns = self._certificate.stat().st_mtime_ns
            if changed_ns != self._expiry[0]:
                found = x509.load_pem_x509_certificate(self._certificate.read_bytes())
                self._expiry = changed_ns, found.not_valid_after_utc.timestamp()
        except (OSError, ValueError):
            return  # the listener logs what is wrong with it
        text = "When the master's certificate expires, in seconds since 1970."
        yield Metric("mgpu_certificate_expiry_timestamp_seconds", "gauge", text, (Sample(self._expiry[1]),))

    def _collect(self, *, hardware: bool = False) -> Iterator[Metric]:
        """Called on the thread of who asks: a thousand devices have tens of thousands of numbers."""
        devices = metrics_devices.told(self._devices)
        yield from self._last
        yield from metrics_devices.metrics(devices)
        if hardware:
            yield from metrics_devices.hardware_metrics(devices)

    def _snapshot(self) -> None:
        self._take()
        if self._tls is not None:
            self._renew(self._tls)
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._snapshot)

    def _renew(self, tls: tuple[str, str, str]) -> None:
        """Takes a renewed certificate into use."""
        assert self._prometheus is not None, "who serves over TLS serves"
        try:
            changed_ns = Path(tls[0]).stat().st_mtime_ns
            if changed_ns != self._certificate_ns:
                self._prometheus.renew(tls[0], tls[1])
                self._certificate_ns = changed_ns
        except OSError as error:
            log.warning("a new certificate is not used for metrics", certificate=tls[0], error=str(error))


def _metrics(driver: Driver) -> Iterator[Metric]:
    core = driver.core
    c = core.counters

    def one(name: str, text: str, value: float) -> Metric:
        return Metric(name, "counter" if name.endswith("_total") else "gauge", text, (Sample(value),))

    yield one("mgpu_tasks_submitted_total", "Tasks taken.", c.submitted)
    states = ("succeeded", "failed", "cancelled", "expired", "dead_lettered")
    settled = tuple(Sample(getattr(c, s), {"outcome": s}) for s in states)
    yield Metric("mgpu_tasks_settled_total", "counter", "Tasks that ended, by outcome.", settled)
    yield one("mgpu_leases_requeued_total", "Leases taken back because a worker was lost or gave them up.", c.requeued)
    yield one("mgpu_reports_stale_total", "Reports that came too late to count.", c.stale_reports)
    queues = [(q.name, q) for q in core.queues.values()]
    queued = tuple(Sample(q.queued, {"queue": n}) for n, q in queues)
    yield Metric("mgpu_queue_tasks", "gauge", "Tasks that wait.", queued)
    size = tuple(Sample(q.queued_bytes, {"queue": n}) for n, q in queues)
    yield Metric("mgpu_queue_bytes", "gauge", "Payload bytes of tasks that wait.", size)
    leased = tuple(Sample(q.leased, {"queue": n}) for n, q in queues)
    yield Metric("mgpu_queue_leases", "gauge", "Tasks leased to workers.", leased)
    yield one("mgpu_workers_active", "Connected workers, also those that get no tasks.", len(core.fleet.sessions))
    yield one("mgpu_workers_lost", "Workers without one.", len(core.fleet.workers) - len(core.fleet.sessions))
    workers = list(core.fleet.workers.values())
    held = {"cordoned": 0, "draining": 0, "quarantined": 0}
    for worker in workers:
        for reason in held:
            held[reason] += getattr(worker, reason)
    text = "Workers that get no tasks, by reason; one may have several."
    yield Metric("mgpu_workers_held", "gauge", text, tuple(Sample(n, {"reason": r}) for r, n in held.items()))
    breaker = core.quarantine.breaker
    yield one("mgpu_breaker_tripped", "1 if the circuit breaker has tripped.", float(breaker.tripped_s > 0))
    text = "Devices quarantined within its window, and the one that tripped it, which is not."
    yield one("mgpu_breaker_quarantines", text, breaker.count(driver.now()))
    if driver.latencies is not None:
        yield from driver.latencies.metrics()
    yield one("mgpu_journal_bytes", "What the journal takes on the disk.", driver.journal.size_bytes())
    yield one("mgpu_journal_writable", "1 if durable tasks can be taken.", float(driver.journaling.writable))
    yield one("mgpu_master_memory_bytes", "Resident memory of the master.", resident_bytes())
    yield from _of_workers(workers)


def _of_workers(workers: list[Worker]) -> Iterator[Metric]:
    def each(name: str, text: str, values: list[tuple[Worker, float | None]]) -> Metric:
        samples = tuple(
            Sample(v, {"worker_id": w.worker_id, "device_id": w.info.device_id}) for w, v in values if v is not None
        )
        return Metric(name, "counter" if name.endswith("_total") else "gauge", text, samples)

    yield each("mgpu_worker_leases", "Unsettled leases.", [(w, float(len(w.leases))) for w in workers])
    yield each("mgpu_worker_succeeded_total", "Tasks that succeeded there.", [(w, float(w.succeeded)) for w in workers])
    yield each("mgpu_worker_failed_total", "Attempts that failed there.", [(w, float(w.failed)) for w in workers])
    yield from _of_models([w for w in workers if w.residency.reported])
    yield from _of_caches([(w, w.engine.embedding_cache) for w in workers if w.engine.embedding_cache is not None])


def _of_models(workers: list[Worker]) -> Iterator[Metric]:
    def each(name: str, text: str, value: Callable[[Resident], float]) -> Metric:
        samples = tuple(
            Sample(value(r), {"worker_id": w.worker_id, "model": r.model})
            for w in workers
            for r in w.residency.reported.values()
        )
        return Metric(name, "counter" if name.endswith("_total") else "gauge", text, samples)

    resident = tuple(
        Sample(sum(r.state is ModelState.READY for r in w.residency.reported.values()), {"worker_id": w.worker_id})
        for w in workers
    )
    yield Metric("mgpu_models_resident", "gauge", "Models that are loaded and ready.", resident)
    yield each("mgpu_model_memory_bytes", "What a loaded model takes of the device's memory.", lambda r: r.memory_bytes)
    yield each("mgpu_model_loads_total", "Times that the worker has loaded it since it began.", lambda r: r.loads)


def _of_caches(caches: list[tuple[Worker, EmbeddingCache]]) -> Iterator[Metric]:
    texts = tuple(
        Sample(value, {"worker_id": w.worker_id, "result": result})
        for w, c in caches
        for result, value in (("hit", c.hits), ("joined", c.joined), ("miss", c.misses))
    )
    text = "Texts to embed: in the cache, computed at that time for another task, computed; since the engine began."
    yield Metric("mgpu_embedding_cache_texts_total", "counter", text, texts)
    entries = tuple(Sample(c.entries, {"worker_id": w.worker_id}) for w, c in caches)
    yield Metric("mgpu_embedding_cache_entries", "gauge", "Vectors that the cache holds in memory.", entries)
    size = tuple(Sample(c.size_bytes, {"worker_id": w.worker_id}) for w, c in caches)
    yield Metric("mgpu_embedding_cache_bytes", "gauge", "What they take.", size)

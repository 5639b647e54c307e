"""Metrics: numbers that the daemons keep anyway, read when somebody asks.

There are no instruments on the hot path. A daemon counts in plain integers, and offers one function that takes a
snapshot; the function runs when Prometheus scrapes or when the OTLP export is due, and never otherwise. It is called
on a thread of its own: it must only read, or hand over to the thread that owns the numbers.

Names begin with `mgpu_`, end in their unit, and in `_total` where they only grow, for both roads alike. What
OpenTelemetry's conventions have a name for (`hw.*`) goes to its collectors by that name too.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal
from wsgiref.simple_server import WSGIServer

import structlog

from multigpu.config.config import ConfigError, TelemetryConfig
from multigpu.config.values import split_address
from multigpu.daemon.metrics_server import start_server
from multigpu.daemon.telemetry import make_resource, missing_exporter, otlp_endpoint

EXPORT_INTERVAL_S = 10.0
_EXPORT_TIMEOUT_S = 3

log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One number, and what it is of. Labels of one metric all have the same keys."""

    value: float
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramSample:
    """Counts of observations: `counts[i]` of those at most `bounds[i]` and above the bound before; one more, the last,
    of those above them all. `total`: the sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """A bound more would shift every count."""
        assert len(self.counts) == len(self.bounds) + 1, (self.bounds, self.counts)


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A named family of numbers. `counter` only grows while the process lives; `gauge` goes up and down, and so does
    `updowncounter`, whose samples may be added up.
    """

    name: str
    kind: Literal["counter", "gauge", "updowncounter", "histogram"]
    help: str
    samples: tuple[Sample, ...] | tuple[HistogramSample, ...]
    # For OTLP, where the name doesn't end in it.
    unit: str = ""

    def __post_init__(self) -> None:
        """The name says what the kind is, unless OpenTelemetry has named it."""
        if not self.name.startswith("hw."):
            assert self.name.endswith("_total") == (self.kind == "counter"), self.name
        wanted = HistogramSample if self.kind == "histogram" else Sample
        assert all(type(sample) is wanted for sample in self.samples), self.name


Collect = Callable[[], Iterable[Metric]]


class PrometheusServer:
    """Answers scrapes on a thread of its own until closed."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def renew(self, certificate: str, key: str) -> None:
        """Shows this certificate from the next connection on. OSError (of which SSLError is one): it is no good."""
        self._server.socket.context.load_cert_chain(certificate, key)  # type: ignore[attr-defined]  # over TLS it has one

    def close(self) -> None:
        """Stops, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_prometheus(listen: str, collect: Collect, tls: tuple[str, str, str] | None = None) -> PrometheusServer:
    """Serves the snapshot at `listen` (HOST:PORT; port 0: any) in Prometheus' text format. `tls`: over TLS, with these
    files of a certificate, its key, and the authority of those who may scrape.

    Raises ConfigError: the address can't be had.
    """
    import prometheus_client  # noqa: PLC0415 - only who serves pays for the import

    host, port = split_address(listen)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect))
    try:
        server, thread = start_server(port, host, prometheus_client.make_wsgi_app(registry), tls)
    except OSError as error:
        raise ConfigError(f"metrics_listen {listen!r} can't be had: {error}; choose another address") from error
    return PrometheusServer(server, thread)


class _Collector:
    """Turns a snapshot into Prometheus' own types."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core  # noqa: PLC0415 - loaded by now

        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        for metric in self._collect():
            keys = tuple(metric.samples[0].labels) if metric.samples else ()
            if metric.kind == "histogram":
                family: Any = core.HistogramMetricFamily(metric.name, metric.help, labels=keys)
            else:
                family = kinds[metric.kind](metric.name, metric.help, labels=keys)
            for sample in metric.samples:
                values = [sample.labels[key] for key in keys]
                if isinstance(sample, HistogramSample):
                    family.add_metric(values, _cumulated(sample), sample.total)
                else:
                    family.add_metric(values, sample.value)
            yield family


def _cumulated(sample: HistogramSample) -> list[tuple[str, float]]:
    """Prometheus counts what is at most a bound, those below included."""
    buckets, seen = [], 0
    for bound, count in zip((*map(str, sample.bounds), "+Inf"), sample.counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets


def configure_metrics(
    config: TelemetryConfig, resource: Mapping[str, str], collect: Collect, *, interval_s: float = EXPORT_INTERVAL_S
) -> "OtlpMetrics | None":
    """Starts exporting the snapshot over OTLP every interval, if an endpoint is set. Close what it returns.

    Raises ConfigError: the exporter is not installed.
    """
    endpoint = otlp_endpoint(config)
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415 - as above
    except ImportError as error:
        raise missing_exporter(error) from error
    exporter = OTLPMetricExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    return OtlpMetrics(exporter, make_resource(config, resource), collect, interval_s)


class OtlpMetrics:
    """The thread that exports snapshots. A collector that is down costs nothing but a line in the log."""

    def __init__(self, exporter: Any, resource: Any, collect: Collect, interval_s: float) -> None:
        self._exporter = exporter
        self._resource = resource
        self._collect = collect
        self._interval_s = interval_s
        self._start_ns = time.time_ns()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports once more and stops, in bounded time."""
        self._stop.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self._interval_s)
            try:
                self._exporter.export(self._snapshot(), timeout_millis=_EXPORT_TIMEOUT_S * 1000)
            except Exception:
                log.exception("metrics were not exported")

    def _snapshot(self) -> Any:
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - loaded by now
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415 - loaded by now

        now_ns = time.time_ns()
        metrics = [
            export.Metric(
                name=metric.name, description=metric.help, unit=metric.unit, data=self._data(export, metric, now_ns)
            )
            for metric in self._collect()
        ]
        scope = export.ScopeMetrics(scope=InstrumentationScope("multigpu"), metrics=metrics, schema_url="")
        return export.MetricsData(
            resource_metrics=[export.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")]
        )

    def _data(self, export: Any, metric: Metric, now_ns: int) -> Any:
        cumulative = export.AggregationTemporality.CUMULATIVE
        if metric.kind == "histogram":
            points = [self._histogram_point(export, sample, now_ns) for sample in metric.samples]
            return export.Histogram(data_points=points, aggregation_temporality=cumulative)
        points = [
            export.NumberDataPoint(
                attributes=dict(sample.labels),
                start_time_unix_nano=self._start_ns,
                time_unix_nano=now_ns,
                value=sample.value,
            )
            for sample in metric.samples
            if isinstance(sample, Sample)
        ]
        if metric.kind in ("counter", "updowncounter"):
            monotonic = metric.kind == "counter"
            return export.Sum(data_points=points, aggregation_temporality=cumulative, is_monotonic=monotonic)
        return export.Gauge(data_points=points)

    def _histogram_point(self, export: Any, sample: Sample | HistogramSample, now_ns: int) -> Any:
        assert isinstance(sample, HistogramSample)
        return export.HistogramDataPoint(
            attributes=dict(sample.labels),
            start_time_unix_nano=self._start_ns,
            time_unix_nano=now_ns,
            count=sum(sample.counts),
            sum=sample.total,
            bucket_counts=list(sample.counts),
            explicit_bounds=list(sample.bounds),
            # Not kept; optional in OTLP.
            min=None,
            max=None,
        )

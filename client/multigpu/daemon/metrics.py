"""Metrics: a snapshot of numbers, served to Prometheus and exported over OTLP.

There are no instruments on the hot path. A daemon counts in plain integers and offers one function that returns
metrics. It runs on another thread, when Prometheus scrapes or the OTLP export is due.

Names begin with `mgpu_`, end in their unit, and in `_total` if they only grow. Names of OpenTelemetry's conventions
(`hw.*`) are for OTLP only.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import structlog

from multigpu.config.config import ConfigError, TelemetryConfig
from multigpu.config.values import split_address
from multigpu.daemon.metrics_server import MetricsServer
from multigpu.daemon.telemetry import make_resource, missing_exporter, otlp_endpoint

EXPORT_INTERVAL_S = 10.0
_EXPORT_TIMEOUT_S = 3

log = structlog.get_logger()


class Histogram(NamedTuple):
    """Counts of observations: `counts[i]` of those up to `bounds[i]` and above the bound before; the last count of
    those above all bounds. `total`: their sum.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


class Sample(NamedTuple):
    """One value. All samples of a metric have the same labels."""

    value: float | Histogram
    labels: Mapping[str, str]


class Metric(NamedTuple):
    """A named family of samples. `unit`: for OTLP, if the name does not end in it."""

    name: str
    help: str
    samples: Sequence[Sample]
    kind: Literal["counter", "gauge", "histogram"]
    unit: str = ""


def sample(value: float | Histogram, **labels: str) -> Sample:
    """A sample with these labels."""
    return Sample(value, labels)


def metric(name: str, help: str, *samples: Sample) -> Metric:  # noqa: A002  Prometheus' word
    """A counter if the name ends in `_total`, else a gauge."""
    return Metric(name, help, samples, "counter" if name.endswith("_total") else "gauge")


Collect = Callable[[], Iterable[Metric]]


def serve_prometheus(listen: str, collect: Collect, tls: tuple[str, str, str] | None = None) -> MetricsServer:
    """Serves the snapshot at `listen` (HOST:PORT; port 0: any) in Prometheus' text format. `tls`: see MetricsServer.

    ConfigError: the address is not available.
    """
    import prometheus_client  # noqa: PLC0415 - imported only by daemons that serve metrics

    host, port = split_address(listen)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect))
    try:
        return MetricsServer(host, port, prometheus_client.make_wsgi_app(registry), tls)
    except OSError as error:
        raise ConfigError(f"metrics_listen {listen!r} is not available: {error}; choose another address") from error


class _Collector:
    """Converts a snapshot to Prometheus' types."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily, Metric  # noqa: PLC0415 - see above

        for each in self._collect():
            if each.kind == "histogram":
                keys = tuple(each.samples[0].labels) if each.samples else ()
                family: Any = HistogramMetricFamily(each.name, each.help, labels=keys)
                for histogram, labels in each.samples:
                    assert isinstance(histogram, Histogram), each.name
                    bounds = (*map(str, histogram.bounds), "+Inf")
                    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
                    family.add_metric([labels[key] for key in keys], buckets, histogram.total)
            else:
                family = Metric(each.name.removesuffix("_total"), each.help, each.kind)
                for value, labels in each.samples:
                    family.add_sample(each.name, labels, value)
            yield family


def configure_metrics(
    config: TelemetryConfig, resource: Mapping[str, str], collect: Collect, *, interval_s: float = EXPORT_INTERVAL_S
) -> "OtlpMetrics | None":
    """Starts exporting the snapshot over OTLP every interval, if an endpoint is set. The caller closes the result.

    ConfigError: the exporter is not installed.
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
    """The thread that exports snapshots. If the collector is down, it logs that."""

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
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - as above
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415 - as above

        times = {"start_time_unix_nano": self._start_ns, "time_unix_nano": time.time_ns()}
        metrics = [
            export.Metric(name=m.name, description=m.help, unit=m.unit, data=_data(export, m, times))
            for m in self._collect()
        ]
        scope = export.ScopeMetrics(scope=InstrumentationScope("multigpu"), metrics=metrics, schema_url="")
        return export.MetricsData(
            resource_metrics=[export.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")]
        )


def _data(export: Any, each: Metric, times: dict[str, int]) -> Any:
    points = [_point(export, value, times | {"attributes": dict(labels)}) for value, labels in each.samples]
    cumulative = export.AggregationTemporality.CUMULATIVE
    if each.kind == "gauge":
        return export.Gauge(data_points=points)
    if each.kind == "histogram":
        return export.Histogram(data_points=points, aggregation_temporality=cumulative)
    return export.Sum(data_points=points, aggregation_temporality=cumulative, is_monotonic=True)


def _point(export: Any, value: float | Histogram, common: dict[str, Any]) -> Any:
    if not isinstance(value, Histogram):
        return export.NumberDataPoint(value=value, **common)
    return export.HistogramDataPoint(
        count=sum(value.counts),
        sum=value.total,
        bucket_counts=list(value.counts),
        explicit_bounds=list(value.bounds),
        min=None,  # not counted
        max=None,
        **common,
    )

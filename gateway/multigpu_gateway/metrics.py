"""The gateway's metrics: requests by route and status, their durations, and open requests."""

import prometheus_client as prometheus
from prometheus_client.registry import Collector

# From the duration of a cached embedding to that of a long generated text.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self) -> None:
        self._registry = prometheus.CollectorRegistry(auto_describe=False)
        self._requests = prometheus.Counter(
            "mgpu_gateway_requests", "Requests that were answered.", ("route", "status"), registry=self._registry
        )
        self._seconds = prometheus.Histogram(
            "mgpu_gateway_request_seconds", "From a request's headers to the end of its answer.", ("route",),
            buckets=_BOUNDS_S, registry=self._registry,
        )  # fmt: skip
        self._open = prometheus.Gauge(
            "mgpu_gateway_open_requests", "Requests without a whole answer.", registry=self._registry
        )

    def register(self, collector: Collector) -> None:
        """Adds the metrics of another part of the gateway."""
        self._registry.register(collector)

    def begun(self) -> None:
        self._open.inc()

    def ended(self, route: str, status: int | str, seconds: float) -> None:
        """`status`: the HTTP status (499: the client disconnected), or the name of the gRPC status code."""
        self._open.dec()
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

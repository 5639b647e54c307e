"""The receiving end of OTLP for tests: a real gRPC service that keeps what arrives."""

from collections.abc import Iterable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Listens on a free port of 127.0.0.1 until closed."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self.metrics: list[Any] = []
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]  # generated
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]  # generated
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802 - gRPC's name
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            self.traces.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()
        self.metrics.append(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def close(self) -> None:
        self.server.stop(None).wait()

    def spans(self) -> dict[str, Any]:
        """By name."""
        return {span.name: span for _, span in self.spans_by_service()}

    def spans_by_service(self) -> list[tuple[str, Any]]:
        return [
            (attributes(resource.resource.attributes)["service.name"], span)
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def metrics_by_service(self) -> list[tuple[str, Any]]:
        """In the order of their arrival."""
        return [
            (attributes(resource.resource.attributes)["service.name"], metric)
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]


def attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in pairs}

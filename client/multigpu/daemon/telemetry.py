"""Logs and traces of every program. Metrics are in metrics.py.

Logs go to stderr, one line per event: JSON for programs, text on a terminal. Lines of other libraries are formatted
the same way. `bound_log_context(task_id=…, lease_id=…, worker_id=…)` adds ids to all lines within it.

Only sampled tasks are traced: such a task carries a W3C `traceparent`, all others an empty string. The client decides
which tasks are sampled, and the daemons follow. While a task runs, the daemons only store timestamps; they make its
spans afterwards (`span_from`), so that a task that is not sampled costs one comparison.

OpenTelemetry is imported only if tracing is configured, so that a worker without it restarts in a fraction of a second.
"""

import contextlib
import dataclasses
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.contextvars import bound_contextvars as bound_log_context

from multigpu._transport.traceparent import SAMPLED, current_traceparent, traceparent_of
from multigpu.config.config import ConfigError, TelemetryConfig

__all__ = [
    "bound_log_context",
    "configure_logging",
    "configure_tracing",
    "current_traceparent",
    "otlp_endpoint",
    "shut_down_tracing",
    "span",
    "span_from",
]

# syslog(3)'s numbers.
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
# How long an unresponsive collector may delay the end of a program.
_EXPORT_TIMEOUT_S = 3
# How long each line waits for a slow reader of the log. After a lost line, no line waits until the reader goes on.
_STALL_S = 0.5
# Linux: a pipe that is writable takes so many bytes at once.
_PIPE_BYTES = 4096
# The event that follows lost lines, once the stream takes lines again.
LINES_LOST = "log lines were lost: the stream did not take them"


def configure_logging(level: str = "info", log_format: str = "auto", *, stream: TextIO | None = None) -> None:
    """Sends the log lines of structlog and of the standard library to `stream` (default: stderr). May be called again.

    `level`: debug, info, warning or error. `log_format`: json, console, or auto: console on a terminal, else json.
    """
    stream = sys.stderr if stream is None else stream
    lossy: Any = _LossyStream(stream)
    if log_format == "auto":
        log_format = "console" if stream.isatty() else "json"
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
        structlog.processors.StackInfoRenderer(),
    ]
    if log_format == "json":
        render: Any = structlog.processors.JSONRenderer(default=str)
        render = _Prioritised(render) if _is_journal(stream) else render
        final: list[Any] = [structlog.processors.format_exc_info, render]
    else:
        plain = structlog.dev.plain_traceback
        final = [
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), timestamp_key="timestamp", exception_formatter=plain)
        ]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(lossy),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(lossy)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    logging.captureWarnings(capture=True)


class _LossyStream:
    """Drops and counts the lines that the stream does not take: logging neither fails nor stops a program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # A line may be written within another: by an object that is destroyed meanwhile.
        self._lock = threading.RLock()
        self._lost = 0
        # The last line was written in part.
        self._cut = False
        self._fd = -1
        with contextlib.suppress(OSError, ValueError):  # a stream without a file never waits
            self._fd = stream.fileno()

    def write(self, text: str) -> None:
        with self._lock:
            try:
                if self._lost:
                    event = {"event": LINES_LOST, "lines": self._lost, "level": "warning"}
                    self._write(json.dumps(event) + "\n")
                    self._lost = 0
                self._write(text)
            except (OSError, ValueError):
                self._lost += 1

    def _write(self, text: str) -> None:
        if self._fd < 0:
            self._stream.write(text)
            self._stream.flush()
            return
        if self._stream.closed:
            raise ValueError("another file may have its number now")
        data = (("\n" + text) if self._cut else text).encode("utf-8", "backslashreplace")
        until_s = time.monotonic() + (0 if self._lost else _STALL_S)
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while data:
            if not poll.poll(max(0.0, 1000 * (until_s - time.monotonic()))):
                raise TimeoutError
            # Not by the stream, whose buffer would keep what can't be written.
            data = data[os.write(self._fd, data[:_PIPE_BYTES]) :]
            self._cut = bool(data)

    def flush(self) -> None:
        """Each line is flushed when it is written."""


def _is_journal(stream: TextIO) -> bool:
    """Whether systemd reads this stream for journald: it sets JOURNAL_STREAM to the stream's device and inode."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM", "") == f"{status.st_dev}:{status.st_ino}"


class _Prioritised:
    """Begins each line with its priority, which journald takes off and stores: sd-daemon(3)."""

    def __init__(self, render: Callable[..., Any]) -> None:
        self._render = render

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        return f"<{_PRIORITIES.get(str(event.get('level')), 6)}>{self._render(logger, method, event)}"


def otlp_endpoint(config: TelemetryConfig) -> str:
    """The collector's address as a URL; empty if telemetry is off. A bare HOST:PORT means http, without TLS."""
    endpoint = config.otlp_endpoint
    return endpoint if not endpoint or "://" in endpoint else f"http://{endpoint}"


def missing_exporter(error: ImportError) -> ConfigError:
    """The error if an endpoint is set, but the exporter's package is not installed."""
    return ConfigError(
        f"telemetry.otlp_endpoint is set, but OTLP is not installed ({error}): run `pip install 'multigpu[otlp]'`, "
        "or leave the endpoint empty"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tracing:
    """The objects of OpenTelemetry that `span` and `span_from` use."""

    api: Any
    provider: Any
    tracer: Any
    propagator: Any


_tracing: _Tracing | None = None


def configure_tracing(config: TelemetryConfig, resource: Mapping[str, str]) -> bool:
    """Starts exporting spans if an endpoint is set. Returns whether one is set.

    `resource`: attributes of this process, such as `{"service.name": "mgpu-master"}`; a service_name in the config
    replaces that attribute. ConfigError: the exporter is not installed. A collector that is down or slow does not delay
    tasks: when the exporter's queue is full, spans are dropped.
    """
    global _tracing  # noqa: PLW0603  one process, one tracer, as in OpenTelemetry itself
    endpoint = otlp_endpoint(config)
    if not endpoint:
        return False
    shut_down_tracing()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise missing_exporter(error) from error
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(config.trace_sample_ratio),
        resource=make_resource(config, resource),
        shutdown_on_exit=True,
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("multigpu")
    _tracing = _Tracing(api=trace, provider=provider, tracer=tracer, propagator=TraceContextTextMapPropagator())
    return True


def make_resource(config: TelemetryConfig, resource: Mapping[str, str]) -> Any:
    """The OpenTelemetry resource of this process."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  as in configure_tracing

    name = {"service.name": config.service_name} if config.service_name else {}
    return Resource.create({**resource, **name})


def shut_down_tracing() -> None:
    """Sends the remaining spans and stops tracing, in bounded time. Called at the end of a program."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.provider.shutdown()


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A span around a block. Yields its traceparent; empty: it is not sampled.

    A span within another one is sampled if that one is; any other span is sampled at trace_sample_ratio.
    """
    if _tracing is None:
        yield current_traceparent()
        return
    with _tracing.tracer.start_as_current_span(name, attributes=attributes):
        yield current_traceparent()


def span_from(
    traceparent: str,
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, Any] | None = None,
    *,
    error: str = "",
) -> str:
    """Makes a span of a sampled task after it has ended, as a child of the span that `traceparent` names.

    Times are in nanoseconds since the Unix epoch. `error`: why the span failed. Returns the new span's traceparent, for
    its children, or the given one if tracing is off or that is not a sampled trace context.
    """
    if not traceparent or _tracing is None:
        return traceparent
    context = _tracing.propagator.extract({"traceparent": traceparent})
    parent = _tracing.api.get_current_span(context).get_span_context()
    if not parent.is_valid or not parent.trace_flags & SAMPLED:
        return traceparent
    made = _tracing.tracer.start_span(name, context=context, attributes=attributes, start_time=start_ns)
    if error:
        made.set_status(_tracing.api.StatusCode.ERROR, error)
    made.end(end_time=max(start_ns, end_ns))
    return traceparent_of(made)

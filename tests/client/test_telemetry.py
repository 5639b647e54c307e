"""Telemetry with a real OTLP service over gRPC, HTTP scrapes, and a process's stderr."""

import contextlib
import io
import itertools
import json
import logging
import os
import select
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from multigpu.cli.security import authority
from multigpu.config.config import ConfigError, TelemetryConfig
from multigpu.daemon import metrics_server, telemetry
from multigpu.daemon.metrics import (
    Histogram,
    Metric,
    OtlpMetrics,
    configure_metrics,
    metric,
    sample,
    serve_prometheus,
)

from tests.client.otlp_collector import Collector, attributes
from tests.fleet import until

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SAMPLED[:-1] + "0"

METRICS = [
    metric("mgpu_settled_total", "Settled.", sample(3, state="FAILED"), sample(4, state="OK")),
    metric("mgpu_queued_tasks", "Queued.", sample(2.5)),
    Metric("mgpu_wait_s", "Waits.", [sample(Histogram((0.1, 1.0), (5, 0, 2), 9.5))], "histogram"),
    metric("mgpu_nothing_bytes", "No sample yet."),
]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def _tracing_ends() -> Iterator[None]:
    yield
    telemetry.shut_down_tracing()


def start_tracing(collector: Collector, ratio: float = 1.0, service_name: str = "") -> None:
    config = TelemetryConfig(
        otlp_endpoint=f"127.0.0.1:{collector.port}", trace_sample_ratio=ratio, service_name=service_name
    )
    assert telemetry.configure_tracing(config, {"service.name": "mgpu-test", "service.instance.id": "w1"})


def start_metrics(endpoint: str, collect: Callable[[], list[Metric]], interval_s: float = 3600) -> OtlpMetrics:
    exporter = configure_metrics(
        TelemetryConfig(otlp_endpoint=endpoint), {"service.name": "mgpu-test"}, collect, interval_s=interval_s
    )
    assert exporter is not None
    return exporter


def test_spans_recorded_afterwards_join_the_clients_trace(collector: Collector) -> None:
    start_tracing(collector)
    with telemetry.span("client") as client:
        assert client == telemetry.current_traceparent() != ""
    queued = telemetry.span_from(client, "queued", 1_000, 2_000, {"mgpu.task_id": 7})
    telemetry.span_from(queued, "run", 2_000, 5_000, error="ValueError: no")
    telemetry.shut_down_tracing()

    spans = collector.spans()
    assert set(spans) == {"client", "queued", "run"}
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["queued"].parent_span_id == spans["client"].span_id
    assert spans["run"].parent_span_id == spans["queued"].span_id
    assert (spans["run"].start_time_unix_nano, spans["run"].end_time_unix_nano) == (2_000, 5_000)
    assert attributes(spans["queued"].attributes) == {"mgpu.task_id": 7}
    assert (spans["run"].status.code, spans["run"].status.message) == (2, "ValueError: no")
    resource = attributes(collector.traces[0].resource_spans[0].resource.attributes)
    assert (resource["service.name"], resource["service.instance.id"]) == ("mgpu-test", "w1")


@pytest.mark.parametrize(
    "traceparent", ["", NOT_SAMPLED, "nonsense", "ff" + SAMPLED[2:], "00-" + "0" * 32 + SAMPLED[35:], SAMPLED + "x"]
)
def test_an_unsampled_trace_makes_no_span(collector: Collector, traceparent: str) -> None:
    start_tracing(collector)
    assert telemetry.span_from(traceparent, "one", 1, 2) == traceparent
    telemetry.shut_down_tracing()
    assert collector.traces == []


def test_the_trace_id_stays_and_the_daemons_follow_the_clients_decision(collector: Collector) -> None:
    start_tracing(collector, ratio=0.0)
    with telemetry.span("not sampled") as traceparent:
        assert traceparent == ""
        assert telemetry.current_traceparent() == ""
    made = telemetry.span_from(SAMPLED, "sampled elsewhere", 1, 2)
    assert made.split("-")[1] == SAMPLED.split("-")[1]
    assert made != SAMPLED
    telemetry.shut_down_tracing()
    assert set(collector.spans()) == {"sampled elsewhere"}


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys\n"
        "from multigpu.daemon import metrics, telemetry\n"
        "from multigpu.config.config import TelemetryConfig\n"
        "assert telemetry.configure_tracing(TelemetryConfig(), {}) is False\n"
        "assert metrics.configure_metrics(TelemetryConfig(), {}, list) is None\n"
        "with telemetry.span('x') as traceparent: assert traceparent == ''\n"
        f"assert telemetry.span_from({SAMPLED!r}, 'x', 1, 2) == {SAMPLED!r}\n"
        "loaded = [name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus_client', 'grpc'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_a_missing_exporter_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.metric_exporter", None)
    config = TelemetryConfig(otlp_endpoint="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"pip install 'multigpu\[otlp\]'"):
        telemetry.configure_tracing(config, {})
    with pytest.raises(ConfigError, match=r"pip install 'multigpu\[otlp\]'"):
        configure_metrics(config, {}, list)


def test_an_unreachable_collector_delays_the_end_by_seconds_at_most() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}", trace_sample_ratio=1.0)
    telemetry.configure_tracing(config, {})
    exporter = start_metrics(config.otlp_endpoint, lambda: METRICS)
    telemetry.span_from(SAMPLED, "lost", 1, 2)
    began = time.monotonic()
    telemetry.shut_down_tracing()
    exporter.close()
    assert time.monotonic() - began < 15


def test_metrics_reach_a_collector(collector: Collector) -> None:
    exporter = start_metrics(f"127.0.0.1:{collector.port}", lambda: METRICS)
    exporter.close()
    (request,) = collector.metrics
    (resource,) = request.resource_metrics
    assert attributes(resource.resource.attributes)["service.name"] == "mgpu-test"
    sent = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert sent["mgpu_settled_total"].sum.is_monotonic
    assert [point.as_double or point.as_int for point in sent["mgpu_settled_total"].sum.data_points] == [3, 4]
    assert attributes(sent["mgpu_settled_total"].sum.data_points[0].attributes) == {"state": "FAILED"}
    assert sent["mgpu_queued_tasks"].gauge.data_points[0].as_double == 2.5
    (point,) = sent["mgpu_wait_s"].histogram.data_points
    assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([0.1, 1.0], [5, 0, 2])
    assert (point.count, point.sum, point.HasField("min")) == (7, 9.5, False)


def test_metrics_are_exported_after_a_failed_snapshot(collector: Collector) -> None:
    calls = itertools.count()

    def collect() -> list[Metric]:
        assert next(calls) > 0, "not ready"
        return METRICS

    exporter = start_metrics(f"127.0.0.1:{collector.port}", collect, interval_s=0.05)
    deadline = time.monotonic() + 20
    while len(collector.metrics) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    exporter.close()
    assert len(collector.metrics) >= 2


def test_prometheus_scrapes_the_current_snapshot() -> None:
    queued = [1.0]
    server = serve_prometheus(
        "127.0.0.1:0",
        lambda: [*METRICS[:1], metric("mgpu_queued_tasks", "Queued.", sample(queued[0])), *METRICS[2:]],
    )
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        first = urllib.request.urlopen(url, timeout=60).read().decode().splitlines()
        queued[0] = 5.0
        second = urllib.request.urlopen(url, timeout=60).read().decode().splitlines()
    finally:
        server.close()
    assert "mgpu_queued_tasks 1.0" in first
    assert "mgpu_queued_tasks 5.0" in second
    assert 'mgpu_settled_total{state="FAILED"} 3.0' in first
    assert 'mgpu_wait_s_bucket{le="0.1"} 5.0' in first
    assert 'mgpu_wait_s_bucket{le="+Inf"} 7.0' in first
    assert "mgpu_wait_s_sum 9.5" in first
    assert "# TYPE mgpu_nothing_bytes gauge" in first
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # The port is free again.


def test_a_metrics_address_in_use_is_a_configuration_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"metrics_listen.*in use.*another address"),
    ):
        serve_prometheus(f"127.0.0.1:{taken.getsockname()[1]}", list)


def test_silent_metrics_connections_are_limited_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1)
    server = serve_prometheus("127.0.0.1:0", lambda: METRICS)
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        with contextlib.ExitStack() as stack:
            threads = threading.active_count()
            for _ in range(2 * metrics_server.CONNECTIONS_MAX):
                silent = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            assert threading.active_count() <= threads + metrics_server.CONNECTIONS_MAX
            assert silent.recv(1) == b"", "it is closed: there are too many"
            until(lambda: threading.active_count() <= threads, what="the end of the silent ones")
            assert b"mgpu_settled_total" in urllib.request.urlopen(url, timeout=60).read()
    finally:
        server.close()


def test_connections_for_which_there_is_no_thread_do_not_count_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute in which the host could start no thread, the endpoint closed every connection."""

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    server = serve_prometheus("127.0.0.1:0", lambda: METRICS)
    try:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(socketserver.ThreadingMixIn, "process_request", no_thread)
            for _ in range(metrics_server.CONNECTIONS_MAX):
                with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                    assert connection.recv(1) == b""
        url = f"http://127.0.0.1:{server.port}/metrics"
        assert b"mgpu_settled_total" in urllib.request.urlopen(url, timeout=60).read()
    finally:
        server.close()


def test_a_new_certificate_of_the_metrics_does_not_change_the_context_in_use(tmp_path: Path) -> None:
    """Another thread may make a connection from it at the same time."""
    authority.init(tmp_path)
    for name in ("old", "new"):
        authority.issue(tmp_path, "master", name, ["localhost"])
    authority.issue(tmp_path, "client", "client", [])
    old, new = ((str(tmp_path / f"{name}.crt"), str(tmp_path / f"{name}.key"), str(tmp_path / "ca.crt"))
                for name in ("old", "new"))  # fmt: skip
    shown = ssl.create_default_context(cafile=old[2])
    shown.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")

    def connection() -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        return shown.wrap_socket(plain, server_hostname="localhost")

    def serial(tls: ssl.SSLSocket) -> int:
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"").serial_number

    server = serve_prometheus("127.0.0.1:0", lambda: METRICS, old)
    try:
        context = server._server.context
        with connection() as before:
            with pytest.raises(ssl.SSLError):
                server.reload_certificate(new[0], old[1], new[2])
            assert server._server.context is context, "the pair is invalid"
            server.reload_certificate(*new)
            assert server._server.context is not context
            with connection() as after:
                assert serial(before) == authority.read(Path(old[0])).serial_number
                assert serial(after) == authority.read(Path(new[0])).serial_number
            before.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert before.makefile("rb").read().startswith(b"HTTP/1.0 200 ")
    finally:
        server.close()


def run_logging(log_format: str, body: str) -> list[str]:
    code = (
        "import logging, structlog\n"
        "from multigpu.daemon import telemetry\n"
        f"telemetry.configure_logging('info', {log_format!r})\n{body}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=30, capture_output=True, text=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_logs_are_json_lines_off_a_terminal_and_carry_the_ids_around_them() -> None:
    lines = run_logging(
        "auto",
        "log = structlog.get_logger()\n"
        "with telemetry.bound_log_context(task_id=7, worker_id='w1'):\n"
        "    log.info('lease lost', lease_id=9)\n"
        "    logging.getLogger('grpc').warning('from a %s', 'library')\n"
        "log.debug('not shown')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.exception('failed', path=__import__('pathlib').Path('/x'))\n",
    )
    first, library, failed = map(json.loads, lines)
    assert first.pop("timestamp").endswith("Z")
    assert first == {"event": "lease lost", "level": "info", "task_id": 7, "worker_id": "w1", "lease_id": 9}
    assert (library["event"], library["logger"], library["task_id"]) == ("from a library", "grpc", 7)
    assert "ZeroDivisionError" in failed["exception"]
    assert failed["path"] == "/x"


LOGGING = """
import logging, sys, structlog
from multigpu.daemon import telemetry
telemetry.configure_logging("info", "json")
log = structlog.get_logger()
"""


def test_a_log_line_that_cannot_be_written_is_dropped_and_raises_nothing() -> None:
    code = LOGGING + "log.warning('lost')\nlogging.getLogger('x').warning('lost too')\nprint('goes on', flush=True)"
    with open("/dev/full", "w") as full:  # noqa: PTH123  each write fails: no space left on device
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, timeout=30, check=False
        )
    assert done.stdout == b"goes on\n"


def test_a_reader_that_stands_still_does_not_stop_the_program_and_is_sent_how_many_lines_it_missed() -> None:
    code = LOGGING + (
        "for n in range(100): log.info('x' * 10_000, n=n)\n"  # more than a pipe holds
        "print('goes on', flush=True)\n"
        "sys.stdin.readline()\n"
        "log.info('the last')\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], 30)
            assert ready, "it waits for the reader of its log"
            assert process.stdout.readline() == b"goes on\n"
            got = b""
            while select.select([process.stderr], [], [], 0)[0]:
                got += os.read(process.stderr.fileno(), 1 << 16)
            process.stdin.write(b"\n")
            process.stdin.flush()
            lines = (got + process.stderr.read()).splitlines()
        finally:
            process.kill()
    whole = [json.loads(line) for line in lines if line.endswith(b"}")]
    lost, last = whole[-2:]
    assert (lost["event"], last["event"]) == (telemetry.LINES_LOST, "the last")
    assert lost["lines"] == 100 - sum("n" in line for line in whole)


def test_logs_are_text_on_the_console() -> None:
    (line,) = run_logging("console", "structlog.get_logger().info('ready', workers=2)")
    assert "ready" in line
    assert "workers=2" in line
    assert "\x1b" not in line


def test_a_stream_without_a_file_has_each_line_at_once() -> None:
    content = io.BytesIO()
    telemetry.configure_logging("info", "json", stream=io.TextIOWrapper(content, encoding="utf-8"))
    logging.getLogger("x").info("there")
    assert b"there" in content.getvalue()


def test_configuring_logging_twice_writes_each_line_once() -> None:
    (line,) = run_logging("json", "telemetry.configure_logging('info', 'json')\nlogging.getLogger('x').info('once')")
    assert json.loads(line)["event"] == "once"


def test_a_line_that_is_written_within_another_does_not_wait_for_itself(tmp_path: Path) -> None:
    """An object that the garbage collector destroys meanwhile may log, on the same thread."""
    with (tmp_path / "log").open("w") as file:
        lossy = telemetry._LossyStream(file)
        with lossy._lock:
            lossy.write("within\n")
    assert (tmp_path / "log").read_text() == "within\n"


FULL_FILE = """
import resource, signal, sys
from multigpu.daemon.telemetry import _LossyStream

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
lossy = _LossyStream(sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
for n in range(5):
    lossy.write(f"line {n}\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
lossy.write("again\\n")
"""


def test_a_line_that_did_not_fit_is_not_written_later(tmp_path: Path) -> None:
    """Python's buffer kept it, and the log had lines that it had also counted as lost."""
    path = tmp_path / "log"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-c", FULL_FILE], stderr=file, check=True)
    first, cut, lost, again = path.read_text().splitlines()
    assert (first, cut, json.loads(lost)["lines"], again) == ("line 0", "lin", 4, "again")

"""Traces from the client's submit to the result; metrics over Prometheus and OTLP."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu.config.config import TelemetryConfig
from multigpu.daemon import telemetry
from multigpu.v1 import admin_service_pb2 as admin_pb

from tests.client.otlp_collector import Collector, attributes
from tests.fleet import Fleet, until
from tests.integration.streams import scrape


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(collector: Collector, tmp_path: Path) -> Iterator[Fleet]:
    env = {"MGPU_TELEMETRY_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"}
    with Fleet(tmp_path, workers=1, env=env, master_flags=["--metrics-listen", "127.0.0.1:0"]) as fleet:
        yield fleet


@pytest.fixture
def tracing(collector: Collector) -> Iterator[None]:
    config = TelemetryConfig(otlp_endpoint=f"127.0.0.1:{collector.port}", trace_sample_ratio=1.0)
    telemetry.configure_tracing(config, {"service.name": "test-client"})
    yield
    telemetry.shut_down_tracing()


@pytest.mark.slow
def test_one_trace_from_the_submit_to_the_result(collector: Collector, traced: Fleet, tracing: None) -> None:
    with traced.client() as client:
        client.run("echo", b"not sampled")
        with telemetry.span("caller"):
            client.run("echo", b"sampled")
            handle = client.submit("sleep", b"0.01")
        handle.outcome(120)
    telemetry.shut_down_tracing()
    for worker in traced.workers.values():
        worker.stop()
    assert traced.master.stop() == 0

    spans = until(lambda: collected(collector), what="spans of all three")
    assert len({span.trace_id for _, span in spans}) == 1
    (caller,) = [span for _, span in spans if span.name == "caller"]
    others = [span for _, span in spans if span is not caller]
    assert {span.parent_span_id for span in others} <= {span.span_id for _, span in spans}
    by_name = {name: [span for _, span in spans if span.name == name] for name in {span.name for _, span in spans}}
    # Two sampled tasks; the third left no span.
    assert {name: len(found) for name, found in by_name.items()} == {
        "caller": 1,
        "multigpu.queue": 2,
        "multigpu.attempt": 2,
        "multigpu.run": 2,
    }
    for span in others:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.start_time_unix_nano >= caller.start_time_unix_nano - 1_000_000


def collected(collector: Collector) -> list[tuple[str, Any]]:
    spans = collector.spans_by_service()
    return spans if {service for service, _ in spans} == {"test-client", "mgpu-master", "mgpu-worker"} else []


@pytest.mark.slow
def test_metrics_over_prometheus_and_otlp(collector: Collector, traced: Fleet) -> None:
    with traced.client() as client:
        assert list(client.map("echo", [b"x"] * 5)) == [b"x"] * 5

    counted = 'mgpu_tasks_settled_total{outcome="succeeded"} 5.0'
    until(lambda: counted in scrape(traced), what="five tasks in a scrape")
    text = scrape(traced)
    for measure in ("queue", "run", "duration"):
        assert f'mgpu_task_{measure}_seconds_count{{kind="echo"}} 5.0' in text
        assert f'mgpu_task_{measure}_seconds_bucket{{kind="echo",le="+Inf"}} 5.0' in text
    assert 'mgpu_workers_held{reason="cordoned"} 0.0' in text
    assert "mgpu_breaker_tripped 0.0" in text
    traced.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w0"), timeout=20)
    until(lambda: 'mgpu_workers_held{reason="cordoned"} 1.0' in scrape(traced), what="the cordoned worker in a scrape")
    assert traced.master.stop() == 0

    last = [metric for _, metric in collector.metrics_by_service() if metric.name == "mgpu_tasks_settled_total"][-1]
    values = {
        attributes(point.attributes)["outcome"]: point.as_double or point.as_int for point in last.sum.data_points
    }
    assert values["succeeded"] == 5
    assert {service for service, _ in collector.metrics_by_service()} == {"mgpu-master"}


@pytest.mark.slow
def test_a_submitting_command_begins_a_trace(collector: Collector, traced: Fleet) -> None:
    env = {**os.environ, "MGPU_TELEMETRY_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"}
    env |= {"MGPU_TELEMETRY_TRACE_SAMPLE_RATIO": "1", "MGPU_MASTER": traced.address}
    argv = [sys.executable, "-m", "multigpu.cli", "submit", "--kind", "echo", "--payload", "x", "--wait"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout == "x"
    assert (traced.workers["w0"].stop(), traced.master.stop()) == (0, 0)

    def services() -> bool:
        return {service for service, _ in collector.spans_by_service()} == {"mgpuctl", "mgpu-master", "mgpu-worker"}

    until(services, what="spans of all three")
    (began,) = [span for service, span in collector.spans_by_service() if service == "mgpuctl"]
    assert began.name == "mgpuctl submit"
    assert {span.trace_id for _, span in collector.spans_by_service()} == {began.trace_id}


def test_the_age_of_a_queue_grows_until_nothing_waits_in_it(tmp_path: Path) -> None:
    def age_s() -> float:
        """0.0: no queue has one."""
        found = re.search(r'^mgpu_queue_oldest_age_seconds\{queue="default"\} (\S+)$', scrape(fleet), re.MULTILINE)
        return float(found[1]) if found else 0.0

    with (
        Fleet(tmp_path, workers=0, master_flags=["--metrics-listen", "127.0.0.1:0"]) as fleet,
        fleet.client() as client,
    ):
        handle = client.submit("echo", b"x", wait_for_worker=True)
        first_s = until(age_s, what="the age of the task")
        time.sleep(1)
        client.submit("echo", b"y", wait_for_worker=True)
        until(lambda: age_s() >= first_s + 1, what="the same task, a second older")
        fleet.start_worker("w")
        handle.result(timeout=60)
        until(lambda: not age_s(), what="an empty queue")


def test_the_port_of_the_metrics_is_logged(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=0, master_flags=["--metrics-listen", "127.0.0.1:0"]) as fleet:
        assert "mgpu_tasks_submitted_total" in scrape(fleet)

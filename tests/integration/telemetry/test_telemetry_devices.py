"""A simulated device's values in AdminService, mgpuctl, Prometheus, OTLP and the stats file; missing ones in none."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.client.otlp_collector import Collector, attributes
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.integration.streams import scrape

# Values of the simulated cuda:1, by fields of the protocol.
TOLD = {
    "memory_used_bytes": 9 << 30,
    "utilization": 0.63,
    "memory_utilization": 0.21,
    "temperature_celsius": 71.0,
    "power_watts": 412.5,
    "power_limit_watts": 650.0,
    "sm_clock_hertz": 1_755e6,
    "memory_clock_hertz": 3_201e6,
    "energy_joules": 123_456.789,
    "ecc_corrected": 7,
    "ecc_uncorrected": 0,
    "pcie_generation": 4,
    "pcie_width": 8,
    "pcie_sent_bytes": 2048 * 1024,
    "pcie_received_bytes": 512 * 1024,
    "nvlinks_active": 5,
}
THROTTLE = ("sw_power_cap", "sw_thermal_slowdown")


def set_sensors(gpus: SimulatedGpus) -> None:
    """Sets the values of TOLD in the simulated driver, in its units."""
    gpus.process(1, os.getpid(), 5 << 30, mps=True)
    gpus.use_memory(1, 4 << 30)
    gpus.use(1, 0.63, 0.21)
    gpus.heat(1, 71)
    gpus.power(1, 412.5, 650.0)
    gpus.clocks(1, 1755, 3201)
    gpus.throttle(1, 0x24)
    gpus.set_energy(1, 123_456.789)
    gpus.pcie(1, generation=4, width=8, sent_kib=2048, received_kib=512)
    gpus.ecc(1, corrected=7)
    gpus.remap(1, correctable=2, uncorrectable=1, pending=True, failed=False)
    for link in range(18):
        gpus.nvlink(1, link, up=link < 5, remote=0)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def stats_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stats") / "stats.jsonl"


@pytest.fixture(scope="module")
def fleet(
    gpus: SimulatedGpus, collector: Collector, stats_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Worker `gpu` on the simulated cuda:1, worker `cpu` on the CPU."""
    set_sensors(gpus)
    env = {**gpus.env(), "MGPU_TELEMETRY_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"}
    master_flags = ["--metrics-listen", "127.0.0.1:0"]
    stats_flags = ["--stats-file", str(stats_path), "--stats-interval-s", "0.2"]
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, workers=0, env=env, master_flags=master_flags, worker_flags=stats_flags) as fleet:
        fleet.start_worker("gpu", "--device", "cuda:1")
        fleet.start_worker("cpu")
        fleet.wait_for_workers()
        until(lambda: fleet.worker("gpu").telemetry.HasField("temperature_celsius"), what="the first sample")
        yield fleet
        assert not fleet.faults()


def samples(fleet: Fleet, worker_id: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples of a worker's device, by name, then by the remaining labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(scrape(fleet)):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("worker_id", "") == worker_id and labels.pop("device_id", ""):
                found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def last_line(path: Path, worker_id: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return next(line for line in reversed(lines) if line["worker_id"] == worker_id)


def test_values_in_admin_service(fleet: Fleet, gpus: SimulatedGpus) -> None:
    worker = fleet.worker("gpu")
    device, telemetry = worker.device, worker.telemetry
    assert (device.device_id, device.name) == (gpus.uuid(1), "cuda:1")
    assert device.product == "Simulated H200"
    assert device.simulated
    assert [(peer.device_id, peer.nvlinks) for peer in device.peers] == [(gpus.uuid(0), 5)]
    for field, value in TOLD.items():
        assert telemetry.HasField(field), field
        assert getattr(telemetry, field) == pytest.approx(value), field
    assert tuple(telemetry.throttle_reasons) == THROTTLE
    rows = telemetry.remapped_rows
    assert (rows.correctable, rows.uncorrectable, rows.pending, rows.failed) == (2, 1, True, False)
    (process,) = telemetry.processes
    assert (process.pid, process.memory_used_bytes, process.mps_client) == (os.getpid(), 5 << 30, True)


def test_values_in_mgpuctl(fleet: Fleet, gpus: SimulatedGpus) -> None:
    (worker,) = [w for w in json.loads(mgpuctl(fleet, "gpus", "--json")) if w["worker_id"] == "gpu"]
    assert worker["device"]["device_id"] == gpus.uuid(1)
    for field, value in TOLD.items():
        assert float(worker["telemetry"][field]) == pytest.approx(value), field


@pytest.mark.slow
def test_values_in_prometheus(fleet: Fleet) -> None:
    names = {
        "utilization": "utilization_ratio",
        "memory_utilization": "memory_utilization_ratio",
        "energy_joules": "energy_joules_total",
        "pcie_width": "pcie_lanes",
        "pcie_sent_bytes": "pcie_sent_bytes_per_second",
        "pcie_received_bytes": "pcie_received_bytes_per_second",
    }
    expected = {f"mgpu_device_{names.get(field, field)}": value for field, value in TOLD.items() if field[:3] != "ecc"}

    def complete() -> dict[str, dict[tuple[tuple[str, str], ...], float]] | None:
        found = samples(fleet, "gpu")
        return found if expected.keys() <= found.keys() else None

    found = until(complete, what="a scrape with all values of the device")
    for name, value in expected.items():
        assert found[name][()] == pytest.approx(value), name
    assert found["mgpu_device_ecc_errors_total"] == {(("severity", "corrected"),): 7, (("severity", "uncorrected"),): 0}
    assert found["mgpu_device_remapped_rows"] == {(("severity", "corrected"),): 2, (("severity", "uncorrected"),): 1}
    assert found["mgpu_device_row_remap_pending"] == {(): 1}
    assert found["mgpu_device_row_remap_failed"] == {(): 0}
    assert found["mgpu_device_throttled"] == {(("reason", reason),): 1 for reason in THROTTLE}
    assert found["mgpu_device_processes"] == {(("mps", "true"),): 1, (("mps", "false"),): 0}
    (info,) = found["mgpu_device_info"]
    assert (dict(info)["product"], dict(info)["simulated"]) == ("Simulated H200", "true")
    # A CPU has no samples of values that it does not report.
    total = "mgpu_device_memory_total_bytes"
    cpu = until(lambda: found if total in (found := samples(fleet, "cpu")) else None, what="a scrape with the CPU")
    assert cpu[total][()] == fleet.worker("cpu").telemetry.memory_total_bytes
    assert "mgpu_device_temperature_celsius" not in cpu
    assert "mgpu_device_nvlinks_active" not in cpu


@pytest.mark.slow
def test_promtool_accepts_the_metrics(fleet: Fleet) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    until(lambda: "mgpu_device_throttled{" in scrape(fleet), what="a full scrape")
    text = scrape(fleet)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_values_in_the_stats_file(fleet: Fleet, gpus: SimulatedGpus, stats_path: Path) -> None:
    until(lambda: stats_path.exists() and '"gpu"' in (t := stats_path.read_text()) and '"cpu"' in t, what="two lines")
    line = last_line(stats_path, "gpu")
    assert line["device"]["device_id"] == gpus.uuid(1)
    for field, value in TOLD.items():
        assert line["telemetry"][field] == pytest.approx(value), field
    assert tuple(line["telemetry"]["throttle_reasons"]) == THROTTLE
    (process,) = line["telemetry"]["processes"]
    assert process == {"pid": os.getpid(), "memory_used_bytes": 5 << 30, "mps_client": True, "idle": False}
    assert abs(datetime.now(UTC) - datetime.fromisoformat(line["telemetry"]["sample_time"])).total_seconds() < 60
    assert set(last_line(stats_path, "cpu")["telemetry"]) <= {
        "sample_time", "memory_total_bytes", "memory_used_bytes", "utilization", "energy_joules", "power_watts"
    }  # fmt: skip


def test_values_in_otlp(fleet: Fleet, gpus: SimulatedGpus, collector: Collector) -> None:
    def arrived() -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        for _, metric in collector.metrics_by_service():
            for point in (metric.gauge if metric.HasField("gauge") else metric.sum).data_points:
                if attributes(point.attributes).get("device_id") == gpus.uuid(1):
                    found[metric.name] = point.as_double or point.as_int
        return found if "mgpu_device_temperature_celsius" in found else None

    values = until(arrived, 30.0, "an export with the device's temperature")
    assert values["mgpu_device_memory_used_bytes"] == 9 << 30
    assert values["mgpu_device_temperature_celsius"] == 71.0
    assert values["mgpu_device_energy_joules_total"] == pytest.approx(123_456.789)


def test_heartbeats_continue_without_an_answer_of_the_driver(fleet: Fleet, gpus: SimulatedGpus) -> None:
    gpus.hang(1)
    try:
        before = until(lambda: _quiet(fleet), what="a sample that grows old")
        sampled, beat_ns = before.telemetry.sample_time.ToNanoseconds(), before.last_heartbeat_time.ToNanoseconds()
        until(lambda: fleet.worker("gpu").last_heartbeat_time.ToNanoseconds() > beat_ns + 2e9, what="heartbeats")
        now = fleet.worker("gpu")
        assert (now.telemetry.sample_time.ToNanoseconds(), now.session_id) == (sampled, before.session_id)
        assert now.telemetry.temperature_celsius == 71.0
    finally:
        gpus.answer_(1)
    until(lambda: fleet.worker("gpu").telemetry.sample_time.ToNanoseconds() > sampled, what="a new sample")


def _quiet(fleet: Fleet) -> Any:
    """The worker, once its last sample is one second older than its last heartbeat."""
    worker = fleet.worker("gpu")
    age_ns = worker.last_heartbeat_time.ToNanoseconds() - worker.telemetry.sample_time.ToNanoseconds()
    return worker if age_ns > 10**9 else None


@pytest.mark.slow
def test_a_lost_device_has_no_values(fleet: Fleet, gpus: SimulatedGpus) -> None:
    def telemetry() -> Any:
        return fleet.worker("gpu").telemetry

    gpus.lose(1)
    try:
        until(lambda: not telemetry().HasField("temperature_celsius"), what="telemetry of a lost device")
        assert {field.name for field, _ in telemetry().ListFields()} == {"sample_time"}
    finally:
        gpus.return_(1)
    until(lambda: telemetry().HasField("temperature_celsius"), what="telemetry of a device that is back")


@pytest.mark.slow
def test_a_lost_workers_device_has_no_values(gpus: SimulatedGpus, tmp_path: Path) -> None:
    gpus.power(0, 300.0)
    flags = ["--metrics-listen", "127.0.0.1:0"]
    with Fleet(tmp_path, workers=0, env=gpus.env(), master_flags=flags) as fleet:
        worker = fleet.start_worker("gpu", "--device", "cuda:0")
        fleet.wait_for_workers()
        until(lambda: "mgpu_device_power_watts" in samples(fleet, "gpu"), what="a sample")
        states = {state: value for ((_, state),), value in samples(fleet, "gpu")["mgpu_device_health"].items()}
        assert states == {"healthy": 1, "degraded": 0, "sick": 0, "recovering": 0, "lost": 0}
        worker.kill()
        until(lambda: not fleet.worker("gpu").session_id, what="the loss")
        until(lambda: "mgpu_device_power_watts" not in samples(fleet, "gpu"), what="a snapshot")
        found = {name: of for name, of in samples(fleet, "gpu").items() if name.startswith("mgpu_device_")}
        assert found == {"mgpu_device_health": {(("state", "lost"),): 1}}
        lost = fleet.worker("gpu")
        assert not lost.HasField("health") and not lost.HasField("telemetry")
        assert " W" not in mgpuctl(fleet, "gpus").splitlines()[-1]
        _, row = mgpuctl(fleet, "workers").splitlines()
        assert row.split().count("lost") == 2, "its state and its health"


def mgpuctl(fleet: Fleet, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "multigpu.cli", *argv, "--master", fleet.address],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout

"""`mgpuctl energy check`, `info` and `recommend` on a simulated driver, which the real pynvml reads."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu import _extras
from multigpu.cli import cli
from multigpu.cli.energy import devices

from tests.fakes.gpus import SimulatedGpus

GIB = 1 << 30
MIB = 1 << 20
FOUR = """
metrics: {country_iso_code: USA}
backend: {type: pytorch, device_ids: [0, 1, 2, 3], max_memory: {0: 20GB, 1: 20GB, 2: 20GB, 3: 20GB}}
"""

Run = Callable[..., Result]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    gpus = SimulatedGpus(tmp_path / "gpus", n=4)
    for name, value in gpus.env().items():
        monkeypatch.setenv(name, value)
    return gpus


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `mgpuctl energy`; `config` is the text of the file that it is given."""

    def run(*args: str, config: str | None = None) -> Result:
        path = tmp_path / "config.yaml"
        if config is not None:
            path.write_text(config)
        return CliRunner().invoke(cli, ["energy", *args, *([] if config is None else [str(path)])])

    return run


def test_check_prints_how_available_gpus_are_doing(gpus: SimulatedGpus, run: Run) -> None:
    gpus.heat(1, 71)
    gpus.use(1, 0.85)
    gpus.power(1, 250.0)
    gpus.process(1, os.getpid(), 15 * GIB)
    found = run("check", config=FOUR)
    assert found.exit_code == 0, found.output
    row = next(line for line in found.stdout.splitlines() if line.startswith("cuda:1"))
    for cell in ("Simulated H200", "15.0 GiB of 140 GiB", "85%", "71°C", "250 W", f"{os.getpid()} (15.0 GiB)"):
        assert cell in row
    assert found.stdout.count("cuda:") == 4
    assert "cpu: " in found.stdout
    assert "metrics.country_iso_code is not followed: " in found.stderr


def test_check_names_each_unavailable_gpu(gpus: SimulatedGpus, run: Run) -> None:
    gpus.lose(0)
    gpus.mig(1, 2)
    gpus.process(2, os.getpid(), 130 * GIB)
    gpus.gpu(3).compute_mode = 2
    found = run("check", config=FOUR.replace("3]", "3, 7]"))
    assert found.exit_code == 1
    lines = [line for line in found.stdout.splitlines() if "is unavailable" in line]
    assert len(lines) == 5
    assert "cuda:0 is unavailable: " in lines[0] and "lost" in lines[0]
    assert "cuda:1 is unavailable: " in lines[1] and "MIG mode" in lines[1]
    assert "max_memory is 20.0 GB, and 139.6 GB of 150.8 GB are in use" in lines[2] and str(os.getpid()) in lines[2]
    assert "cuda:3 is unavailable: its compute mode is prohibited; run nvidia-smi -i 3 -c DEFAULT" in lines[3]
    assert "there is no cuda:7 here (there are 4 NVIDIA devices" in lines[4]


def test_check_in_the_earlier_systems_shape(gpus: SimulatedGpus, run: Run) -> None:
    gpus.lose(2)
    gpus.fail("nvmlDeviceGetPowerUsage", 1)
    gpus.use_memory(0, 1000 * MIB)
    found = run("check", "--json", config=FOUR)
    assert found.exit_code == 1
    report: dict[str, Any] = json.loads(found.stdout)
    assert report["requested_gpus"] == [0, 1, 2, 3]
    assert (report["available_gpus"], report["unavailable_gpus"]) == ([0, 1, 3], [2])
    assert report["all_available"] is False
    assert [*report["errors"]] == ["2"]
    assert [*report["gpu_stats"]] == ["gpu_0", "gpu_1", "gpu_3"]
    assert report["gpu_stats"]["gpu_0"] == {
        "name": "Simulated H200",
        "utilization_percent": 0.0,
        "memory_used_mb": 1000.0,
        "memory_total_mb": 143771.0,
        "memory_percent": pytest.approx(100 * 1000 / 143771),
        "temperature_c": 30.0,
        "power_draw_w": 75.0,
        "processes": [],
    }
    assert report["gpu_stats"]["gpu_1"]["power_draw_w"] is None
    assert "metrics.country_iso_code" in report["unsupported"]
    gpus.return_(2)
    assert run("check", "--json", config=FOUR).exit_code == 0


def test_check_of_a_benchmark_on_the_processor(gpus: SimulatedGpus, run: Run) -> None:
    gpus.lose(0)
    found = run("check", config="backend: {type: pytorch, device: cpu}")
    assert found.exit_code == 0
    assert "cuda" not in found.stdout
    assert found.stdout.startswith("cpu: ")


def test_check_of_a_wrong_configuration(run: Run) -> None:
    found = run("check", config="backend: {devic_map: auto}")
    assert found.exit_code == 2
    assert "config.yaml: backend: unknown key: devic_map; did you mean device_map?" in found.stderr
    assert run("check", "none.yaml").exit_code == 2


def test_info(gpus: SimulatedGpus, run: Run) -> None:
    assert run("info").stdout.count("Simulated H200") == 4
    two = run("info", "--devices", "3, 1", "--json")
    assert json.loads(two.stdout)["requested_gpus"] == [3, 1]
    assert run("info", "--devices", "1,9").exit_code == 1
    assert run("info", "--devices", "cuda:1").exit_code == 2


def test_a_recommended_configuration_passes_its_check(gpus: SimulatedGpus, run: Run) -> None:
    gpus.lose(2)
    found = run("recommend")
    assert found.exit_code == 0
    # 90 % of 143771 MiB, and of what is left out only the reason.
    assert "max_memory: {0: 135GB, 1: 135GB, 3: 135GB}" in found.stdout
    assert "device_ids: [0, 1, 3]" in found.stdout and "device_map: auto" in found.stdout
    assert "left out: cuda:2: " in found.stderr
    assert run("check", config=found.stdout).exit_code == 0
    for index in range(4):
        gpus.lose(index)
    none = run("recommend")
    assert none.exit_code == 1
    assert "no GPU is available: cuda:0 is there, but can't be used" in none.stderr


def test_a_host_without_gpus(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SimulatedGpus(tmp_path / "none", n=0).env().items():
        monkeypatch.setenv(name, value)
    for command in ("info", "recommend"):
        found = run(command)
        assert found.exit_code == 1
        assert "there is no NVIDIA GPU here" in found.stderr
    assert "there is no cuda:0 here (no NVIDIA device: " in run("check", config="").stdout


def test_a_driver_that_does_not_answer(gpus: SimulatedGpus, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TIMEOUT_S", 1.0)
    gpus.hang(1)
    found = run("info")
    assert found.exit_code == 1
    assert "did not answer within 1 s" in found.stderr


def test_without_the_extra_of_workers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_extras.MODULES, "worker", ("click", "no_such_module"))
    found = run("info")
    assert found.exit_code == 1
    assert "mgpuctl energy: not installed: no_such_module; run `pip install 'multigpu[worker]'`" in str(found.exception)

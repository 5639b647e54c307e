"""A worker that owns several simulated GPUs, through a whole fleet: what operators see, and models on all of them."""

from collections.abc import Iterator
from pathlib import Path

import multigpu
import pytest
from click.testing import CliRunner
from multigpu.cli import cli

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.integration.streams import scrape

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

from tests.worker.generate.generating import Plain
from tests.worker.generate.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow
GIB = 1 << 30


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    return SimulatedGpus(tmp_path_factory.mktemp("gpus") / "gpus", 4)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, ranks in (("two", 2), ("four", 4)):
        save_tiny_llama(folder / name, layers=4)
        (folder / name / "model.toml").write_text(f"pipeline = {ranks}\n")
    return folder


@pytest.fixture(scope="module")
def fleet(gpus: SimulatedGpus, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    metrics = ["--metrics-listen", "127.0.0.1:0"]
    with Fleet(tmp_path_factory.mktemp("fleet"), workers=0, env=gpus.env(), master_flags=metrics) as fleet:
        fleet.start_worker("pair", "--device", "cuda:0,cuda:1", "--model-repository", str(repository))
        fleet.start_worker("one", "--device", "cuda:2")
        fleet.wait_for_workers()
        until(lambda: all(worker.telemetry.memory_total_bytes for worker in fleet.list_workers()), what="heartbeats")
        yield fleet
        assert not fleet.faults()


def mgpuctl(fleet: Fleet, *words: str) -> str:
    result = CliRunner().invoke(cli, ["--master", fleet.address, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_each_device_of_a_group_has_a_row(fleet: Fleet, gpus: SimulatedGpus) -> None:
    gpus.heat(1, 66)
    until(lambda: "66°C" in mgpuctl(fleet, "gpus"), what="the temperature")
    lines = mgpuctl(fleet, "gpus").splitlines()
    group = next(index for index, line in enumerate(lines) if " pair " in line)
    assert "cuda:0,cuda:1" in lines[group] and "2 x Simulated H200" in lines[group] and "66°C" in lines[group]
    first, second = lines[group + 1 : group + 3]
    assert "cuda:0 " in first and "66°C" not in first
    assert "cuda:1 " in second and "66°C" in second
    assert "3 devices on 1 host: 3 healthy" in lines[-1]


def test_a_task_gets_the_memory_that_each_device_has(fleet: Fleet, gpus: SimulatedGpus) -> None:
    total_bytes = gpus.gpu(0).memory_total
    with fleet.client() as client:
        with pytest.raises(multigpu.MultigpuError, match="device memory"):
            client.run("echo", b"x", device_memory_bytes=total_bytes + GIB, timeout=20)
        assert client.run("echo", b"x", device_memory_bytes=total_bytes // 2, timeout=60) == b"x"


def test_metrics_have_each_device(fleet: Fleet, gpus: SimulatedGpus) -> None:
    def found() -> set[str]:
        lines = [line for line in scrape(fleet).splitlines() if "mgpu_device_power_watts{" in line]
        return {line.partition('device_id="')[2].partition('"')[0] for line in lines}

    until(lambda: found() == {gpus.uuid(0), gpus.uuid(1), gpus.uuid(2)}, what="the power of each device")


def test_models_have_as_many_ranks_as_there_are_devices(fleet: Fleet, repository: Path) -> None:
    plain = Plain.load(repository / "two")
    with fleet.client() as client:
        found = client.generate("Hello", model="two", max_tokens=16, stream=True, timeout=240)
        list(found)
    assert list(found.result.token_ids) == plain.greedy("Hello", 16)
    assert "it needs 4 GPUs, and this worker has 2" in mgpuctl(fleet, "models", "list")

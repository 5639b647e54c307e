"""The phases of a benchmark, and when it has measured enough."""

import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from multigpu_worker.device.interface import Device, DeviceGoneError, DeviceInfo, Telemetry
from multigpu_worker.energy import recording as energy_recording
from multigpu_worker.energy import run as energy_run
from multigpu_worker.energy.config import BackendConfig, BenchmarkConfig, InputShapes, ScenarioConfig
from multigpu_worker.energy.intervals import ratio
from multigpu_worker.energy.recording import Recorder, RecordingError
from multigpu_worker.energy.results import flat, result_of
from multigpu_worker.energy.run import Benchmark, Length, Run, RunError
from multigpu_worker.energy.workloads import Request

PROMPTS = ["a", "b", "c", "d", "e"]
LENGTH = Length(idle_s=0.5, least_s=1.0, most_s=4.0, width=0.1)


class Gpu:
    """A device whose power the test sets; its counter follows."""

    visible_variable, visible_devices, engine_name = "CUDA_VISIBLE_DEVICES", "", ""
    compute_prohibited = reports_events = False

    def __init__(self, *, counter: bool = True, power: bool = True) -> None:
        self.info = DeviceInfo(device_id="GPU-1", name="cuda:0", product="A GPU", memory_total_bytes=1 << 30)
        self.watts = 100.0
        self.gone = ""
        self._joules, self._since_s = 0.0, time.monotonic()
        self._counter, self._power = counter, power

    def set_watts(self, watts: float) -> None:
        self._grow()
        self.watts = watts

    def _grow(self) -> float:
        now_s = time.monotonic()
        self._joules += self.watts * (now_s - self._since_s)
        self._since_s = now_s
        return self._joules

    def sample(self) -> Telemetry:
        if self.gone:
            raise DeviceGoneError("gpu_is_lost", self.gone)
        return Telemetry(
            energy_joules=self.energy_joules(), power_watts=self.power_watts(), utilization=0.5,
            memory_used_bytes=1 << 29, memory_total_bytes=1 << 30, throttle_reasons=("power cap",),
        )  # fmt: skip

    def release(self) -> None: ...

    def energy_joules(self) -> float | None:
        return self._grow() if self._counter else None

    def power_watts(self) -> float | None:
        return self.watts if self._power else None


class Work:
    """Takes 50 ms a batch, at 300 W; `watts` and `errors` may differ from batch to batch."""

    def __init__(self, gpu: Gpu, watts: Any = None, errors: Sequence[str] = ()) -> None:
        self.gpu = gpu
        self.batches: list[Sequence[str]] = []
        self.now_s = time.monotonic
        self._watts = watts if watts is not None else itertools.repeat(300.0)
        self._errors = itertools.chain(errors, itertools.repeat(""))

    def load(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {"healthy": True}

    def run(self, prompts: Sequence[str]) -> list[Request]:
        self.batches.append(prompts)
        begin_s = self.now_s()
        self.gpu.set_watts(next(self._watts))
        time.sleep(0.05)
        self.gpu.set_watts(100.0)
        error = next(self._errors)
        return [
            Request(
                begin_s=begin_s, end_s=self.now_s(), first_token_s=begin_s + 0.01, prompt_tokens=3,
                completion_tokens=7, error=error,
            )
            for _ in prompts
        ]  # fmt: skip


def config_of(batch_size: int = 2) -> BenchmarkConfig:
    scenario = ScenarioConfig(input_shapes=InputShapes(batch_size=batch_size))
    return BenchmarkConfig(backend=BackendConfig(device_ids=(0,)), scenario=scenario)


def benchmark(gpu: Gpu, work: Work, length: Length = LENGTH, told: list[str] | None = None) -> Run:
    devices: list[Device] = [gpu]
    recorder = Recorder(devices, [])
    work.now_s = recorder.now_s
    tell = lambda phase, _done, _of: None if told is None else told.append(phase)  # noqa: E731
    return Benchmark(config_of(), length, recorder, work, tell).run(PROMPTS, time.sleep)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_run, "BLOCK_S", 0.25)


def test_the_phases_follow_one_another_and_only_one_is_measured() -> None:
    gpu, told = Gpu(), list[str]()
    work = Work(gpu)
    run = benchmark(gpu, work, told=told)
    assert list(dict.fromkeys(told)) == ["load", "idle", "warm-up", "measured"]
    assert [phase.name for phase in run.phases] == ["load", "idle", "warm-up", "measured"]
    assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(run.phases))
    assert work.batches[:4] == [["a", "b"], ["c", "d"], ["e"], ["a", "b"]], "a new pass begins with the first prompt"
    warmed = energy_run.WARM_UP_BATCHES
    assert sum(len(block.requests) for block in run.blocks) == sum(map(len, work.batches[warmed:]))
    measured = run.phase("measured")
    assert LENGTH.least_s <= measured.end_s - measured.begin_s < LENGTH.most_s

    result = result_of(config_of(), LENGTH, run, work.facts())
    ours = result["multigpu"]
    assert ours["idle_watts"] == pytest.approx(100.0, rel=0.1)
    assert ours["mean_watts"] == pytest.approx(300.0, rel=0.15)
    assert ours["energy_without_idle"]["joules"] == pytest.approx(ours["energy"]["joules"] * 2 / 3, rel=0.15)
    assert ours["converged"]
    assert ours["joules_per_request_low"] <= ours["joules_per_request"] <= ours["joules_per_request_high"]
    summary = result["summary"]
    assert ours["joules_per_completion_token"] == pytest.approx(
        ours["energy"]["joules"] / summary["total_completion_tokens"]
    )
    assert (summary["total_prompts"], summary["failed_prompts"]) == (len(run.requests), 0)
    assert summary["avg_time_to_first_token"] == pytest.approx(0.01)
    assert result["energy"]["energy_wh"] == pytest.approx(ours["energy"]["joules"] / 3600)
    assert result["energy"]["cpu_energy_wh"] is None
    assert ours["devices"][0]["throttle_reasons"] == ["power cap"]
    row = flat(result)
    assert row["gpu_stats_gpu_0_utilization_percent"] == 50
    assert row["config_device_ids"] == "0"
    assert row["aggregate_total_avg_memory_mb"] == 512


def test_it_repeats_until_the_interval_is_narrow_or_its_time_is_over() -> None:
    gpu, chosen = Gpu(), random.Random(3)
    wild = (chosen.choice([100.0, 2000.0]) for _ in itertools.count())
    run = benchmark(gpu, Work(gpu, wild), Length(idle_s=0.2, least_s=0.5, most_s=3.0, width=0.001))
    measured = run.phase("measured")
    assert measured.end_s - measured.begin_s >= 3.0
    interval = run.of_requests()
    assert interval is not None and interval.width > 0.001


def test_every_prompt_is_run_once_however_long_it_takes() -> None:
    gpu = Gpu()
    work = Work(gpu)
    benchmark(gpu, work, Length(idle_s=0.2, least_s=0.1, most_s=0.1, width=1.0))
    measured = work.batches[energy_run.WARM_UP_BATCHES :]
    assert {prompt for batch in measured for prompt in batch} == set(PROMPTS)


class SlowGpu(Gpu):
    """Its driver takes its time."""

    def sample(self) -> Telemetry:
        time.sleep(0.3)
        return super().sample()


def test_the_phases_begin_once_each_device_has_been_read() -> None:
    run = benchmark(gpu := SlowGpu(), Work(gpu))
    idle = run.phase("idle")
    assert run.recorder.energy(idle.begin_s, idle.end_s) is not None


def test_a_device_without_sensors_is_measured_without_energy() -> None:
    gpu = Gpu(counter=False, power=False)
    work = Work(gpu)
    result = result_of(config_of(), LENGTH, benchmark(gpu, work), {})
    assert result["multigpu"]["energy"] == {"joules": None, "uncertainty_joules": None}
    assert result["energy"]["energy_wh"] is None, "not measured is not 0"
    assert result["summary"]["successful_prompts"] > 0


def test_sampled_power_takes_the_place_of_a_counter() -> None:
    gpu = Gpu(counter=False)
    run = benchmark(gpu, Work(gpu))
    result = result_of(config_of(), LENGTH, run, {})
    assert result["multigpu"]["devices"][0]["method"] == "sampled_power"
    assert result["multigpu"]["energy"]["uncertainty_joules"] > 0


def test_failures_in_a_row_end_it_and_single_ones_are_counted() -> None:
    gpu = Gpu()
    with pytest.raises(RunError, match="3 requests have failed one after the other; the last: no memory"):
        benchmark(gpu, Work(gpu, errors=["no memory"] * 2))
    run = benchmark(gpu, Work(gpu, errors=["", "", "", "no memory"]))
    summary = result_of(config_of(), LENGTH, run, {})["summary"]
    assert summary["failed_prompts"] == 2
    assert summary["successful_prompts"] == summary["total_prompts"] - 2


def test_a_device_that_is_lost_ends_it() -> None:
    gpu = Gpu()
    work = Work(gpu)

    def lose() -> None:
        gpu.gone = "the GPU fell off the bus"

    work.load = lose  # type: ignore[method-assign]
    with pytest.raises(RecordingError, match="fell off the bus"):
        benchmark(gpu, work)


class StoppingGpu(Gpu):
    """Once `stop` is set, reading its sensors raises `fails`, or waits for `resume` if that is None."""

    def __init__(self, fails: Exception | None) -> None:
        super().__init__()
        self.stop, self.stopped, self.resume = threading.Event(), threading.Event(), threading.Event()
        self._fails = fails

    def sample(self) -> Telemetry:
        if self.stop.is_set():
            self.stopped.set()
            if self._fails is not None:
                raise self._fails
            self.resume.wait()
        return super().sample()


@pytest.mark.parametrize(
    ("fails", "timeout_s", "message"),
    [
        (None, 0.1, "the driver of a device has not answered for 0.1 s"),
        (OSError(5, "Input/output error"), 20.0, r"cuda:0 can't be read: OSError: \[Errno 5\] Input/output error"),
    ],
)
def test_it_ends_if_the_sensors_of_a_device_stop(
    monkeypatch: pytest.MonkeyPatch, fails: OSError | None, timeout_s: float, message: str
) -> None:
    gpu = StoppingGpu(fails)
    recorder = Recorder([gpu], [])
    work = Work(gpu)

    def load() -> None:
        monkeypatch.setattr(energy_recording, "DRIVER_TIMEOUT_S", timeout_s)
        gpu.stop.set()
        assert gpu.stopped.wait(10)

    work.load = load  # type: ignore[method-assign]
    gives_up_s = time.monotonic() + 10

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() > gives_up_s:  # a wait without a limit ends the test with another outcome
            gpu.resume.set()
            assert fails is None

    length = Length(idle_s=0.01, least_s=0.1, most_s=0.1)
    try:
        with pytest.raises(RecordingError, match=message):
            Benchmark(config_of(), length, recorder, work, lambda *_: None).run(PROMPTS, wait)
    finally:
        gpu.resume.set()


def test_an_interval_covers_the_true_ratio_in_95_of_100() -> None:
    covered = 0
    for seed in range(300):
        chosen = random.Random(seed)
        counts = [chosen.randint(20, 40) for _ in range(30)]
        found = ratio([10.0 * n + chosen.gauss(0, 30) for n in counts], counts)
        assert found is not None
        covered += found.low <= 10.0 <= found.high
    assert covered >= 270
    assert ratio([1.0] * 4, [1] * 4) is None
    assert ratio([1.0] * 5, [0] * 5) is None

"""The result of a benchmark: one dict for JSON, whose first sections are those of ai_energy_benchmarks, and its row for
CSV, with that system's columns first and in its order.

A value that was not measured is None, and empty in CSV. Emissions, and the energy of the memory, are never measured.
"""

import csv
import itertools
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from multigpu import __version__

from multigpu_worker.energy.availability import gpu_stats
from multigpu_worker.energy.config import BenchmarkConfig
from multigpu_worker.energy.recording import Recorder, Recording
from multigpu_worker.energy.run import Length, Phase, Run
from multigpu_worker.energy.windows import ZERO, Energy
from multigpu_worker.energy.workloads import Request

WH = 3600.0  # joules
MIB = 1 << 20
ACTIVE_PERCENT = 5  # of utilization: the earlier system calls a GPU active above it
# Of a device's samples, what is kept for plots.
SERIES = (
    "power_watts", "utilization", "temperature_celsius", "sm_clock_hertz", "memory_clock_hertz", "power_limit_watts",
    "memory_used_bytes",
)  # fmt: skip


def result_of(config: BenchmarkConfig, length: Length, run: Run, backend: dict[str, Any]) -> dict[str, Any]:
    """`backend`: facts of the workload."""
    measured = run.phase("measured")
    phase = Phase("measured", run.blocks[0].begin_s, run.blocks[-1].end_s) if run.blocks else measured
    requests = run.requests
    energy = run.recorder.energy(phase.begin_s, phase.end_s)
    gpus = config.backend.device == "cuda"
    return {
        "config": {
            "name": config.name, "backend": config.backend.type, "model": config.backend.model,
            "dataset": config.scenario.dataset_name, "num_samples": config.scenario.num_samples,
            "device_ids": list(config.backend.device_ids),
        },
        "summary": _summary(requests, phase),
        "energy": _energy(config, run.recorder, phase, energy, gpus=gpus) if config.metrics.enabled else {},
        "gpu_stats": _gpu_stats(config, run.recorder, phase) if gpus else {},
        "aggregate": _aggregate(run.recorder, phase) if gpus else {},
        "backend_info": {"backend": config.backend.type, "model": config.backend.model} | backend,
        "metrics_metadata": {
            "name": "multigpu", "version": __version__, "capabilities": ["gpu_energy", "cpu_energy"],
            "project_name": config.metrics.project_name, "output_dir": config.metrics.output_dir,
        },
        "multigpu": _ours(length, run, phase, energy),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _summary(requests: Sequence[Request], phase: Phase) -> dict[str, Any]:
    succeeded = [request for request in requests if not request.error]
    before, made = (sum(getattr(r, name) for r in succeeded) for name in ("prompt_tokens", "completion_tokens"))
    first = [r.first_token_s - r.begin_s for r in succeeded if r.first_token_s is not None]
    seconds = phase.end_s - phase.begin_s
    return {
        "total_prompts": len(requests),
        "successful_prompts": len(succeeded),
        "failed_prompts": len(requests) - len(succeeded),
        "total_duration_seconds": seconds,
        "avg_latency_seconds": _mean([r.end_s - r.begin_s for r in succeeded]),
        "avg_time_to_first_token": _mean(first),
        "total_tokens": before + made,
        "total_prompt_tokens": before,
        "total_completion_tokens": made,
        "throughput_tokens_per_second": (before + made) / seconds,
    }


def _energy(
    config: BenchmarkConfig, recorder: Recorder, phase: Phase, energy: Energy | None, *, gpus: bool
) -> dict[str, Any]:
    """As the earlier system: `energy_wh` is the GPUs', or the CPU's if the model runs there."""
    cpu = recorder.beside if gpus else recorder.recordings
    found: dict[str, float | None] = {
        "gpu": energy.joules if gpus and energy is not None else None,
        "cpu": cpu[0].readings.energy(phase.begin_s, phase.end_s).joules if cpu and cpu[0].readings else None,
        "ram": None,
    }
    known = [joules for joules in found.values() if joules is not None]
    values: dict[str, Any] = {"emissions_kg_co2eq": None, "emissions_g_co2eq": None}
    for name, joules in (
        ("", energy.joules if energy is not None else None), *((f"{part}_", found[part]) for part in found),
        ("total_", sum(known) if known else None),
    ):  # fmt: skip
        values[f"{name}energy_kwh"] = joules / WH / 1000 if joules is not None else None
        values[f"{name}energy_wh"] = joules / WH if joules is not None else None
    return values | {
        "duration_seconds": phase.end_s - phase.begin_s, "carbon_intensity_g_per_kwh": None,
        "project_name": config.metrics.project_name, "country": config.metrics.country_iso_code,
        "region": config.metrics.region,
    }  # fmt: skip


def _gpu_stats(config: BenchmarkConfig, recorder: Recorder, phase: Phase) -> dict[str, Any]:
    """At the end of the measured phase, as the earlier system."""
    recordings = zip(config.backend.device_ids, recorder.recordings, strict=True)
    return {f"gpu_{n}": gpu_stats(recording.within(phase.begin_s, phase.end_s)[-1]) for n, recording in recordings}


def _aggregate(recorder: Recorder, phase: Phase) -> dict[str, Any]:
    """Over the measured phase, in the earlier system's terms: sums over the GPUs of means and maxima."""
    samples = [recording.within(phase.begin_s, phase.end_s) for recording in recorder.recordings]
    used, memory, power = (
        [[value * factor for s in each if (value := getattr(s, name)) is not None] for each in samples]
        for name, factor in (("utilization", 100.0), ("memory_used_bytes", 1 / MIB), ("power_watts", 1.0))
    )
    most_used = [max(each, default=0.0) for each in used]
    return {
        "total_samples": min(map(len, samples)),
        "total_avg_utilization": sum(map(_mean, used)),
        "total_max_utilization": max(most_used),
        "total_avg_memory_mb": sum(map(_mean, memory)),
        "total_max_memory_mb": sum(max(each, default=0.0) for each in memory),
        "total_avg_power_w": sum(map(_mean, power)),
        "total_max_power_w": sum(max(each, default=0.0) for each in power),
        "avg_utilization_per_gpu": _mean([_mean(each) for each in used]),
        "avg_memory_per_gpu_mb": _mean([_mean(each) for each in memory]),
        "any_gpu_active": any(each > ACTIVE_PERCENT for each in most_used),
    }


def _ours(length: Length, run: Run, phase: Phase, energy: Energy | None) -> dict[str, Any]:
    idle = run.phase("idle")
    succeeded = [request for request in run.requests if not request.error]
    tokens = sum(request.completion_tokens for request in succeeded)
    interval = run.of_requests()
    seconds = phase.end_s - phase.begin_s
    baseline = run.recorder.energy(idle.begin_s, idle.end_s)
    idle_part = baseline.times(seconds / (idle.end_s - idle.begin_s)) if baseline is not None else None
    prefill, decode = _parts(run.recorder, succeeded)
    return {
        "host": platform.node(),
        "length": asdict(length),
        "phases": [asdict(each) for each in run.phases],
        "measured": {"begin_s": phase.begin_s, "end_s": phase.end_s},
        "energy": _with_error(energy),
        "idle_energy": _with_error(idle_part),
        "energy_without_idle": _with_error(energy.minus(idle_part) if energy and idle_part else None),
        "mean_watts": energy.joules / seconds if energy is not None else None,
        "idle_watts": baseline.joules / (idle.end_s - idle.begin_s) if baseline is not None else None,
        "joules_per_request": energy.joules / len(succeeded) if energy and succeeded else None,
        "joules_per_request_low": interval.low if interval is not None else None,
        "joules_per_request_high": interval.high if interval is not None else None,
        "converged": interval is not None and interval.width <= length.width,
        "joules_per_completion_token": energy.joules / tokens if energy and tokens else None,
        "prefill": _with_error(prefill),
        "decode": _with_error(decode),
        "blocks": [_block(each.begin_s, each.end_s, each.requests, each.joules) for each in run.blocks],
        "devices": [_device(each, phase) for each in (*run.recorder.recordings, *run.recorder.beside)],
    }


def _parts(recorder: Recorder, requests: Sequence[Request]) -> tuple[Energy | None, Energy | None]:
    """Energy up to the first tokens, and after them, of requests that ran one by one or as whole batches. None: it was
    not measured, or the times are too short to be told apart.
    """
    windows = {(r.begin_s, r.first_token_s, r.end_s) for r in requests}
    ordered = sorted(windows, key=lambda each: each[0])
    overlap = any(after[0] < before[2] for before, after in itertools.pairwise(ordered))
    if not ordered or overlap or any(first is None for _, first, _ in ordered):
        return None, None
    sums = []
    for ends in ([(begin, first) for begin, first, _ in ordered], [(first, end) for _, first, end in ordered]):
        total: Energy | None = ZERO
        for begin_s, end_s in ends:
            assert begin_s is not None
            assert end_s is not None
            part = recorder.energy(begin_s, end_s)
            total = total + part if total is not None and part is not None else None
        sums.append(total if total is not None and total.uncertainty_joules < total.joules else None)
    return sums[0], sums[1]


def _block(begin_s: float, end_s: float, requests: Sequence[Request], joules: float | None) -> dict[str, Any]:
    succeeded = [request for request in requests if not request.error]
    tokens = sum(request.completion_tokens for request in succeeded)
    return {
        "begin_s": begin_s, "end_s": end_s, "requests": len(succeeded), "completion_tokens": tokens, "joules": joules
    }  # fmt: skip


def _device(recording: Recording, phase: Phase) -> dict[str, Any]:
    info, readings = recording.device.info, recording.readings
    inside = recording.within(phase.begin_s, phase.end_s)
    return {
        "name": info.name, "device_id": info.device_id, "product": info.product, "simulated": info.simulated,
        "driver_version": info.driver_version,
        "method": readings.method.name.lower() if readings is not None else None,
        "energy": _with_error(readings.energy(phase.begin_s, phase.end_s) if readings is not None else None),
        "throttle_reasons": sorted({reason for sample in inside for reason in sample.throttle_reasons}),
        "series": {"time_s": recording.times_s}
        | {name: [getattr(sample, name) for sample in recording.samples] for name in SERIES},
    }  # fmt: skip


def _with_error(energy: Energy | None) -> dict[str, float | None]:
    """Without values, it has the same keys: the columns of CSV are always the same."""
    if energy is None:
        return {"joules": None, "uncertainty_joules": None}
    return {"joules": energy.joules, "uncertainty_joules": energy.uncertainty_joules}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with "_" between the keys; lists with commas between their values. Lists of dicts, and the
    series of devices, are left out.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}_")
        elif isinstance(value, list):
            if not any(isinstance(each, dict) for each in value):
                found[prefix + key] = ",".join(map(str, value))
        else:
            found[prefix + key] = value
    return found


class ReportFileError(Exception):
    """A file can't be written; the message says why."""


def append_row(path: Path, result: dict[str, Any]) -> None:
    """Appends a row. ReportFileError: the file has other columns, or can't be written."""
    row = flat(result)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            header = next(csv.reader(file), None)
            if header is not None and header != list(row):
                raise ReportFileError(f"{path} has other columns: name another file (reporter.output_file)")
            writer = csv.DictWriter(file, list(row))
            if header is None:
                writer.writeheader()
            writer.writerow(row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ReportFileError(f"{path} can't be written: {error}") from error

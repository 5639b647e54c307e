"""What `mgpuctl energy` asks of this host's devices, in a process of its own: a broken driver may hang its caller.

    python -m multigpu_worker.energy.main check CONFIG [KEY=VALUE]... | info [GPU]... | recommend
    python -m multigpu_worker.energy.main run CONFIG LENGTH [KEY=VALUE]...

The answer is a line of JSON. Lines of a run before it tell its progress; LENGTH is JSON, too. Without an answer, stderr
says why; the exit code is 2 if the configuration is wrong, else 1.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multigpu.errors import ConfigError

from multigpu_worker.device.interface import DeviceError, visible_environment
from multigpu_worker.energy import availability
from multigpu_worker.energy.config import BenchmarkConfig, load
from multigpu_worker.energy.prompts import PromptsError, load_prompts
from multigpu_worker.energy.recording import Recorder, RecordingError
from multigpu_worker.energy.results import ReportFileError, append_row, result_of
from multigpu_worker.energy.run import Benchmark, Length, RunError
from multigpu_worker.energy.workloads import Server, Workload, WorkloadError

FAILURES = (DeviceError, PromptsError, RecordingError, ReportFileError, RunError, WorkloadError)


def answer(command: str, *arguments: str) -> dict[str, Any]:
    """The answer to a command. Raises ConfigError, or one of FAILURES."""
    match command, arguments:
        case "check", (path, *overrides):
            return availability.check(_config(path, overrides))
        case "info", indexes:
            return availability.report([int(each) for each in indexes] or availability.all_gpus(), {})
        case "recommend", ():
            return availability.recommended()
        case "run", (path, length, *overrides):
            return run(_config(path, overrides), Length(**json.loads(length)))
    raise AssertionError(command, arguments)


def _config(path: str, overrides: list[str]) -> BenchmarkConfig:
    return load(Path(path), dict(each.split("=", 1) for each in overrides))


def run(config: BenchmarkConfig, length: Length) -> dict[str, Any]:
    """Runs a benchmark, and appends its row to the file that the configuration names."""
    prompts = load_prompts(config.scenario)
    devices, beside = availability.open_devices(config)
    recorder = Recorder(devices, beside)
    workload = _workload(config, recorder, visible_environment(devices))
    measured = Benchmark(config, length, recorder, workload, _tell).run(prompts, time.sleep)
    result = result_of(config, length, measured, workload.facts())
    append_row(Path(config.reporter.output_file), result)
    return result


def _workload(config: BenchmarkConfig, recorder: Recorder, environment: Mapping[str, str]) -> Workload:
    if config.backend.type == "vllm":
        return Server(config, recorder.now_s)
    os.environ.update(environment)  # before torch is imported
    from multigpu_worker.energy.torch_model import TorchModel  # noqa: PLC0415

    return TorchModel(config, recorder.now_s)


def _tell(phase: str, done: float, of: float) -> None:
    print(json.dumps({"phase": phase, "done": done, "of": of}), flush=True)  # noqa: T201  for the parent process


def main() -> None:
    try:
        print(json.dumps(answer(*sys.argv[1:])))  # noqa: T201
    except (ConfigError, *FAILURES) as error:
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201  the parent reads one line
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()

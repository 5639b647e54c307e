"""The process that `mgpuctl bench` compares a fleet with: a baseline loop (loops.py) without a fleet.

Requests are pickled on standard input: a dict and the payloads of tasks. The first one has the arguments of `load_as`,
and its payloads warm the loop up; later ones run theirs. Each gets a line of JSON: `seconds` of the run, or `error`.
"""

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import click
from multigpu.config.config import WorkerConfig, load

from multigpu_worker.baselines.loading import load_model
from multigpu_worker.baselines.loops import Loop
from multigpu_worker.composition import artifacts_folder
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.main import main as worker_main
from multigpu_worker.repository.folders import find_models

# The reader's lines have a limit.
ERROR_CHARS_MAX = 2000


def load_as(*, pid: int, device: str, threads: int, kind: str, model: str) -> Loop:
    """The loop for a model that the worker `pid` of this host has, with its configuration. Raises ValueError."""
    if threads:
        # The libraries read these at their first use.
        os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(threads)
    env, file, flags = of_worker(pid) or (None, None, {})
    config = load(WorkerConfig, env=env, file=file, flags=flags).config
    scan = find_models(config)
    specs = scan.models | {name: scan.models[found] for name, found in scan.current.items()}
    if model not in specs:
        raise ValueError(f"no model {model!r} is configured here")
    settings = EngineSettings(
        device=device,
        slots=1,
        threads=threads,
        artifacts=str(artifacts_folder(config)),
        artifacts_bytes_max=config.artifacts_bytes_max,
    )
    return load_model(kind, specs[model], settings)


def of_worker(pid: int) -> tuple[dict[str, str], str | None, dict[str, Any]] | None:
    """Environment, config file and flags of a worker process. Changes to its working directory.

    None: not a worker of this host, or another user's.
    """
    process = Path("/proc", str(pid))
    try:
        words, variables = ((process / name).read_bytes().decode().split("\0") for name in ("cmdline", "environ"))
        at = next(n for n, word in enumerate(words) if word.endswith(("multigpu_worker.main", "mgpu-worker")))
        flags = worker_main.make_context(words[at], words[at + 1 : -1]).params
        os.chdir(process / "cwd")
    except (OSError, ValueError, StopIteration, click.ClickException):
        return None
    sys.path.insert(0, str(Path.cwd()))
    return dict(word.split("=", 1) for word in variables if "=" in word), flags.pop("config_file"), flags


def main() -> None:
    # Libraries may print to standard output, which becomes standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    loop: Loop | None = None
    while True:
        try:
            request, payloads = pickle.load(sys.stdin.buffer)  # noqa: S301  from our own parent
        except EOFError:
            return
        answer: dict[str, Any] = {}
        try:
            if loop is None:
                loaded = load_as(**request)
                loaded.warm_up(loaded.read(payloads))
                loop = loaded
            else:
                examples = loop.read(payloads)
                began = time.perf_counter()
                loop.run(examples)
                answer = {"seconds": time.perf_counter() - began}
        except Exception as error:  # noqa: BLE001  any library's
            answer["error"] = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

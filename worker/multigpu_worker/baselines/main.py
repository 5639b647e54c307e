"""The process that `mgpuctl bench` compares a fleet with: baseline loops (loops.py) without a fleet.

Requests are pickled dicts on standard input. Each gets a pickled dict on standard output, with `error` if it failed.
{"settings": {"device", "threads", "pid"}, "task": {"kind", "model", "content_type"}, "payloads" to warm up with} loads
a loop; {"payloads", "times" to repeat them} runs it and gets {"seconds", "tokens" or None}.
"""

import functools
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import click
from multigpu.config.config import WorkerConfig, load

from multigpu_worker.baselines.loading import load_handlers, load_model
from multigpu_worker.baselines.loops import EngineLoop, Loop
from multigpu_worker.composition import artifacts_folder
from multigpu_worker.engines.base import Batch, EngineSettings
from multigpu_worker.main import main as worker_main
from multigpu_worker.models.folders import find_models


class Baselines:
    def __init__(self, *, device: str, threads: int, pid: int) -> None:
        """`pid`: a worker of this host, whose configuration is used."""
        env, file, flags = of_worker(pid) or (None, None, {})
        config = load(WorkerConfig, env=env, file=file, flags=flags)
        scan = find_models(config.config)
        self._specs = scan.models | {name: scan.models[found] for name, found in scan.current.items()}
        self._settings = EngineSettings(
            device=device,
            slots=1,
            threads=threads,
            handlers=config.config.handlers,
            artifacts=str(artifacts_folder(config.config)),
            artifacts_bytes_max=config.config.artifacts_bytes_max,
        )

    def load(self, *, model: str, kind: str, content_type: str) -> Loop:
        if not model:
            batch_of = functools.partial(Batch, kind, model, {}, content_type)
            return EngineLoop(load_handlers(kind, self._settings), batch_of)
        if model not in self._specs:
            raise ValueError(f"no model {model!r} is configured here")
        return load_model(kind, self._specs[model], self._settings, {}, content_type)


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
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    baselines: Baselines | None = None
    loop: Loop | None = None
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)  # noqa: S301  from our own parent
        except EOFError:
            return
        answer: dict[str, Any] = {}
        try:
            if "task" in request:
                threads = request["settings"]["threads"]
                if threads:
                    # The libraries read these at their first use.
                    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(threads)
                baselines = baselines or Baselines(**request["settings"])
                loop = None  # frees its memory
                loop = baselines.load(**request["task"])
                loop.warm_up(loop.read(request["payloads"]))
            else:
                assert loop is not None
                examples = loop.read(request["payloads"] * request["times"])
                began = time.perf_counter()
                loop.run(examples)
                answer = {"seconds": time.perf_counter() - began, "tokens": loop.tokens}
        except Exception as error:  # noqa: BLE001  any library's; the next request may succeed
            answer["error"] = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()

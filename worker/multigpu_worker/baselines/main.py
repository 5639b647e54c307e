"""The process that `mgpuctl bench` compares a fleet with: baseline loops (loops.py) without a fleet.

    python -m multigpu_worker.baselines.main '{"device": "cpu", "threads": 2, "models": [], "handlers": [], "pid": 0}'

Each line on standard input is a JSON request and gets a JSON response, with `error` if it failed:
{"do": "load", "model", "kind", "engine", "precision", "content_type", "payloads" to warm up with} ⟶ {"batch"};
{"do": "run", the same, "times" to repeat the payloads, "out", a file for the answers, or none} ⟶ {"seconds", "tokens"
of all payloads, or null, "form" of the answers: "rows", a .npy, or "results"}.

"payloads" and "results" are files with a list of bytes in `marshal`: both processes run the same Python.
"""

import dataclasses
import functools
import json
import marshal
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from multigpu.config.config import WorkerConfig, load

from multigpu_worker.baselines.loading import load_engine, load_handlers, load_loop
from multigpu_worker.baselines.loops import EngineLoop, Loop, Rows
from multigpu_worker.composition import artifacts_folder
from multigpu_worker.engines.base import Batch, Engine, EngineSettings
from multigpu_worker.engines.common.precision import choose
from multigpu_worker.main import main as worker_main
from multigpu_worker.models.folders import find_models

# The fields of a request that identify its loop.
KEY = ("model", "kind", "engine", "precision", "content_type")


class Baselines:
    def __init__(self, *, device: str, threads: int, models: list[str], handlers: list[str], pid: int) -> None:
        """`pid`: a worker of this host, whose configuration is used. 0: none."""
        given = {"models": tuple(models), "handlers": tuple(handlers)}
        env, file, flags = of_worker(pid) or (None, None, {})
        config = load(WorkerConfig, env=env, file=file, flags=flags | {n: value for n, value in given.items() if value})
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
        # By request, and by resolved model and variant: several requests may mean the same.
        self._loops: dict[tuple[str, ...], Loop] = {}
        self._resolved: dict[tuple[str, ...], Loop] = {}
        # Users' engines, by id of their model.
        self._engines: dict[str, Engine] = {}
        # Batch sizes of loops that are warm.
        self._batches: dict[Loop, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        key = tuple(request[name] for name in KEY)
        payloads = marshal.loads(Path(request["payloads"]).read_bytes())  # noqa: S302  from our own parent
        if request["do"] == "load":
            loop = self._loops[key] = self._loops.get(key) or self._load(*key)
            if loop not in self._batches:
                self._batches[loop] = loop.warm_up(loop.read(payloads))
            return {"batch": self._batches[loop]}
        loop = self._loops[key]
        examples = loop.read(payloads * request["times"])
        began = time.perf_counter()
        results, tokens = loop.run(examples)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "tokens": tokens}
        if out := request.get("out"):
            answer["form"] = write(loop.answers(results), Path(out))
        return answer

    def _load(self, model: str, kind: str, engine: str, precision: str, content_type: str) -> Loop:
        parameters = {name: each for name, each in (("engine", engine), ("precision", precision)) if each != "auto"}
        batch_of = functools.partial(Batch, kind, model, parameters, content_type)
        if not model:
            return EngineLoop(load_handlers(kind, self._settings), batch_of)
        if model not in self._specs:
            raise ValueError(f"no model {model!r} is configured here: say where it lies, --serve {model}=FOLDER")
        spec = self._specs[model]
        if ":" in spec.engine:
            if spec.id not in self._engines:
                settings = dataclasses.replace(self._settings, models={spec.id: spec})
                self._engines[spec.id] = load_engine(spec, settings)
            return EngineLoop(self._engines[spec.id], batch_of)
        variant = choose(spec, self._settings, parameters)
        resolved = (kind, spec.id, variant.engine, variant.precision)
        if resolved not in self._resolved:
            self._resolved[resolved] = load_loop(kind, spec, self._settings, variant)
        return self._resolved[resolved]


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


def write(answers: Rows | list[bytes], path: Path) -> str:
    """Write a loop's answers, and return their form."""
    with path.open("wb") as file:
        if isinstance(answers, np.ndarray):
            np.save(file, answers)
            return "rows"
        marshal.dump(answers, file)
        return "results"


def main() -> None:
    settings = json.loads(sys.argv[1])
    # Libraries may print to standard output, which becomes standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if settings["threads"]:
        # The libraries read these at their first use.
        os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(settings["threads"])
    baselines: Baselines | None = None
    for line in sys.stdin:
        try:
            baselines = baselines or Baselines(**settings)
            answer = baselines.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  any library's; the next request may succeed
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

"""The process that `mgpuctl bench` compares a fleet with: models in plain loops (loops.py), no fleet.

    python -m multigpu_worker.baselines.main '{"device": "cpu", "threads": 2, "models": [], "handlers": [], "pid": 0}'

One JSON object a line is asked and one is answered, with `error` in it where it can't be done:
{"do": "load", "model", "kind", "engine", "precision", "content_type", and "payloads" to get warm with} ⟶ {"batch"};
{"do": "run", the same, "times" that they go through, and "out", a file for the answers, or none} ⟶ {"seconds", "tokens"
of all of them, or null, and "form" of the answers: "rows", a .npy, or "results"}.

`payloads` is a file with those of the fleet's tasks, as "results" is one with theirs: a list of bytes in `marshal`,
which both ends have of the same Python.
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

from multigpu_worker.baselines.loops import EngineLoop, Loop, Rows, load_engine, load_handlers, load_loop
from multigpu_worker.composition import artifacts_folder
from multigpu_worker.engines.base import Batch, Engine, EngineSettings
from multigpu_worker.engines.common.precision import choose
from multigpu_worker.main import main as worker_main
from multigpu_worker.models.folders import find_models

# Of the request, in this order: what makes a loop.
KEY = ("model", "kind", "engine", "precision", "content_type")


class Plain:
    def __init__(self, *, device: str, threads: int, models: list[str], handlers: list[str], pid: int) -> None:
        """`pid`: of a worker of this host; what it serves is found without being said again. 0: of none."""
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
        # By what was asked for, and by what that means: several may mean the same.
        self._loops: dict[tuple[str, ...], Loop] = {}
        self._meant: dict[tuple[str, ...], Loop] = {}
        # Users' own engines, by the id of their model.
        self._engines: dict[str, Engine] = {}
        # Batch sizes of those that are warm.
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
        given, tokens = loop.run(examples)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "tokens": tokens}
        if out := request.get("out"):
            answer["form"] = write(loop.answers(given), Path(out))
        return answer

    def _load(self, model: str, kind: str, engine: str, precision: str, content_type: str) -> Loop:
        wishes = {name: wish for name, wish in (("engine", engine), ("precision", precision)) if wish != "auto"}
        batch_of = functools.partial(Batch, kind, model, wishes, content_type)
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
        variant = choose(spec, self._settings, wishes)
        meant = (kind, spec.id, variant.engine, variant.precision)
        if meant not in self._meant:
            self._meant[meant] = load_loop(kind, spec, self._settings, variant)
        return self._meant[meant]


def of_worker(pid: int) -> tuple[dict[str, str], str | None, dict[str, Any]] | None:
    """Environment, config file and flags of a worker's process, whose working directory becomes ours.

    None: it is no worker here, or another user's.
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
    """Write a loop's answers. Returns their form."""
    with path.open("wb") as file:
        if isinstance(answers, np.ndarray):
            np.save(file, answers)
            return "rows"
        marshal.dump(answers, file)
        return "results"


def main() -> None:
    settings = json.loads(sys.argv[1])
    # Libraries may print: what they say is for people.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if settings["threads"]:
        # Read when the libraries are first used.
        os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(settings["threads"])
    plain: Plain | None = None
    for line in sys.stdin:
        try:
            plain = plain or Plain(**settings)
            answer = plain.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  whatever a library raises is to be said, and the next may work
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

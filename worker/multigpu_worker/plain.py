"""The process that `mgpuctl bench` compares a fleet with: models in plain loops (engines/plain_loops.py), no fleet.

    python -m multigpu_worker.plain '{"device": "cpu", "threads": 2, "config_file": null, "models": []}'

One JSON object a line is asked and one is answered, with `error` in it where it can't be done:
{"do": "load", "model", "kind", "engine", "precision", and "texts" or "inputs", a .npz, to get warm with} ⟶ {"batch"};
{"do": "run", "model", "engine", "precision", and "texts" or "inputs", "times" that they go through, and "out", a .npy
for the answers, or none} ⟶ {"seconds", and "tokens" of one time, or null}.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
from multigpu.config import WorkerConfig, load

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.models import find_models
from multigpu_worker.engines.plain_loops import Loop, load_loop
from multigpu_worker.engines.precision import Variant, choose
from multigpu_worker.main import artifacts_folder


class Plain:
    def __init__(self, *, device: str, threads: int, config_file: str | None, models: list[str]) -> None:
        flags = {"models": tuple(models)} if models else {}
        config = load(WorkerConfig, file=config_file, flags=flags).config
        scan = find_models(config)
        self._specs = scan.models | {name: scan.models[found] for name, found in scan.current.items()}
        self._settings = EngineSettings(
            device=device,
            slots=1,
            threads=threads,
            artifacts=str(artifacts_folder(config)),
            artifacts_bytes_max=config.artifacts_bytes_max,
        )
        self._loops: dict[tuple[str, Variant], Loop] = {}
        self._batches: dict[tuple[str, Variant], int] = {}
        # Model, engine and precision as they were asked for: what they mean.
        self._meant: dict[tuple[str, str, str], tuple[str, Variant]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        key = (request["model"], request["engine"], request["precision"])
        examples = request.get("texts") or request["inputs"]
        if request["do"] == "load":
            return {"batch": self._load(request["kind"], *key, examples)}
        loop = self._loops[self._meant[key]]
        began = time.perf_counter()
        for _ in range(request["times"]):
            rows, tokens = loop.run(examples)
        seconds = time.perf_counter() - began
        if request.get("out"):
            np.save(request["out"], rows)
        return {"seconds": seconds, "tokens": tokens}

    def _load(self, kind: str, model: str, engine: str, precision: str, examples: Any) -> int:
        if model not in self._specs:
            raise ValueError(f"no model {model!r} is configured here: say where it lies, --serve {model}=FOLDER")
        spec = self._specs[model]
        wishes = {name: wish for name, wish in (("engine", engine), ("precision", precision)) if wish != "auto"}
        variant = choose(spec, self._settings, wishes)
        self._meant[model, engine, precision] = spec.id, variant
        if (spec.id, variant) not in self._loops:
            loop = load_loop(kind, spec, self._settings, variant)
            self._batches[spec.id, variant] = loop.warm_up(examples)
            self._loops[spec.id, variant] = loop
        return self._batches[spec.id, variant]


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

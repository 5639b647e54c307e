"""Which of torch and ONNX Runtime computes an embedding model's vectors faster on this CPU.

A trial in a subprocess exports the model (engines/onnx/export.py) and measures the processor time that both back ends
take: for one text, and for many of different lengths. The artifact cache keeps its result.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from multigpu_worker.device.cpu import host_memory_bytes, meminfo, processor_name
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.common.subprocess_call import SubprocessDiedError, subprocess_call
from multigpu_worker.engines.embed.backend import EmbedBackend, Vectors, cut, load_backend
from multigpu_worker.engines.onnx.artifacts import EXPORT, cache_of, export_key
from multigpu_worker.engines.onnx.export import DIFFERENCE_MAX
from multigpu_worker.repository.files import file_hash
from multigpu_worker.repository.model import ModelFolderError, ModelSpec
from multigpu_worker.repository.weight_files import weights_bytes

ENGINES = ("torch", "onnx")
KIND = "fastest"  # of artifact
# 64 texts of 6 to 46 tokens, as sentences have.
TEXTS = tuple(f"Text {number} has a few words" + " more" * (number * 7 % 41) for number in range(64))
# How many rounds the trial has at least and at most; after TRIAL_S, no further one begins.
ROUNDS_MIN, ROUNDS_MAX, TRIAL_S = 3, 20, 4.0
# What serves meanwhile gets nine tenths of a processor that both want.
NICENESS = 10
# Memory that the export takes: torch and the exporter, and the weights several times over. MiniLM (87 MiB): 860 MiB.
EXPORT_BYTES, EXPORT_WEIGHTS_FACTOR = 600 << 20, 4


class Trial:
    """The trial of one model on this CPU at fp32. Its result has the facts "engine", one of ENGINES, and "trial"."""

    def __init__(self, spec: ModelSpec, settings: EngineSettings) -> None:
        """Read the model's files for the key of the result. Raises ModelFolderError."""
        self._spec = spec
        self._settings = settings
        self._artifacts = cache_of(settings, "trials of engines")
        self._export_key, self._content = export_key(spec, "onnx", "fp32")
        conditions = {
            "threads": str(settings.threads),
            "processor": processor_name(),
            "code": file_hash(Path(__file__)),
        }
        self._key = self._export_key | conditions

    def known(self) -> dict[str, str] | None:
        """The result of an earlier trial. None: there is none, or its engine would first have to export the model."""
        artifact = self._artifacts.find(KIND, self._key)
        if artifact is None:
            return None
        if artifact.facts["engine"] == "onnx" and self._artifacts.find(EXPORT, self._export_key) is None:
            return None
        return artifact.facts

    def run(self) -> dict[str, str]:
        """Run the trial, or wait for that of another process. Raises MemoryError, OSError, ModelFolderError."""
        return self._artifacts.get(KIND, self._key, self._build).facts

    def _build(self, _: Path) -> dict[str, str]:
        with self._artifacts.alone("trials"):  # exports of several models at once may take more memory than there is
            return self._measure()

    def _measure(self) -> dict[str, str]:
        needed = EXPORT_BYTES + EXPORT_WEIGHTS_FACTOR * weights_bytes(self._spec, 4)
        free = min(meminfo()["MemAvailable"], host_memory_bytes())
        if free < needed:
            raise MemoryError(f"the export takes {needed >> 20} MiB of memory, and {free >> 20} MiB are free")
        arguments = {
            "spec": self._spec.plain(),
            "threads": self._settings.threads,
            "artifacts": self._settings.artifacts,
            "artifacts_bytes_max": self._settings.artifacts_bytes_max,
        }
        threads = self._settings.threads
        facts: dict[str, str] = subprocess_call(
            f"{__name__}:measure", arguments, threads=threads, niceness=NICENESS
        )  # fmt: skip
        self._content.check()
        return facts


def measure(*, spec: dict[str, Any], threads: int, artifacts: str, artifacts_bytes_max: int) -> dict[str, str]:
    """The result of a trial. Runs in the subprocess."""
    model = ModelSpec.from_plain(spec)
    settings = EngineSettings(
        device="cpu", slots=1, threads=threads, artifacts=artifacts, artifacts_bytes_max=artifacts_bytes_max
    )
    try:
        backends = [load_backend(model, settings, Variant(engine=name, precision="fp32"))[0] for name in ENGINES]
    except SubprocessDiedError as error:  # perhaps not the next time
        raise MemoryError(str(error)) from error
    except ModelFolderError as error:
        return {"engine": "torch", "trial": f"onnx can't run it: {error}"}
    one, many = ([embedding(backend, TEXTS[:count]) for backend in backends] for count in (1, len(TEXTS)))
    expected, found = (embed() for embed in many)
    difference = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
    if not difference <= DIFFERENCE_MAX["fp32"]:  # also true for NaN
        return {"engine": "torch", "trial": f"onnx gives vectors that differ by {difference:.1e}"}
    milliseconds = np.array(costs_ms([*one, *many])).reshape(2, len(ENGINES))
    # The faster one for both kinds of calls: by the product of the two ratios.
    fastest = ENGINES[int(np.argmin(milliseconds.prod(axis=0)))]
    of_one, of_many = (", ".join(map("{} {:.3g} ms".format, ENGINES, row)) for row in milliseconds)
    return {"engine": fastest, "trial": f"1 text: {of_one}; {len(TEXTS)} texts: {of_many} (processor time)"}


def embedding(backend: EmbedBackend, texts: tuple[str, ...]) -> Callable[[], Vectors]:
    """A function that computes these texts as the engine would."""
    tokens = backend.text.tokenise(texts)
    micro_batches = cut(backend, tokens, np.arange(len(texts)))
    order = np.argsort(np.concatenate([each.places for each in micro_batches]))
    return lambda: np.concatenate([backend.embed(each.inputs) for each in micro_batches])[order]


def costs_ms(functions: list[Callable[[], Vectors]]) -> list[float]:
    """The least processor time that each of the functions took, called in turns. By the clock, what else the host does
    would decide.
    """
    taken: list[list[float]] = [[] for _ in functions]
    end = time.monotonic() + TRIAL_S
    for number in range(ROUNDS_MAX):
        if number >= ROUNDS_MIN and time.monotonic() > end:
            break
        for function, times in zip(functions, taken, strict=True):
            begin = time.process_time()
            function()
            times.append(1e3 * (time.process_time() - begin))
    return [min(times) for times in taken]

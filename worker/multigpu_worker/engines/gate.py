"""The accuracy gate: a model whose numbers were rounded hard serves only if it still says the same.

How much was lost is measured once, when the rounded model is made: against the vectors of fp32 on held-out texts
("cosine"), or by the ranks that it gives to pairs of texts whose likeness people have scored ("spearman", Spearman's
rank correlation in points of 100). The figure stays beside the model, and is judged whenever the model is loaded: a
stricter threshold in model.toml needs no new measurement. Who gave no data gets no such precision.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from multigpu.repository import ModelSpec

from multigpu_worker.engines.models import ModelFolderError

Vectors = npt.NDArray[np.float32]
# From texts to their vectors.
Embed = Callable[[Sequence[str]], Vectors]

METRICS = ("cosine", "spearman")
REMEDY = (
    'name files of JSON lines under [gate] in model.toml: calibration = texts as {"text": …}, held_out = others '
    'to judge by, for metric = "spearman" {"a": …, "b": …, "score": …}'
)
# Fewer say nothing.
HELD_OUT_MIN = 8


class GateRefusedError(ModelFolderError):
    """The model loses more at this precision than its threshold allows. The message has both figures."""

    # It would lose as much anywhere.
    retryable = False


def require(spec: ModelSpec, precision: str) -> None:
    """Raises ModelFolderError unless the model has what a precision that rounds hard is judged by."""
    missing = [name for name in ("calibration", "held_out") if not getattr(spec.gate, name)]
    if missing:
        raise ModelFolderError(f"{spec.id} has no {' and no '.join(missing)} data for {precision}: {REMEDY}")
    if spec.gate.calibration == spec.gate.held_out:
        raise ModelFolderError(f"{spec.id} is judged by what it is calibrated with, which proves nothing: {REMEDY}")
    if spec.gate.metric not in METRICS:
        raise ModelFolderError(f"{spec.id} has the gate's metric {spec.gate.metric!r}: known are {', '.join(METRICS)}")


def read_texts(path: Path) -> list[str]:
    """Texts of a file of JSON lines. Raises ModelFolderError."""
    return [str(value["text"]) for value in _read(path, ("text",))]


def measure(spec: ModelSpec, reference: Embed, candidate: Embed) -> dict[str, str]:
    """How near `candidate` is to `reference`, which is fp32, on the model's held-out data: figures for `judge`."""
    path = spec.folder / spec.gate.held_out
    if spec.gate.metric == "cosine":
        texts = read_texts(path)
        cosine = float(_cosines(reference(texts), candidate(texts)).mean())
        return {"metric": "cosine", "figure": f"{cosine:.5f}", "held-out": str(len(texts))}
    pairs = _read(path, ("a", "b", "score"))
    texts = [str(value[side]) for side in ("a", "b") for value in pairs]
    scores = np.array([float(value["score"]) for value in pairs])
    points = []
    for embed in (reference, candidate):
        vectors = embed(texts)
        points.append(100 * spearman(_cosines(vectors[: len(pairs)], vectors[len(pairs) :]), scores))
    return {
        "metric": "spearman",
        "figure": f"{points[1]:.4f}",
        "reference": f"{points[0]:.4f}",
        "held-out": str(len(pairs)),
    }


def judge(spec: ModelSpec, precision: str, figures: dict[str, str]) -> str:
    """What `measure` found, for people. Raises GateRefusedError if it is worse than the model's threshold."""
    figure, threshold = float(figures["figure"]), spec.gate.threshold
    if figures["metric"] == "cosine":
        passed = figure >= threshold
        said = f"mean cosine to fp32 {figure:.4f} on {figures['held-out']} held-out texts, {threshold:g} at least"
    else:
        lost = float(figures["reference"]) - figure
        passed = lost <= threshold
        said = (
            f"Spearman {figure:.2f} where fp32 has {float(figures['reference']):.2f} on {figures['held-out']} held-out "
            f"pairs: {lost:.2f} points lost, {threshold:g} at most"
        )
    if not passed:  # a NaN doesn't either
        raise GateRefusedError(
            f"{spec.id} at {precision} is refused by its accuracy gate: {said}. Take another int8_recipe, more "
            "calibration data, a higher precision, or another threshold in model.toml (docs/precision.md)"
        )
    return said


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _cosines(a: Vectors, b: Vectors) -> npt.NDArray[np.float64]:
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    sizes = np.linalg.norm(a64, axis=1) * np.linalg.norm(b64, axis=1)
    cosines: npt.NDArray[np.float64] = (a64 * b64).sum(axis=1) / np.maximum(sizes, 1e-12)
    return cosines


def _read(path: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines, all with these names."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} can't be read ({error}): {REMEDY}") from error
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if "score" in names:
                float(value["score"])
            values.append({name: value[name] for name in names})
        except (ValueError, TypeError, KeyError) as error:
            wanted = ", ".join(f'"{name}": …' for name in names)
            raise ModelFolderError(f"{path}, line {number}, is no {{{wanted}}} ({error!r}): correct it") from error
    if len(values) < HELD_OUT_MIN:
        raise ModelFolderError(f"{path} has {len(values)} lines, and fewer than {HELD_OUT_MIN} say nothing: add some")
    return values

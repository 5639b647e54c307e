"""The accuracy gate: a model quantised to int8 or fp8 is served only if its answers stay close to those of fp32.

The loss is measured once, when the quantised model is made, on held-out data: as the cosine to fp32's answers
("cosine"), for texts also as Spearman's rank correlation with scores by people, in points of 100 ("spearman"), for
classes also as the share of equal likeliest classes ("agreement"). The figure is kept with the model and judged at each
load, so a stricter threshold in model.toml needs no new measurement. Without data there is no int8 or fp8.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.common.tensors import Arrays
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

Vectors = npt.NDArray[np.float32]
# From texts to their vectors.
Embed = Callable[[Sequence[str]], Vectors]
# From inputs to outputs. The first dimension of each array counts the examples.
Compute = Callable[[Arrays], Arrays]

# Precisions that have to pass.
GATED = ("int8", "fp8")
# By kind of model.
METRICS = {"embed": ("cosine", "spearman"), "infer": ("cosine", "agreement")}
REMEDIES = {
    "embed": (
        'name files of JSON lines under [gate] in model.toml: calibration = texts as {"text": …}, held_out = others '
        'to judge by, for metric = "spearman" {"a": …, "b": …, "score": …}'
    ),
    "infer": (
        "name files of numpy.savez under [gate] in model.toml: calibration = an array of typical examples for each of "
        "the model's inputs, by its name; held_out = others to judge by"
    ),
}
# Fewer examples prove nothing.
HELD_OUT_MIN = 8
# Examples in one forward pass of the measurement.
EXAMPLES_MAX = 16


class AccuracyGateError(ModelFolderError):
    """The model loses more at this precision than its threshold allows. The message has both figures."""

    # The loss is the same on every worker.
    retryable = False


def require(spec: ModelSpec, precision: str) -> None:
    """Raises ModelFolderError unless the model has the data and the metric that its gate needs."""
    if spec.kind not in METRICS:
        raise ModelFolderError(f"{spec.id} is of kind {spec.kind}, which has no {precision}: use a higher precision")
    remedy = REMEDIES[spec.kind]
    missing = [name for name in ("calibration", "held_out") if not getattr(spec.gate, name)]
    if missing:
        raise ModelFolderError(f"{spec.id} has no {' and no '.join(missing)} data for {precision}: {remedy}")
    if spec.gate.calibration == spec.gate.held_out:
        raise ModelFolderError(f"{spec.id} is judged by what it is calibrated with, which proves nothing: {remedy}")
    known = METRICS[spec.kind]
    if spec.gate.metric not in known:
        raise ModelFolderError(
            f"{spec.id} has the gate's metric {spec.gate.metric!r}: {spec.kind} has {', '.join(known)}"
        )


def read_texts(path: Path) -> list[str]:
    """Read texts from JSON lines. Raises ModelFolderError."""
    return [str(value["text"]) for value in _read(path, ("text",))]


def read_arrays(path: Path, types: Mapping[str, str], rows: int | None = None) -> Arrays:
    """Read examples from a file of numpy.savez, for inputs of these names and NumPy types. Raises ModelFolderError.

    `rows`: the only number of examples that the model takes at once; a remainder is dropped.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: Arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ModelFolderError(f"{path} can't be read as arrays ({error}): {REMEDIES['infer']}") from error
    if set(arrays) != set(types):
        raise ModelFolderError(f"{path} has {sorted(arrays)}, and the inputs are {sorted(types)}: name the arrays so")
    for name, array in arrays.items():
        if not np.can_cast(array.dtype, types[name], "same_kind"):
            raise ModelFolderError(f"{path} has {name} of {array.dtype}, and the model takes {types[name]}: convert it")
        arrays[name] = array.astype(types[name], copy=False)
    counts = sorted({array.shape[0] if array.ndim else 0 for array in arrays.values()})
    least = max(HELD_OUT_MIN, rows or 0)
    if len(counts) != 1 or counts[0] < least:
        raise ModelFolderError(
            f"{path} has arrays of {' and '.join(map(str, counts))} examples (the first dimension): give all of them "
            f"the same number, at least {least}"
        )
    count = counts[0] - counts[0] % (rows or 1)
    return {name: array[:count] for name, array in arrays.items()}


def batches(arrays: Arrays, size: int) -> list[Arrays]:
    """Cut examples into batches of `size`; the last one may be smaller."""
    count = len(next(iter(arrays.values())))
    return [{n: a[start : start + size] for n, a in arrays.items()} for start in range(0, count, size)]


def measure(spec: ModelSpec, reference: Embed, candidate: Embed) -> dict[str, str]:
    """Compare `candidate` with `reference`, which is fp32, on held-out texts. Returns figures for `judge`."""
    path = spec.folder / spec.gate.held_out
    if spec.gate.metric == "cosine":
        texts = read_texts(path)
        cosine = float(cosines(reference(texts), candidate(texts)).mean())
        return {"metric": "cosine", "figure": f"{cosine:.5f}", "held-out": str(len(texts))}
    pairs = _read(path, ("a", "b", "score"))
    texts = [str(value[side]) for side in ("a", "b") for value in pairs]
    scores = np.array([float(value["score"]) for value in pairs])
    points = []
    for embed in (reference, candidate):
        vectors = embed(texts)
        points.append(100 * spearman(cosines(vectors[: len(pairs)], vectors[len(pairs) :]), scores))
    return {
        "metric": "spearman",
        "figure": f"{points[1]:.4f}",
        "reference": f"{points[0]:.4f}",
        "held-out": str(len(pairs)),
    }


def measure_arrays(
    spec: ModelSpec, held_out: Arrays, reference: Compute, candidate: Compute, examples: int = EXAMPLES_MAX
) -> dict[str, str]:
    """As `measure`, for kind infer, `examples` at a time. Of several outputs, the one with the largest loss counts.

    Raises ModelFolderError if an output has no row for each example, or no classes.
    """
    count = len(next(iter(held_out.values())))
    shares: dict[str, list[npt.NDArray[np.float64]]] = {}
    for inputs in batches(held_out, examples):
        size = len(next(iter(inputs.values())))
        wanted, given = reference(inputs), candidate(inputs)
        for name, truth in wanted.items():
            if truth.ndim == 0 or len(truth) != size or given[name].shape != truth.shape:
                raise ModelFolderError(
                    f"{spec.id} gives {name} {list(truth.shape)} for {size} examples: int8 and fp8 are for models that "
                    "give a row for each"
                )
            shares.setdefault(name, []).append(_similarity(spec, name, truth, given[name]))
    # Python's min would skip NaN.
    figure = float(np.min([np.concatenate(each).mean() for each in shares.values()]))
    return {"metric": spec.gate.metric, "figure": f"{figure:.5f}", "held-out": str(count)}


def _similarity(
    spec: ModelSpec, name: str, truth: npt.NDArray[Any], given: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """The similarity of each example, 1 being equal. NaN equals nothing."""
    if spec.gate.metric == "cosine":
        return cosines(truth.reshape(len(truth), -1), given.reshape(len(given), -1))
    if truth.ndim < 2 or truth.shape[-1] < 2:
        raise ModelFolderError(f'{spec.id} has no classes in the last dimension of {name}: take metric = "cosine"')
    same = (truth.argmax(-1) == given.argmax(-1)) & ~np.isnan(given).any(-1)
    shares: npt.NDArray[np.float64] = same.reshape(len(same), -1).mean(axis=1)
    return shares


def judge(spec: ModelSpec, precision: str, figures: dict[str, str]) -> str:
    """Describe the figures. Raises AccuracyGateError if they are worse than the model's threshold."""
    figure, threshold = float(figures["figure"]), spec.gate.threshold
    things = "texts" if spec.kind == "embed" else "examples"
    if figures["metric"] != "spearman":
        passed = figure >= threshold
        metric = "mean cosine to fp32" if figures["metric"] == "cosine" else "share of fp32's likeliest class"
        description = f"{metric} {figure:.4f} on {figures['held-out']} held-out {things}, {threshold:g} at least"
    else:
        lost = float(figures["reference"]) - figure
        passed = lost <= threshold
        description = (
            f"Spearman {figure:.2f} where fp32 has {float(figures['reference']):.2f} on {figures['held-out']} held-out "
            f"pairs: {lost:.2f} points lost, {threshold:g} at most"
        )
    if not passed:  # NaN does not pass
        recipe = "another int8_recipe, " if precision == "int8" else ""
        raise AccuracyGateError(
            f"{spec.id} at {precision} is rejected by its accuracy gate: {description}. Take {recipe}more "
            "calibration data, a higher precision, or another threshold in model.toml (docs/precision.md)"
        )
    return description


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def cosines(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The cosine between each row of `a` and the same row of `b`."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    sizes = np.linalg.norm(a64, axis=1) * np.linalg.norm(b64, axis=1)
    found: npt.NDArray[np.float64] = (a64 * b64).sum(axis=1) / np.maximum(sizes, 1e-12)
    return found


def _read(path: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Read objects with these names from JSON lines."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} can't be read ({error}): {REMEDIES['embed']}") from error
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

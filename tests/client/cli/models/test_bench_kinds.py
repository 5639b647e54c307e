"""mgpuctl bench with engines and handlers of a few lines: every kind of model, and how it ends before its time."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from multigpu.cli import cli

from tests.client.cli.fleet_up import MGPUCTL, ok, running
from tests.client.cli.models.test_infer import ENGINE
from tests.waiting import until

HANDLERS = """
import collections
import time
import multigpu

calls = collections.Counter()

@multigpu.handler("my.double")
def double(value):
    return {"n": 2 * value["n"]}

@multigpu.handler("my.stuck")
def stuck(value, context):
    calls[value] += 1
    while calls[value] > 8 and not context.cancelled:
        time.sleep(0.01)
"""
SHORT = ("--items", "16", "--rounds", "2", "--concurrency", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    for name, kind, cls in (("doubler", "infer", "Doubler"), ("letters", "classify", "Letters")):
        (folder / name).mkdir()
        (folder / name / f"{name}_engine.py").write_text(ENGINE)
        lines = [f'kind = "{kind}"', f'engine = "{name}_engine:{cls}"', 'source = "python"']
        (folder / name / "model.toml").write_text("\n".join(lines))
    (folder / "bench_handlers.py").write_text(HANDLERS)
    (folder / "lines.txt").write_text("abc\nbbc\nca\n")
    (folder / "numbers.txt").write_text('{"n": 1}\n{"n": 20}\n')
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    models = [word for name in ("doubler", "letters") for word in ("--model", f"{name}={folder / name}")]
    with running(folder, "--workers", "1", "--handlers", "bench_handlers", *models) as up:
        yield up.address


def row_of(address: str, folder: Path, *flags: str) -> dict[str, Any]:
    argv = ("bench", *flags, *SHORT, "--json")
    (row,) = json.loads(ok(address, *argv, cwd=folder))["rows"]
    assert row["plain_error"] == ""
    assert row["ratio"] > 0
    assert isinstance(row, dict)
    return row


def test_a_handler_and_its_baseline(address: str, folder: Path) -> None:
    row = row_of(address, folder, "--kind", "my.double", "--lines", "numbers.txt", "--parse-json")
    assert (row["kind"], row["model"], row["tasks"], row["items"]) == ("my.double", "", 32, 32)


def test_a_custom_engine_and_its_baseline(address: str, folder: Path) -> None:
    flags = ("doubler", "--input", "x=[[1,2],[3,4]]", "--batch-size", "4")
    row = row_of(address, folder, *flags)
    assert (row["kind"], row["tasks"], row["items"]) == ("infer", 8, 32)


def test_a_classifier_and_its_baseline(address: str, folder: Path) -> None:
    row = row_of(address, folder, "letters", "--texts", "lines.txt")
    assert (row["kind"], row["batch_size"]) == ("classify", 1)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["doubler"], 2, "infer takes arrays"),
        (["letters", "--batch-size", "4"], 2, "one example"),
        (
            ["letters", "--input", "x=[1]"],
            2,
            "the kind classify takes no --input, but --texts, --pictures",
        ),
        (["--kind", "my.double"], 2, "my.double needs an input"),
        (["letters", "--kind", "my.double", "--lines", "/dev/null"], 2, "nor does it need one"),
        (["--kind", "nothing", "--lines", "/dev/null"], 1, "no connected worker serves nothing; they serve: classify"),
        (["letters", "--texts", "/dev/null"], 1, "has no texts"),
        (["--kind", "my.double", "--lines", "/dev/null"], 1, "has no lines"),
        (["--kind", "my.double", "--lines", __file__, "--parse-json"], 1, "not JSON"),
    ],
)
def test_nonsense_is_reported_at_once(address: str, flags: list[str], status: int, words: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "--master", address, *flags])
    assert (done.exit_code, words in done.output) == (status, True), done.output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_results_before_an_interrupt_is_reported(
    address: str, folder: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """The handler never returns from the first task of the second row."""
    (tmp_path / "lines").write_text(f"{status}\n")
    flags = [
        "--kind",
        "my.stuck",
        "--lines",
        str(tmp_path / "lines"),
        "--items",
        "4",
        "--rounds",
        "1",
        "--concurrency",
        "1,2",
    ]
    argv = [*MGPUCTL, "bench", *flags, "--no-plain", "--json"]
    env = {**os.environ, "MGPU_MASTER": address}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=env) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "my.stuck: loading\n"
        assert "1 caller: " in process.stderr.readline()
        process.send_signal(number)
        said, remarks = process.communicate(timeout=60)
    assert process.returncode == status, remarks
    assert "ended early, with 1 of 2 rows measured" in remarks
    assert "Traceback" not in remarks
    found = json.loads(said)
    assert (found["complete"], [row["tasks"] for row in found["rows"]]) == (False, [4])

    def nothing_left() -> bool:
        flags = ["--master", address, "--kind", "my.stuck", "--json"]
        counts = json.loads(CliRunner().invoke(cli, ["tasks", "count", *flags]).stdout)
        return bool(counts["queued"] + counts["leased"] == 0)

    until(nothing_left)


def test_an_interrupt_before_the_first_row_still_prints_json(address: str, folder: Path, tmp_path: Path) -> None:
    """The warm-up of four callers meets the task from which the handler never returns."""
    (tmp_path / "lines").write_text("before the first row\n")
    flags = ["--kind", "my.stuck", "--lines", str(tmp_path / "lines"), "--concurrency", "4", "--no-plain", "--json"]
    env = {**os.environ, "MGPU_MASTER": address}
    pipe = subprocess.PIPE
    with subprocess.Popen([*MGPUCTL, "bench", *flags], stdout=pipe, stderr=pipe, text=True, env=env) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "my.stuck: loading\n"
        process.send_signal(signal.SIGINT)
        said, remarks = process.communicate(timeout=60)
    assert process.returncode == 130, remarks
    found = json.loads(said)
    assert (found["complete"], found["rows"]) == (False, [])
    assert "ended early, with 0 of 1 rows measured" in remarks

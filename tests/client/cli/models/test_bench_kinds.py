"""mgpuctl bench with engines of a few lines: every kind of model, and how it ends before its time."""

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

from tests.client.cli.fleet_up import MGPUCTL, children_of, ok, running
from tests.client.cli.models.test_infer import ENGINE
from tests.waiting import until

pytestmark = pytest.mark.slow
STUCK = (
    ENGINE
    + """
import collections
import time

calls = collections.Counter()

class Stuck(Base):
    '''Answers each payload until the end of a first row (loading: 128 tasks; then 2 and 4), then never returns.'''
    one_by_one = True

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            reporter.begin(item)
            calls[item.payload] += 1
            while calls[item.payload] > 134 and not reporter.cancelled(item):
                time.sleep(0.01)
            reporter.succeed(item, result(np.ones(1, np.float32), ["a"], 1, ""))
"""
)
MODELS = (("doubler", "infer", "Doubler"), ("letters", "classify", "Letters"), ("stuck", "classify", "Stuck"))
SHORT = ("--items", "16", "--rounds", "2", "--concurrency", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    for name, kind, cls in MODELS:
        (folder / name).mkdir()
        (folder / name / f"{name}_engine.py").write_text(STUCK)
        lines = [f'kind = "{kind}"', f'engine = "{name}_engine:{cls}"', 'source = "python"']
        (folder / name / "model.toml").write_text("\n".join(lines))
    (folder / "lines.txt").write_text("abc\nbbc\nca\n")
    (folder / "pictures").mkdir()
    for name in "abc":
        (folder / "pictures" / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    models = [word for name, _, _ in MODELS for word in ("--model", f"{name}={folder / name}")]
    with running(folder, "--workers", "1", *models) as up:
        yield up.address


def row_of(address: str, folder: Path, *flags: str) -> dict[str, Any]:
    argv = ("bench", *flags, *SHORT, "--json")
    found = json.loads(ok(address, *argv, cwd=folder))
    (row,) = found["rows"]
    assert found["plain_error"] == ""
    assert row["ratio"] > 0
    assert isinstance(row, dict)
    return row


def test_a_custom_engine_and_its_baseline(address: str, folder: Path) -> None:
    flags = ("doubler", "--input", "x=[[1,2],[3,4]]", "--batch-size", "4")
    row = row_of(address, folder, *flags)
    assert (row["model"], row["tasks"], row["items"]) == ("doubler", 8, 32)


@pytest.mark.parametrize("flag", ["--texts", "--pictures"])
def test_a_classifier_and_its_baseline(address: str, folder: Path, flag: str) -> None:
    model, path = ("letters", "lines.txt") if flag == "--texts" else ("stuck", "pictures")
    row = row_of(address, folder, model, flag, path)
    assert (row["model"], row["batch_size"], row["tasks"]) == (model, 1, 32)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["doubler"], 2, "for a model of the kind infer give --input"),
        (["letters", "--batch-size", "4"], 2, "one example"),
        (["letters", "--input", "x=[1]"], 2, "classify give --pictures or --texts, not --input"),
        (
            ["letters", "--texts", "a", "--pictures", "/dev/null"],
            2,
            "give --pictures or --texts, not --texts and --pic",
        ),
        (["lettres"], 2, "no worker serves the model 'lettres'; there are: "),
        (["letters", "--texts", "/dev/null"], 1, "has no texts"),
        (["letters", "--texts", "/nowhere"], 1, "can't read /nowhere"),
        (["letters", "--concurrency", "0"], 2, "1 to 10,000"),
    ],
)
def test_nonsense_is_reported_at_once(address: str, flags: list[str], status: int, words: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "--master", address, *flags])
    assert (done.exit_code, words in done.output) == (status, True), done.output


def started(address: str, *flags: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "MGPU_MASTER": address}
    pipe = subprocess.PIPE
    return subprocess.Popen([*MGPUCTL, "bench", *flags], stdout=pipe, stderr=pipe, text=True, env=env)


def wait_for(words: str, process: "subprocess.Popen[str]") -> None:
    """Reads remarks until one has these words: there may be one about a busy host first."""
    assert process.stderr is not None
    seen: list[str] = []
    while not (seen and words in seen[-1]):
        seen.append(process.stderr.readline())
        assert seen[-1], seen


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_results_before_an_interrupt_is_reported(
    address: str, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """The engine never returns from the first task of the second row."""
    (tmp_path / "lines").write_text(f"{status}\n")
    flags = ["--texts", str(tmp_path / "lines"), "--items", "4", "--rounds", "1", "--concurrency", "1,2", "--json"]
    with started(address, "stuck", *flags) as process:
        wait_for("1 caller: ", process)
        process.send_signal(number)
        said, remarks = process.communicate(timeout=400)
    assert process.returncode == status, remarks
    assert "ended early, with 1 of 2 rows measured" in remarks
    assert "Traceback" not in remarks
    found = json.loads(said)
    assert (found["complete"], [row["tasks"] for row in found["rows"]]) == (False, [4])

    def nothing_left() -> bool:
        flags = ["--master", address, "--kind", "classify", "--json"]
        counts = json.loads(CliRunner().invoke(cli, ["tasks", "count", *flags]).stdout)
        return bool(counts["queued"] + counts["leased"] == 0)

    until(nothing_left)


def test_an_interrupt_before_the_first_row_still_prints_json(address: str, tmp_path: Path) -> None:
    """The warm-up of four callers meets the task from which the engine never returns."""
    (tmp_path / "lines").write_text("before the first row\n")
    with started(address, "stuck", "--texts", str(tmp_path / "lines"), "--concurrency", "4", "--json") as process:
        wait_for("stuck: loading", process)
        process.send_signal(signal.SIGINT)
        said, remarks = process.communicate(timeout=400)
    assert process.returncode == 130, remarks
    found = json.loads(said)
    assert (found["complete"], found["rows"]) == (False, [])
    assert "ended early, with 0 of 1 rows measured" in remarks


def test_a_baseline_that_dies_ends_it_with_the_complete_rows(address: str, folder: Path) -> None:
    flags = ["--texts", str(folder / "lines.txt"), "--items", "64", "--rounds", "50", "--concurrency", "1,2"]
    with started(address, "letters", *flags, "--json") as process:
        wait_for("1 caller: ", process)
        (baseline,) = children_of(process.pid)
        os.kill(baseline, signal.SIGKILL)
        said, remarks = process.communicate(timeout=400)
    assert process.returncode == 1, remarks
    assert "the baseline ended (exit code -9)" in remarks
    assert "Traceback" not in remarks
    found = json.loads(said)
    assert (found["complete"], len(found["rows"])) == (False, 1)

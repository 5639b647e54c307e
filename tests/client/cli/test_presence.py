"""What commands say while a model loads, and what they reject before a task is sent."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.cli.fleet_up import MGPUCTL, mgpuctl, running

ENGINE = """
import time
from pathlib import Path
from multigpu.v1 import classify_pb2 as pb
from multigpu_worker.engines.base import ModelEngine

class Slow(ModelEngine):
    one_by_one = True

    def load(self):
        while not Path("loaded").exists():
            time.sleep(0.01)
        return {}

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            reporter.begin(item)
            found = pb.ClassifyResult(classes=[pb.ClassScore(index=3, label="good", score=1)])
            reporter.succeed(item, found.SerializeToString())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "slow").mkdir()
    (folder / "slow" / "slow_engine.py").write_text(ENGINE)
    (folder / "slow" / "model.toml").write_text('kind = "classify"\nengine = "slow_engine:Slow"\nsource = "python"\n')
    (folder / "lines.txt").write_text("text\n")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with running(folder, "--workers", "1", "--model", f"slow={folder / 'slow'}") as up:
        yield up.address


def test_a_command_says_which_worker_loads_its_model(address: str, folder: Path) -> None:
    argv = [*MGPUCTL, "classify", "--master", address, "--text", "slow", str(folder / "lines.txt")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline().startswith("loading slow on ")
        (folder / "loaded").touch()
        assert process.stdout.read() == "text\t1.000000\t3\tgood\n", process.stderr.read()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["generate", "hello"], 1, "no connected worker serves generate; they serve: classify, echo"),
        (["submit", "--kind", "echo", "--model", "m", "--payload", "x"], 2, "the kind 'echo' takes no model"),
        (["submit", "--kind", "ecko", "--payload", "x"], 1, "or set --wait-for-worker to queue"),
        (["submit", "--kind", "ecko", "--payload", "x", "--wait"], 1, "or set --wait-for-worker to queue"),
        (["tasks", "list", "--queue", "nihgt"], 0, "no queue 'nihgt' has tasks or rules"),
        (["tasks", "count", "--queue", "nihgt"], 0, "no queue 'nihgt' has tasks or rules"),
        (["dead-letters", "list", "--queue", "nihgt"], 0, "no queue 'nihgt' has tasks or rules"),
        (["dead-letters", "requeue", "--queue", "nihgt"], 0, "no queue 'nihgt' has tasks or rules"),
        (["dead-letters", "delete", "--yes", "--queue", "nihgt"], 0, "no queue 'nihgt' has tasks or rules"),
        (["tasks", "list", "--queue", "night", "--state", "leased"], 0, "no such tasks"),
        (["--version"], 0, ""),
    ],
)
def test_what_is_wrong_is_reported_at_once(address: str, argv: list[str], status: int, words: str) -> None:
    mgpuctl(address, "submit", "--kind", "echo", "--payload", "x", "--queue", "night", "--request-id", "one")
    done = mgpuctl(address, *argv)
    assert (done.returncode, words in done.stderr + done.stdout) == (status, True), done

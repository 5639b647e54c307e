"""docs/tutorial.md: its model is trained, its unit test passes, and its program prints what it states."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from multigpu.cli import cli
from multigpu.config.config import ClientConfig, MasterConfig, WorkerConfig, load

from tests.docs.pages import DOCS, blocks, fleet_of, printed, start, stated

PAGE = (DOCS / "tutorial.md").read_text("utf-8")
TRAIN, HANDLERS, UNIT_TEST, PROGRAM = blocks("tutorial.md")


@pytest.mark.slow
def test_the_model_of_the_tutorial_is_trained_tested_and_served(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `worker` is not installed")
    (tmp_path / "train.py").write_text(TRAIN, "utf-8")
    (tmp_path / "my_handlers.py").write_text(HANDLERS, "utf-8")
    (tmp_path / "test_my_handlers.py").write_text(UNIT_TEST, "utf-8")
    unit_test = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_my_handlers.py"]
    for arguments in (["train.py"], unit_test):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    with fleet_of(tmp_path, HANDLERS) as fleet:
        start(fleet)
        assert printed(fleet, PROGRAM, tmp_path) == stated(PROGRAM)
        assert len(stated(PROGRAM)) == 3
        assert not fleet.faults()


def test_the_commands_of_the_tutorial_exist() -> None:
    named = set(re.findall(r"mgpuctl ([a-z-]+(?: (?:issue|create|limits|explain|list|requeue|reload)\b)?)", PAGE))
    assert len(named) > 8
    for words in named:
        done = CliRunner().invoke(cli, [*words.split(), "--help"], prog_name="mgpuctl")
        assert done.exit_code == 0, words


def test_the_settings_of_the_tutorial_exist(tmp_path: Path) -> None:
    settings = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "config.toml"
    path.write_text("\n".join(settings), "utf-8")
    assert len(settings) == 3
    assert load(WorkerConfig, file=path, env={}).config.handlers == ("my_handlers",)
    assert load(MasterConfig, file=path, env={}).config.metrics_listen == "127.0.0.1:9464"
    assert load(ClientConfig, file=path, env={}).config.master == "gpu1:7433"


def test_the_metrics_of_the_tutorial_are_documented_names() -> None:
    sources = (DOCS.parent / "master" / "multigpu_master").rglob("*.py")
    text = "\n".join(path.read_text("utf-8") for path in sources)
    named = re.findall(r"^\| `(mgpu_\w+)", PAGE, re.MULTILINE)
    assert len(named) == 5
    assert [name for name in named if f'"{name}"' not in text] == []

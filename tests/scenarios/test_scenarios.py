"""Golden scripts: commands above `----`, what the core answers beneath. `MGPU_REWRITE=1` writes the answers anew; the
diff is what is reviewed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.stage import Stage

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


def play(text: str) -> Iterator[str]:
    """The script with its answers."""
    stage = Stage()
    for block in text.strip().split("\n\n"):
        commands = block.split("\n----")[0]
        yield commands
        answers = [a for line in commands.splitlines() if not line.startswith("#") for a in stage.run(line)]
        if any(not line.startswith("#") for line in commands.splitlines()):
            yield "\n".join(["----", *answers])
        yield ""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text("utf-8")
    played = "\n".join(play(text)).strip() + "\n"
    if os.environ.get("MGPU_REWRITE") == "1":
        path.write_text(played, "utf-8")
    assert played == text

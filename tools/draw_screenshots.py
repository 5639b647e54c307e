"""Draws docs/images: what `mgpuctl gpus`, `top` and `doctor` show of a fleet of four simulated GPUs with work, and the
plot of `mgpuctl bench` with the packaged model on this host's processor.

    python tools/draw_screenshots.py

It needs the packages that tools/test.sh installs, and a C compiler for the simulated driver.
"""

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fakes.gpus import SimulatedGpus  # noqa: E402
from tests.fleet import Fleet  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 130, 36
# How much memory and work each simulated GPU has.
LOADS = ((61 << 30, 93), (58 << 30, 88), (22 << 30, 41), (9 << 30, 12))


def screen(arguments: list[str], env: dict[str, str]) -> str:
    """What the command writes to a terminal of WIDTH columns."""
    here, there = pty.openpty()
    size = {"COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "multigpu.cli", *arguments]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=there, stderr=quiet, env=os.environ | env | size):
        os.close(there)
        written = b""
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # the command has ended
                break
            written += part
    os.close(here)
    return written.decode()


def draw(name: str, title: str, text: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(text.replace("\r\n", "\n").rstrip()))
    svg = console.export_svg(title=title, clear=False, unique_id=name)
    # With the fonts of the reader's host: the page loads none from elsewhere.
    (IMAGES / f"{name}.svg").write_text(re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL), "utf-8")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gpus = SimulatedGpus(folder / "gpus", 4)
        with Fleet(folder / "fleet", workers=0, env=gpus.env()) as fleet:
            for i in range(4):
                fleet.start_worker(f"gpu1-{i}", "--device", f"cuda:{i}", "--slots", "2")
            fleet.wait_for_workers()
            with fleet.client() as client:
                client.submit_many("sleep", [b"20"] * 12, queue="nightly")
                client.submit_many("sleep", [b"20"] * 5, queue="interactive", priority=1)
            for i, (used_bytes, busy) in enumerate(LOADS):
                gpus.process(i, os.getpid(), used_bytes, sm_utilization=busy)
            gpus.xid(3, 63)
            time.sleep(3)  # several heartbeats
            env = gpus.env() | {"MGPU_MASTER": fleet.address}
            for name in ("gpus", "top", "doctor"):
                draw(name, f"mgpuctl {name}", screen([name], env))
        with Fleet(folder / "of processors", workers=2) as fleet:
            plot = ["bench", "--master", fleet.address, "--plot", str(IMAGES / "bench.png")]
            subprocess.run([sys.executable, "-m", "multigpu.cli", *plot], check=True)


if __name__ == "__main__":
    main()

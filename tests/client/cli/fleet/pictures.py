"""Pictures of `mgpuctl top` and of the tables: `python -m tests.client.cli.fleet.pictures FOLDER`.

SVG by rich, of made-up fleets; to be looked at. Where cairosvg is installed, PNG beside it.
"""

import importlib.util
import io
import sys
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from multigpu.cli.fleet import gpus
from multigpu.cli.top import frame as top_frame
from multigpu.cli.top.state import Pane, View, press
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from rich.console import Console

from tests.client.cli.fleet.fleet_samples import ago, cpu_worker, large_fleet


def view_of(count: int, tasks: int = 30) -> View:
    workers = large_fleet(count) if count else [cpu_worker(), cpu_worker("box-cpu-1")]
    queues = [
        admin.Queue(queue="default", queued=12_345, queued_bytes=3 << 20, leased=64, oldest_age=Duration(seconds=75)),
        admin.Queue(queue="night", paused=True, queued=1_000_000, queued_bytes=9 << 30, strategy="least_loaded"),
        admin.Queue(queue="interactive", leased=3),
    ]
    running = [
        task_pb2.Task(
            task_id=9_000_000 + i,
            spec=task_pb2.TaskSpec(kind="embed", queue="default"),
            submit_time=ago(i * 3),
            attempts=1 + i % 3 // 2,
            worker_id=workers[i % len(workers)].worker_id,
        )
        for i in range(tasks)
    ]
    stats = admin.GetStatsResponse(
        version="0.1.0", start_time=ago(7810), queued=12_345, leased=67, succeeded=4_567_890, failed=12,
        dead_lettered=3, strategy="auto", journal_writable=True,
    )  # fmt: skip
    return View(
        address="10.0.0.7:7433",
        workers={w.worker_id: w for w in workers},
        queues=queues,
        tasks=running,
        stats=stats,
        rate=1234.0,
    )


def drawn(view: View, width: int, height: int) -> Console:
    """A console that has the frame recorded."""
    console = Console(
        file=io.StringIO(), record=True, width=width, height=height, force_terminal=True, color_system="truecolor"
    )
    console.print(top_frame.frame(view, width, height), end="")
    return console


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Console] = {}
    for count in (0, 8, 64):
        for width, height in ((80, 24), (120, 40)):
            pictures[f"top-{count}-{width}x{height}"] = drawn(view_of(count), width, height)
    view = view_of(64)
    view.stats.breaker.tripped = True  # type: ignore[union-attr]  # view_of gives it
    press(view, "end")
    press(view, "d")
    pictures["top-drain"] = drawn(view, 80, 24)
    view = view_of(8)
    view.pane = Pane.TASKS
    press(view, "?")
    pictures["top-help"] = drawn(view, 80, 24)
    for count, width in ((8, 80), (8, 120), (64, 120)):
        console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
        console.print("\n".join(gpus.lines(large_fleet(count), width)), markup=False)
        pictures[f"gpus-{count}-{width}"] = console
    for name, console in pictures.items():
        svg = console.export_svg(title=name)
        (folder / f"{name}.svg").write_text(svg, "utf-8")
        if importlib.util.find_spec("cairosvg") is not None:
            import cairosvg

            cairosvg.svg2png(
                bytestring=svg.replace("Fira Code", "DejaVu Sans Mono").encode(),
                write_to=str(folder / f"{name}.png"),
                output_width=1400,
            )
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()

"""`mgpuctl energy run`: measures the energy that a model takes on this host."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console

from multigpu import _extras
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.energy.devices import ask_host, parse_settings, settings_option
from multigpu.cli.energy.report import check_matplotlib, check_writable, facts_of, html_of, plot_of, remarks_on, write
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.options import Number, json_option

PHASES = {
    "load": "loading the model",
    "idle": "measuring the idle devices",
    "warm-up": "warming up",
    "measured": "measuring",
}
# The last line of the process's stderr is read from its last bytes.
STDERR_END_BYTES = 64 << 10


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl energy run config.yaml", "Until the energy of a request is known to 5 %, after 60 s at least."),
        ("mgpuctl energy run config.yaml --html report.html", "With a page that shows power over time."),
        ("mgpuctl energy run config.yaml --set backend.device=cpu", "Other settings than the file's."),
    ),
    exits=(("1", "A GPU is unavailable, or requests fail."), ("2", "The configuration is wrong.")),
)
@click.argument("config", type=click.Path(path_type=Path))
@settings_option
@click.option("--idle", "idle_s", type=Number(min=1), default=10, show_default=True, help="Seconds without work.")
@click.option(
    "--least", "least_s", type=Number(min=2), default=60, show_default=True, help="Measured seconds, at least."
)
@click.option("--most", "most_s", type=Number(min=2), default=600, show_default=True, help="Repetitions end after it.")
@click.option(
    "--width", "percent", type=Number(min=0.1, max=100), default=5, show_default=True,
    help="Repeat until half the 95 % interval of a request's energy is at most this many percent.",
)  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a report for a browser.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw power over time into a PNG file.")
@json_option
def run(
    config: Path, settings: tuple[str, ...], idle_s: float, least_s: float, most_s: float, percent: float,
    html: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a benchmark on this host, and measure its energy.

    The devices are measured idle, with the model loaded; then the model is warmed up; then the prompts run again and
    again until the energy of a request is known. Energy comes from the devices' counters, else from sampled power, with
    its uncertainty. The row goes to the CSV file of the configuration (reporter.output_file), the whole result to a
    JSON file in its output_dir, which `energy report` and `energy compare` read.
    """
    if html or plot:
        check_matplotlib()
    check_writable(html, plot)
    overrides = parse_settings(settings)
    checked = ask_host("check", str(config), *overrides)
    for key, reason in checked["unsupported"].items():
        show.note(f"{key} is not followed: {reason}")
    if checked["errors"]:
        gone = "; ".join(f"cuda:{index}: {error}" for index, error in checked["errors"].items())
        raise Failure(f"not all GPUs are available: {gone}")
    check_writable(Path(checked["output_file"]), Path(checked["output_dir"], "result.json"))
    length = {"idle_s": idle_s, "least_s": least_s, "most_s": max(most_s, least_s), "width": percent / 100}
    result = _result_of([str(config), json.dumps(length), *overrides])
    path = _save(checked["output_dir"], result)
    if html:
        write(html, html_of(result))
    if plot:
        write(plot, plot_of(result, "png"))
    if as_json:
        show.value({**result, "file": str(path)})
    else:
        show.facts([*facts_of(result), ("Result", str(path))])
        for remark in remarks_on(result):
            show.note(remark)


def _result_of(arguments: list[str]) -> dict[str, Any]:
    """Runs the benchmark in a process of its own, and shows its progress. Ctrl-C ends both."""
    if error := _extras.missing("mgpuctl energy", "worker"):
        sys.exit(error)
    argv = [sys.executable, "-m", "multigpu_worker.energy.main", "run", *arguments]
    console, phase, line = Console(stderr=True), "", ""
    with (
        # Not a pipe: the process would block once it is full, because stderr is read at the end only.
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0) as process,
    ):
        assert process.stdout is not None
        try:
            with console.status("starting") as status:
                for line in process.stdout:
                    event = json.loads(line)
                    if "phase" not in event:
                        return event  # type: ignore[no-any-return]
                    if event["phase"] != phase:
                        phase = event["phase"]
                        if not console.is_terminal:
                            show.note(PHASES[phase])
                    status.update(_progress(event))
            returncode = process.wait()
            problem = _last_line(stderr) or "the benchmark ended without a result"
            raise (WrongUsage if returncode == WrongUsage.exit_code else Failure)(problem)
        finally:
            process.send_signal(signal.SIGKILL)


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_END_BYTES))
    return (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]


def _progress(event: dict[str, Any]) -> str:
    text = PHASES[event["phase"]]
    if event["phase"] == "measured":
        return f"{text}: {event['done']:.0f} s, at least {event['of']:.0f} s"
    return f"{text}: {event['done']:.0f} of {event['of']:.0f}" if event["of"] else text


def _save(folder: str, result: dict[str, Any]) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = Path(folder) / f"{result['config']['name']}-{stamp}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")
    except OSError as error:
        raise Failure(f"can't write {path}: {error.strerror}") from error
    return path

"""`mgpuctl energy report`: a result as a table, a picture or a page."""

import html
import importlib.util
import io
import json
import os
from pathlib import Path
from typing import Any

import click

from multigpu._units import format_duration, format_energy
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.options import json_option

SENSORS = {"counter": "energy counter", "sampled_power": "sampled power", None: "not measured"}
COLORS = {"load": "#9aa5b1", "idle": "#b8d8ba", "warm-up": "#ffd97d", "measured": "#9ad1f5"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c1f23 }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid #cbd2d9 }
svg { max-width: 100%; height: auto } .note { color: #52606d }
"""


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl energy report result.json", "Its figures."),
        ("mgpuctl energy report result.json --html report.html", "A page with power over time."),
    ),
)
@click.argument("result", type=click.Path(path_type=Path))
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write a report for a browser.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw power over time into a PNG file.")
@json_option
def report(result: Path, page: Path | None, plot: Path | None, as_json: bool) -> None:
    """Show the result of `energy run` again."""
    found = load_result(result)
    if page or plot:
        check_matplotlib()
    if page:
        write(page, html_of(found))
    if plot:
        write(plot, plot_of(found, "png"))
    if as_json:
        show.value(found)
    else:
        show.facts(facts_of(found))
        for remark in remarks_on(found):
            show.note(remark)


def load_result(path: Path) -> dict[str, Any]:
    """A result of `energy run`. Raises WrongUsage."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["multigpu"]["blocks"]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUsage(f"can't read {path}: {error}") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise WrongUsage(f"{path} is not a result of `mgpuctl energy run`") from error
    return found


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongUsage("pictures need matplotlib: pip install 'multigpu[plot]'")


def check_writable(*paths: Path | None) -> None:
    """Raises WrongUsage for a file that can't be written, before a long run; None is no file."""
    for path in filter(None, paths):
        nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
        if path.is_dir() or not (nearest == path or nearest.is_dir()) or not os.access(nearest, os.W_OK):
            raise WrongUsage(f"can't write {path}: {nearest} is {'a folder' if path.is_dir() else 'not writable'}")


def write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise Failure(f"can't write {path}: {error.strerror}") from error


def facts_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, text), without what is not known."""
    summary, ours = result["summary"], result["multigpu"]
    seconds = summary["total_duration_seconds"]
    low, high = ours["joules_per_request_low"], ours["joules_per_request_high"]
    each = format_energy(ours["joules_per_request"]) if ours["joules_per_request"] is not None else ""
    if low is not None:
        each += f" (95 %: {format_energy(low)} to {format_energy(high)})"
    token = ours["joules_per_completion_token"]
    facts = [
        ("Model", f"{result['config']['model']} on {result['config']['backend']}"),
        ("Measured", f"{format_duration(seconds)}, {len(ours['blocks'])} blocks"),
        ("Requests", f"{summary['successful_prompts']:,} succeeded, {summary['failed_prompts']:,} failed"),
        ("Tokens", f"{summary['total_prompt_tokens']:,} read, {summary['total_completion_tokens']:,} generated"),
        ("Rate", f"{summary['total_completion_tokens'] / seconds:,.3g} generated tokens a second"),
        ("Latency", format_duration(summary["avg_latency_seconds"])),
        ("First token", f"after {format_duration(summary['avg_time_to_first_token'])}"),
        ("Energy", _with_error(ours["energy"])),
        ("  idle part", _with_error(ours["idle_energy"])),
        ("  without it", _with_error(ours["energy_without_idle"])),
        ("Power", f"{ours['mean_watts']:,.0f} W, idle {ours['idle_watts']:,.0f} W" if ours["mean_watts"] else ""),
        ("A request", each),
        ("A token", format_energy(token) if token is not None else ""),
        ("Prefill", _with_error(ours["prefill"])),
        ("Decode", _with_error(ours["decode"])),
    ]
    devices = [(f"{each['name']}", _device(each)) for each in ours["devices"]]
    return [fact for fact in (*facts, *devices) if fact[1]]


def _with_error(energy: dict[str, Any]) -> str:
    if energy["joules"] is None:
        return ""
    share = energy["uncertainty_joules"] / abs(energy["joules"]) if energy["joules"] else 0.0
    error = f"{share:.0%}" if share <= 1 else format_energy(energy["uncertainty_joules"])
    return f"{format_energy(energy['joules'])} ± {error}"


def _device(device: dict[str, Any]) -> str:
    throttled = f", throttled: {', '.join(device['throttle_reasons'])}" if device["throttle_reasons"] else ""
    simulated = ", simulated" if device["simulated"] else ""
    energy = f": {_with_error(device['energy'])}" if device["energy"]["joules"] is not None else ""
    return f"{device['product']}, {SENSORS[device['method']]}{energy}{throttled}{simulated}"


def remarks_on(result: dict[str, Any]) -> list[str]:
    """What a reader should know before he believes the figures."""
    ours, remarks = result["multigpu"], []
    if ours["energy"]["joules"] is None:
        remarks.append(
            "energy was not measured: a device reports neither its energy nor its power (a CPU's counter, RAPL, must "
            "be readable in /sys/class/powercap)"
        )
    elif not ours["converged"]:
        remarks.append(
            f"the energy of a request is not known to {ours['length']['width']:.0%}: give more time (--most)"
        )
    if ours["energy"]["joules"] is not None and ours["prefill"]["joules"] is None:
        remarks.append("prefill and decode can't be told apart: requests overlap, or are too short for the sensors")
    if any(device["simulated"] for device in ours["devices"]):
        remarks.append("the devices are simulated")
    return remarks


def plot_of(result: dict[str, Any], form: str) -> bytes:
    """Power of each device over time, with the phases. `form`: "png" or "svg"."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra, and slow to import)

    ours = result["multigpu"]
    figure = Figure(figsize=(11, 7), layout="constrained")
    power, use, clock = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    for device in ours["devices"]:
        series = device["series"]
        times = series["time_s"]
        lines = (power, "power_watts", 1), (use, "utilization", 100), (clock, "sm_clock_hertz", 1e-6)
        for axes, name, factor in lines:
            values = [float("nan") if value is None else value * factor for value in series[name]]
            if any(value is not None for value in series[name]):
                axes.plot(times, values, label=device["name"], linewidth=1)
    for axes, title in ((power, "power, W"), (use, "utilisation, %"), (clock, "SM clock, MHz")):
        for phase in ours["phases"]:
            axes.axvspan(phase["begin_s"], phase["end_s"], color=COLORS[phase["name"]], alpha=0.35, linewidth=0)
        axes.set(ylabel=title)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if not axes.lines:
            axes.text(0.5, 0.4, "not measured", transform=axes.transAxes, ha="center", color="#52606d")
    for phase in ours["phases"]:
        middle_s = (phase["begin_s"] + phase["end_s"]) / 2
        at = (middle_s, 1.02)
        power.annotate(phase["name"], at, xycoords=("data", "axes fraction"), ha="center", fontsize="small")
    if power.lines:
        power.legend(fontsize="small", loc="lower right")
    clock.set(xlabel="seconds")
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=120)
    return out.getvalue()


def html_of(result: dict[str, Any]) -> bytes:
    """A page that needs nothing else."""
    facts = "".join(_row("th", label) + _row("td", text) + "</tr>" for label, text in facts_of(result))
    notes = "".join(f'<p class="note">{html.escape(remark)}</p>' for remark in remarks_on(result))
    heads = "".join(f"<th>{name}</th>" for name in ("Begin", "Took", "Requests", "Tokens", "Energy"))
    blocks = "".join("<tr>" + "".join(f"<td>{each}</td>" for each in _block(b)) for b in result["multigpu"]["blocks"])
    picture = plot_of(result, "svg").decode()
    title = html.escape(f"Energy of {result['config']['name']}")
    when = html.escape(f"{result['timestamp']} on {result['multigpu']['host']}")
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>
<body><h1>{title}</h1><p class="note">{when}</p><table>{facts}</table>{notes}
<h2>Power over time</h2>{picture[picture.index("<svg") :]}
<h2>Blocks of the measured phase</h2><table><tr>{heads}</tr>{blocks}</table></body></html>
"""
    return page.encode()


def _row(tag: str, text: str) -> str:
    return f"{'<tr>' if tag == 'th' else ''}<{tag}>{html.escape(text)}</{tag}>"


def _block(block: dict[str, Any]) -> tuple[str, ...]:
    energy = "-" if block["joules"] is None else format_energy(block["joules"])
    begin, took = f"{block['begin_s']:.1f} s", f"{block['end_s'] - block['begin_s']:.1f} s"
    return begin, took, str(block["requests"]), str(block["completion_tokens"]), energy

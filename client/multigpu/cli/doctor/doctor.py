"""`mgpuctl doctor`: is this host fit for its work? Each check has a verdict, and a remedy where it needs one.

The checks are functions from a Place to findings, in three files: gpu.py, host.py, fleet.py.
Nothing is changed on the host; the only file that is written is a small one in the data folder, to time an fsync.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.doctor import fleet as doctor_fleet
from multigpu.cli.doctor import gpu as doctor_gpu
from multigpu.cli.doctor import host as doctor_host
from multigpu.cli.doctor.base import Check, Finding, Place, Verdict, fail
from multigpu.cli.failures import WARNINGS, Failure
from multigpu.cli.options import client_config, config_option, json_option, load_config, master_option
from multigpu.cli.rpc import Master
from multigpu.cli.text import clean_lines
from multigpu.config import config

CHECKS: tuple[Check, ...] = (*doctor_gpu.CHECKS, *doctor_host.CHECKS, *doctor_fleet.CHECKS)
STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "bright_black"}


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl doctor", "Everything about this host and the fleet."),
        ("mgpuctl doctor --json | jq '.checks[] | select(.verdict == \"fail\")'", "What fails, for programs."),
        ("sudo -u multigpu mgpuctl doctor", "As the user that the services run as."),
    ),
    exits=(
        ("0", "No check fails."),
        ("1", "A check fails."),
        (str(WARNINGS), "No check fails, and there are warnings."),
    ),
)
@click.option("--data-dir", metavar="DIR", help="Where the master keeps its journal.")
@config_option
@master_option
@json_option
def doctor(data_dir: str | None, address: str, as_json: bool) -> None:
    """Check this host and its fleet: verdicts and remedies.

    Looks at driver, CUDA, GPUs, MPS, permissions, limits, disk, ports, services,
    certificates, the master, clocks, versions and the fleet's devices.

    Run it on each host, as the user that the daemons run as.
    """
    with contextlib.ExitStack() as stack:
        try:
            master: Master | Failure = stack.enter_context(Master(address))
        except Failure as failure:  # certificates or a token that can't be read
            master = failure
        place = Place(
            master_config=load_config(config.MasterConfig, flags={"data_dir": data_dir}).config,
            worker_config=load_config(config.WorkerConfig).config,
            client_config=client_config(address),
            address=address,
            master=master,
        )
        findings = [finding for check in CHECKS for finding in carry_out(check, place)]
    if as_json:
        show.value(as_dict(findings))
    else:
        show_findings(findings)
    sys.exit(exit_code(findings))


def carry_out(check: Check, place: Place) -> list[Finding]:
    """What a check finds. One that breaks is a finding, not the end of the others."""
    try:
        return check(place)
    except (OSError, ValueError, Failure) as error:
        return fail(check.__name__.replace("_", " "), f"can't be checked: {error}", "repair this first, then ask again")


def exit_code(findings: Sequence[Finding]) -> int:
    verdicts = {finding.verdict for finding in findings}
    return Failure.exit_code if Verdict.FAIL in verdicts else WARNINGS if Verdict.WARN in verdicts else 0


def as_dict(findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "verdict": {Failure.exit_code: "fail", WARNINGS: "warn", 0: "ok"}[exit_code(findings)],
        "checks": [
            {"check": f.check, "verdict": f.verdict.value, "message": f.message}
            | ({"remedy": f.remedy} if f.remedy else {})
            for f in findings
        ],
    }


def show_findings(findings: Sequence[Finding]) -> None:
    counts = Counter(finding.verdict for finding in findings)
    warnings = "warning" if counts[Verdict.WARN] == 1 else "warnings"
    words = {Verdict.OK: "ok", Verdict.WARN: warnings, Verdict.FAIL: "failed", Verdict.SKIP: "skipped"}
    summary = ", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict])
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415  only a terminal pays for it

        console = Console(highlight=False)
        console.print(as_grid(findings))
        console.print(f"\n{summary}")
        return
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        show.line(clean_lines(f"{finding.verdict.value:<4}  {finding.check:<{width}}  {finding.message}"))
        if finding.remedy:
            show.line(clean_lines(f"{'':<4}  {'':<{width}}  → {finding.remedy}"))
    show.line(f"\n{summary}")


def as_grid(findings: Sequence[Finding]) -> Any:
    """The findings for rich to print: messages wrap within their column."""
    from rich.table import Table  # noqa: PLC0415  only a terminal pays for it
    from rich.text import Text  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        text = Text(clean_lines(finding.message))
        if finding.remedy:
            text.append(f"\n→ {clean_lines(finding.remedy)}", style="cyan")
        grid.add_row(
            Text(finding.verdict.value, style=STYLES[finding.verdict]), Text(finding.check, no_wrap=True), text
        )
    return grid

"""`mgpuctl doctor`: checks of this host and its fleet. Each has a verdict, and a remedy if it needs one.

A check is a function from a Host to one finding or several, in gpu.py, host.py or fleet.py. Checks do not change the
host, except that one writes and deletes a small file in the data directory to time an fsync.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence

import click
from rich.table import Table
from rich.text import Text

from multigpu import AdminClient
from multigpu.cli import show, tables
from multigpu.cli.admin import connection
from multigpu.cli.commands import Command
from multigpu.cli.doctor import fleet as doctor_fleet
from multigpu.cli.doctor import gpu as doctor_gpu
from multigpu.cli.doctor import host as doctor_host
from multigpu.cli.doctor.base import Check, Finding, Host, SkipCheck, Verdict, fail, skip
from multigpu.cli.failures import WARNINGS, Failure
from multigpu.cli.options import client_config, config_option, json_option, load_config, master_option
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

    Driver, CUDA, GPUs, MPS, permissions, limits, disk, ports, services, certificates, the master, clocks, versions and
    the fleet's devices. Run it on each host, as the user that the daemons run as.
    """
    with contextlib.ExitStack() as stack:
        try:
            master: AdminClient | Failure = stack.enter_context(connection(address))
        except Failure as failure:  # certificates or a token that can't be read
            master = failure
        host = Host(
            master_config=load_config(config.MasterConfig, flags={"data_dir": data_dir}).config,
            worker_config=load_config(config.WorkerConfig).config,
            client_config=client_config(address),
            master=master,
        )
        findings = [finding for check in CHECKS for finding in run_check(check, host)]
    if as_json:
        show.value(_as_dict(findings))
    else:
        _print(findings)
    sys.exit(exit_code(findings))


def run_check(check: Check, host: Host) -> list[Finding]:
    """The findings of a check; a check that fails to run is a finding too."""
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        found = check(host)
        return [found] if isinstance(found, Finding) else found
    except SkipCheck as reason:
        return [skip(name, str(reason))]
    except (OSError, ValueError, Failure) as error:
        return [fail(name, f"can't be checked: {error}", "repair this first, then run the check again")]


def exit_code(findings: Sequence[Finding]) -> int:
    verdicts = {finding.verdict for finding in findings}
    return Failure.exit_code if Verdict.FAIL in verdicts else WARNINGS if Verdict.WARN in verdicts else 0


def _as_dict(findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "verdict": {Failure.exit_code: "fail", WARNINGS: "warn", 0: "ok"}[exit_code(findings)],
        "checks": [
            {"check": f.check, "verdict": f.verdict.value, "message": f.message}
            | ({"remedy": f.remedy} if f.remedy else {})
            for f in findings
        ],
    }


def _print(findings: Sequence[Finding]) -> None:
    counts = Counter(finding.verdict for finding in findings)
    warnings = "warning" if counts[Verdict.WARN] == 1 else "warnings"
    words = {Verdict.OK: "ok", Verdict.WARN: warnings, Verdict.FAIL: "failed", Verdict.SKIP: "skipped"}
    grid = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        text = Text(clean_lines(finding.message))
        if finding.remedy:
            text.append(f"\n→ {clean_lines(finding.remedy)}", style="cyan")
        verdict = Text(finding.verdict.value, style=STYLES[finding.verdict])
        grid.add_row(verdict, Text(finding.check, no_wrap=True), text)
    for line in tables.rendered(grid):
        show.line(line)
    show.line("\n" + ", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict]))

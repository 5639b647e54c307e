"""mgpuctl logs: of services. systemd does not run where tests run, so programs on PATH stand for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from multigpu.cli import cli
from multigpu.cli.local.fleet_log import FleetLog


def test_a_host_without_services_is_told_where_the_logs_are() -> None:
    result = CliRunner().invoke(cli, ["logs"])
    assert result.exit_code == 1
    assert "the logs of `mgpuctl up` are on its stderr" in result.output


def test_lines_that_are_no_json_have_the_name_of_their_process(capfd: pytest.CaptureFixture[str]) -> None:
    log = FleetLog(as_json=False, names=["w", "master"])
    log.line("w", "Segmentation fault")
    log.line("w", '{"event": "x"}')
    assert capfd.readouterr().err.splitlines() == ["w      | Segmentation fault", '{"event": "x"}']


def test_a_full_disk_costs_lines_and_does_not_end_the_fleet() -> None:
    """Nor does a reader that has gone. The fleet goes on, and stdout has its words."""
    code = (
        "from multigpu.cli.local.fleet_log import FleetLog\n"
        "log = FleetLog(as_json=False, names=['w'])\n"
        "log.line('w', 'x'); log.event('w', 'y'); print('goes on')"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


@pytest.mark.parametrize(
    ("args", "unit"),
    [
        ([], "mgpu-*"),
        (["master"], "mgpu-master.service"),
        (["worker"], "mgpu-worker@*"),
        (["mps"], "mgpu-mps@*"),
        (["0"], "mgpu-worker@0*"),
        (["mgpu-worker@1", "-f", "--json"], "mgpu-worker@1 --follow --output=json"),
    ],
)
def test_services_are_read_by_journalctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], unit: str
) -> None:
    for name, body in {"systemctl": "mgpu-master.service loaded active running x", "journalctl": "$@"}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{body}"\n')
        (tmp_path / name).chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from multigpu.cli.fleet import logs; from multigpu.cli import main\n"
        "logs.SYSTEMD_RUNS = Path(sys.argv.pop(1)); main()"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    argv = [sys.executable, "-c", code, str(tmp_path), "logs", *args, "-n", "7"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == f"--no-pager --lines=7 --unit={unit}\n"

"""mgpuctl logs: of a real local fleet, and of services."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from multigpu.cli import cli
from multigpu.cli.fleet import logs
from multigpu.cli.local.fleet_log import LOG_BYTES_MAX, LOG_NAME, FleetLog, older

from tests.client.cli.fleet_up import MGPUCTL, Up


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    fleet = Up(tmp_path_factory.mktemp("logs"), "--workers", "1")
    fleet.ready()
    yield fleet
    assert fleet.stop() == 0


def told(folder: Path, *args: str) -> list[dict[str, Any]]:
    argv = [*MGPUCTL, "logs", "--data-dir", str(folder), "--json", *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_local_fleet(up: Up) -> None:
    data = up.folder / "data"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    master = told(data, "master")
    assert {entry["process"] for entry in master} == {"master"}
    ready = next(entry for entry in master if entry["message"] == "master ready")
    assert ready["address"] == up.ready_file.read_text().split()[2].rstrip(",")
    workers = told(data, "worker")
    assert len({entry["process"] for entry in workers}) == 1
    assert workers[0]["process"].endswith("-cpu-0")
    everything = told(data)
    assert len(everything) >= len(master) + len(workers)
    assert [entry["timestamp"] for entry in master] == sorted(entry["timestamp"] for entry in master)
    assert told(data, "-n", "1") == everything[-1:]
    assert told(data, "-n", "0") == []
    text = subprocess.run(
        [*MGPUCTL, "logs", "master", "--data-dir", str(data)], capture_output=True, text=True, check=True
    ).stdout
    assert any("master  info     master ready" in line and "address=" in line for line in text.splitlines())


def test_following(up: Up) -> None:
    argv = [*MGPUCTL, "logs", "-f", "-n", "1", "--data-dir", str(up.folder / "data"), "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()  # the last old line: from here on it follows
        worker = next(pid for name, pid in up.children().items() if name.endswith("-cpu-0"))
        os.kill(worker, signal.SIGKILL)
        assert any("died: killed by SIGKILL" in json.loads(line)["message"] for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.communicate()


def test_no_log_anywhere(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["logs", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "mgpuctl up" in result.output


def test_a_long_log_is_cut_and_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigpu.cli.local.fleet_log.LOG_BYTES_MAX", 2000)
    path = tmp_path / "data" / LOG_NAME
    log = FleetLog(as_json=True, names=["master"], file=path)
    log.line("master", "{}")
    lines = logs.tail(path)
    seen = []
    for number in range(30):
        log.line("master", json.dumps({"event": f"line {number}", "timestamp": "2026-01-01T00:00:00Z"}))
        seen += [logs._from_line(line) for line in iter(lines.__next__, None)]
    assert LOG_BYTES_MAX > 1 << 20
    assert path.stat().st_size <= 2000
    assert older(path).stat().st_size <= 2000
    wanted = [f"line {number}" for number in range(30)]
    # A reader that follows misses nothing when the file changes.
    assert [entry.message for entry in seen if entry][1:] == wanted
    kept = [entry.message for entry in logs.from_file(path, lambda _: True, count=100, follow=False)]
    assert kept == ["{}", *wanted][-len(kept) :]
    assert len(kept) > 20


def test_lines_that_are_no_json_and_disks_that_are_full(tmp_path: Path) -> None:
    path = tmp_path / "data" / LOG_NAME
    FleetLog(as_json=False, names=["w"], file=path).line("w", "Segmentation fault \x1b[31m")
    (entry,) = logs.from_file(path, logs.matcher("worker"), count=9, follow=False)
    assert entry.message == "Segmentation fault \x1b[31m"
    assert "\x1b" not in logs.as_text(entry)
    # Not a folder: nothing can be kept there, and nothing breaks.
    (tmp_path / "file").touch()
    FleetLog(as_json=False, names=["w"], file=tmp_path / "file" / "log" / "x").line("w", "goes on")


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
    """Substitutes for systemctl and journalctl on PATH: systemd does not run where tests run."""
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

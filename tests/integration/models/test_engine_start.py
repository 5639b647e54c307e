"""A worker whose handlers fail to import, and a real master: every page says so, and the other worker works."""

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from multigpu.cli import cli

from tests.fleet import Fleet, until

HANDLERS = """
import os, time
from multigpu.handlers import handler

if os.path.exists(os.path.join(os.path.dirname(__file__), "broken")):
    1/0

@handler("mm.work")
def work(value: bytes) -> bytes:
    time.sleep(float(value))
    return value
"""


@pytest.mark.slow
def test_a_worker_whose_engine_cannot_start_is_shown_and_gets_nothing_while_another_works(tmp_path: Path) -> None:
    module = tmp_path / "mm.py"
    module.write_text(HANDLERS)

    def mgpuctl(*words: str) -> str:
        return CliRunner().invoke(cli, ["--master", fleet.address, *words]).stdout

    with Fleet(tmp_path / "fleet", handlers=["mm"], handlers_dir=tmp_path) as fleet:
        held = fleet.submit("mm.work", *[b"0.5"] * 8)
        (tmp_path / "broken").touch()
        os.kill(fleet.workers["w0"].children()[0], signal.SIGKILL)
        until(lambda: fleet.worker("w0").quarantined, what="the quarantine")
        held += fleet.submit("mm.work", *[b"0"] * 20)
        assert {fleet.outcome(task_id).worker_id for task_id in held[8:]} == {"w1"}
        assert all(fleet.outcome(task_id).worker_id for task_id in held[:8])
        mgpuctl("queues", "pause", "default")
        (waits,) = fleet.submit("mm.work", b"0")
        workers = {row["worker_id"]: row for row in json.loads(mgpuctl("workers", "--json"))}
        assert workers["w0"]["health"]["reasons"][0]["code"] == "engine_fails"
        assert "ZeroDivisionError" in workers["w0"]["health"]["reasons"][0]["message"]
        for page in (("workers",), ("gpus",), ("doctor",)):
            assert "engine_fails" in mgpuctl(*page), page
        explained = json.loads(mgpuctl("tasks", "explain", str(waits), "--json"))
        chances = {candidate["worker_id"]: candidate for candidate in explained["candidates"]}
        assert "ZeroDivisionError" in str(chances["w0"]["excluded_by"])
        (tmp_path / "broken").unlink()
        until(lambda: not fleet.worker("w0").quarantined, what="its return by itself")
        mgpuctl("cordon", "w1")
        mgpuctl("queues", "resume", "default")
        assert fleet.outcome(waits).worker_id == "w0"

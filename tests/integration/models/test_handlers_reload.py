"""`mgpuctl handlers reload` on a real fleet: which version runs is shown, and one that fails to import runs nowhere."""

import json
from pathlib import Path
from typing import Any

import multigpu
import pytest
from click.testing import CliRunner, Result
from multigpu.cli import cli

from tests.fleet import Fleet, until

HANDLERS = """
from multigpu.handlers import handler

@handler("my.version")
def version(value: bytes) -> bytes:
    return VERSION
"""


def write(folder: Path, version: str, more: str = "") -> None:
    (folder / "mine.py").write_text(f"VERSION = b{version!r}\n{HANDLERS}{more}")


@pytest.mark.slow
def test_a_reload_rolls_the_fleet_and_stops_where_the_new_version_cannot_be_imported(tmp_path: Path) -> None:
    def mgpuctl(*words: str) -> Result:
        return CliRunner().invoke(cli, ["--master", fleet.address, *words])

    def rows() -> dict[str, Any]:
        return {row["worker_id"]: row for row in json.loads(mgpuctl("workers", "--json").stdout)}

    def answers() -> set[bytes]:
        return {fleet.outcome(task_id).result for task_id in fleet.submit("my.version", *[b""] * 20)}

    write(tmp_path, "one")
    with Fleet(tmp_path / "fleet", workers=3, handlers=["mine"], handlers_dir=tmp_path) as fleet:
        until(lambda: all("handlers" in row for row in rows().values()))  # they come with the first heartbeat
        (one,) = {row["handlers"]["version"] for row in rows().values()}
        write(tmp_path, "two")
        assert answers() == {b"one"}
        reloaded = json.loads(mgpuctl("handlers", "reload", "w1", "--json").stdout)
        assert (reloaded[0]["worker_id"], reloaded[0]["before"]) == ("w1", one)
        two = rows()["w1"]["handlers"]["version"]
        assert reloaded[0]["version"] == two != one
        (finding,) = [f for f in json.loads(mgpuctl("doctor", "--json").stdout)["checks"] if f["check"] == "handlers"]
        assert finding["verdict"] == "warn"
        assert f"{one} on w0 and w2" in finding["message"]
        assert f"{two} on w1" in finding["message"]
        assert "handlers reload --all" in finding["remedy"]
        write(tmp_path, "three", "1/0\n")
        stopped = mgpuctl("handlers", "reload", "--all")
        assert stopped.exit_code != 0
        assert "ZeroDivisionError" in stopped.stderr
        assert [row["handlers"].get("reloads", 0) for row in rows().values()] in ([1, 1, 0], ["1", "1", 0]), (
            "it stopped"
        )
        assert {row["handlers"]["version"] for row in rows().values()} == {one, two}
        write(tmp_path, "two")
        assert mgpuctl("handlers", "reload", "--all").exit_code == 0
        assert {row["handlers"]["version"] for row in rows().values()} == {two}
        assert answers() == {b"two"}
        assert mgpuctl("handlers", "reload").exit_code == 2


@pytest.mark.slow
def test_a_first_reload_whose_engine_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    """While the engine starts, the worker reports handlers without a version: they are there all the same."""
    source = "import time, multigpu\ntime.sleep(3)\n@multigpu.handler('k')\ndef k(v: bytes) -> bytes:\n    return v\n"
    (tmp_path / "slow.py").write_text(source)
    with Fleet(tmp_path / "fleet", workers=1, handlers=["slow"], handlers_dir=tmp_path) as fleet:
        done = CliRunner().invoke(cli, ["--master", fleet.address, "handlers", "reload", "--all"])
        assert done.exit_code == 0, done.stderr


@pytest.mark.slow
def test_a_reload_after_a_cancelled_call_was_ended_blames_no_source(tmp_path: Path) -> None:
    """The engine of a call that goes on after it was cancelled is killed; the next engine may still be starting."""
    source = (
        "import pathlib, time, multigpu\n"
        "@multigpu.handler('k')\n"
        "def k(begun: str) -> None:\n    pathlib.Path(begun).touch()\n    time.sleep(600)\n"
    )
    (tmp_path / "napping.py").write_text(source)
    with Fleet(tmp_path / "fleet", workers=1, handlers=["napping"], handlers_dir=tmp_path) as fleet:
        for number in range(3):
            begun = tmp_path / f"begun {number}"
            with fleet.client() as client:
                handle = client.submit("k", str(begun))
                until(begun.exists)
                handle.cancel()
            done = CliRunner().invoke(cli, ["--master", fleet.address, "handlers", "reload", "--all"])
            assert done.exit_code == 0, done.stderr


@pytest.mark.slow
def test_a_traceback_shows_the_lines_that_ran_after_an_edit(tmp_path: Path) -> None:
    source = "import multigpu\n@multigpu.handler('k')\ndef k(value):\n    return value['body']  # {}\n"
    (tmp_path / "edited.py").write_text(source.format("as it was"))
    with Fleet(tmp_path / "fleet", workers=1, handlers=["edited"], handlers_dir=tmp_path) as fleet:
        fleet.wait_for_workers()
        (tmp_path / "edited.py").write_text(source.format("corrected"))
        with fleet.client() as client, pytest.raises(multigpu.TaskFailed) as caught:
            client.run("k", {})
        assert "# as it was" in caught.value.remote.traceback

"""Training jobs as values, and what `mgpuctl train` makes of their logs and events."""

from pathlib import Path
from typing import Any

import pytest
from multigpu._encoding import JSON, encode
from multigpu._kinds.job_history import History, by_step
from multigpu._kinds.training import Job, job_of, read_payload, report_text
from multigpu.cli.train.job import new_text

LINES = "".join(f"step {n}\n" for n in range(1000))


def test_a_job_survives_its_payload(tmp_path: Path) -> None:
    script = tmp_path / "train it!.py"
    script.touch()
    job = job_of(
        script, ["--epochs", "3"], "", 2, "s3://b/c", 60.0, {"world_size": 4, "labels": {"zone": "a"}, "timeout": 3.0}
    )
    assert job.name.startswith("train-it-")
    assert job.script == str(script)
    assert job_of("there.py", [], "", 0, "", 0.0, {}).script == "there.py"
    assert job.options == {"world_size": 4, "labels": {"zone": "a"}}
    payload, content_type = encode(job.payload())
    assert read_payload(payload, content_type) == job


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "../x"}, "can't be the name"),
        ({"name": ""}, "can't be the name"),
        ({"name": "x" * 65}, "can't be the name"),
        ({"name": ".hidden"}, "can't be the name"),
        ({"script": ""}, "path is empty"),
        ({"args": ["a\0b"]}, "NUL"),
        ({"retries": -1}, "retries is -1"),
        ({"hang_timeout_s": 0.5}, "hang_timeout_s is 0.5"),
        ({"hang_timeout_s": 1e9}, "hang_timeout_s is 1000000000.0"),
        ({"hang_timeout_s": "60"}, "a job is"),
        ({"args": [1]}, "a job is"),
        ({"args": "abc"}, "a job is"),
        ({"options": None}, "a job is"),
        ({"checkpoints": None}, "a job is"),
        ({"checkpoints": "relative/folder"}, "absolute"),
        ({"retries": True}, "a job is"),
        ({"more": 1}, "a job is"),
    ],
)
def test_what_is_no_job_is_rejected(changes: dict[str, Any], says: str) -> None:
    payload, _ = encode(Job(name="night", script="train.py").payload() | changes)
    with pytest.raises(ValueError, match=says):
        read_payload(payload, JSON)


def test_the_arguments_of_a_script_are_a_list() -> None:
    with pytest.raises(TypeError, match="not a str"):
        job_of("train.py", "--epochs 3", "", 0, "", 0.0, {})


@pytest.mark.parametrize(
    ("known", "log", "new"),
    [
        ("", "", ""),
        ("", "a\n", "a\n"),
        ("a\n", "a\nb\n", "b\n"),
        (f"{LINES}y\n", f"…\n{LINES[2000:]}y\nz\n", "z\n"),
        ("a\n", "…\nx\ny\n", "…\nx\ny\n"),
    ],
)
def test_new_lines_of_a_log_are_found_though_it_has_lost_its_beginning(known: str, log: str, new: str) -> None:
    assert new_text(known, log) == new


def test_of_a_step_that_ran_again_the_last_report_counts() -> None:
    past = History()
    for step, loss in ((None, 9.0), (1, 3.0), (2, 2.0)):
        past.add({"metrics": {"loss": loss, "before": 0.0}, "step": step})
    past.attempts.append({"world_size": 1})
    for step, loss in ((1, 2.5), (2, 2.0)):
        past.add({"metrics": {"loss": loss}, "step": step})
    past.add({"checkpoint": {"step": 1, "folder": "x"}})
    assert [(r["step"], r["metrics"]["loss"]) for r in by_step(past)] == [(None, 9.0), (1, 2.5), (2, 2.0)]
    assert "before" not in by_step(past)[1]["metrics"]
    past.add({"metrics": {"accuracy": 0.5}, "step": 2})
    assert by_step(past)[-1]["metrics"] == {"loss": 2.0, "accuracy": 0.5}, "of one attempt both count"
    assert report_text({"metrics": {"loss": 2.0, "norm": "nan"}, "step": 4}) == "step 4, loss 2, norm nan"


def test_device_hours_are_of_all_ranks_and_attempts_without_the_waits_between() -> None:
    past = History()
    for event in (
        {"job": {}, "world_size": 2, "time": 1000.0},
        {"metrics": {"loss": 1.0}, "step": 1, "time": 1900.0},
        {"job": {}, "world_size": 4, "time": 9000.0},
        {"checkpoint": {"step": 2}, "time": 9900.0},
    ):
        past.add(event)
    assert past.device_hours == pytest.approx(2 * 0.25 + 4 * 0.25)

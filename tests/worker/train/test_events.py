"""The events of a job: in its folder, and as partial outputs."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from multigpu._encoding import JSON
from multigpu._handling.attempts import Item
from multigpu._kinds.training import Job, tell
from multigpu_worker.engines.train import events as module
from multigpu_worker.engines.train.events import Events
from multigpu_worker.engines.train.tail import Tail

JOB = Job(name="night", script="train.py", args=("--epochs", "3"))


class Recorder:
    """Of a Reporter, what Events calls."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.notes: list[tuple[float, str]] = []
        self.saved: list[bytes] = []

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        assert content_type == JSON
        self.sent.append(json.loads(data))

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        self.notes.append((fraction, note))

    def checkpoint(self, item: Item, data: bytes) -> None:
        self.saved.append(data)


def attempt(path: Path, received: int = 0, number: int = 1) -> tuple[Events, Recorder]:
    recorder = Recorder()
    events = Events(path, Item(1, 7, number, b"", 1, b"", received), recorder)  # type: ignore[arg-type]
    events.begin(JOB, 2, path.parent / "logs")
    return events, recorder


def metrics(step: int, time_s: float) -> str:
    return json.dumps({"metrics": {"loss": 1 / (step + 1)}, "step": step, "fraction": 0.5, "time": time_s})


def test_events_are_sent_and_kept(tmp_path: Path) -> None:
    events, recorder = attempt(tmp_path / "events")
    events.reported(metrics(3, 10.0))
    events.reported(json.dumps({"checkpoint": {"step": 3, "folder": "x"}, "time": 10.1}))
    assert [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()] == recorder.sent
    assert recorder.sent[0]["job"] == JOB.payload()
    assert (recorder.sent[0]["attempt"], recorder.sent[0]["world_size"], recorder.sent[0]["task"]) == (1, 2, 7)
    assert recorder.notes == [(0.5, "step 3, loss 0.25")]
    assert events.last == {"step": 3, "metrics": {"loss": 0.25}, "checkpoint": {"step": 3, "folder": "x"}}
    assert recorder.saved == [b"3"], "the master may begin again with more workers"


def test_a_line_that_the_script_has_not_finished_is_left_out(tmp_path: Path) -> None:
    events, recorder = attempt(tmp_path / "events")
    events.reported(metrics(1, 1.0)[:-9])
    assert [*recorder.sent[1:]] == []


def test_a_report_after_a_line_that_a_full_disk_has_cut_off_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """It continued the cut line, and both were lost."""
    path = tmp_path / "reports"
    monkeypatch.setenv("MULTIGPU_JOB_REPORTS", str(path))
    tell({"checkpoint": {"step": 1, "folder": "x"}})
    with path.open("a") as file:
        file.write(metrics(2, 2.0)[:-9])
    tell({"checkpoint": {"step": 3, "folder": "y"}})
    events, recorder = attempt(tmp_path / "events")
    for line in Tail(path).lines():
        events.reported(line)
    assert [event["checkpoint"]["step"] for event in recorder.sent[1:]] == [1, 3]


@pytest.mark.parametrize("received", [0, 2, 3, 9])
def test_a_later_attempt_sends_what_the_master_has_lost(tmp_path: Path, received: int) -> None:
    before, first = attempt(tmp_path / "events")
    for step in range(2):
        before.reported(metrics(step, step))
    after, second = attempt(tmp_path / "events", received, number=2)
    assert second.sent[:-1] == first.sent[received:]
    assert second.sent[-1]["attempt"] == 2
    assert after.last["step"] == 1


def test_a_line_that_a_killed_engine_has_not_finished_is_cut_off(tmp_path: Path) -> None:
    attempt(tmp_path / "events")
    with (tmp_path / "events").open("ab") as file:
        file.write(b'{"metrics": {"lo')
    _, recorder = attempt(tmp_path / "events", number=2)
    assert [event["attempt"] for event in recorder.sent] == [1, 2]
    assert len((tmp_path / "events").read_text().splitlines()) == 2


@pytest.mark.parametrize("received", [0, 3])
def test_a_damaged_line_is_left_out_and_the_later_ones_are_sent(tmp_path: Path, received: int) -> None:
    first, _ = attempt(tmp_path / "events")
    with (tmp_path / "events").open("ab") as file:
        file.write(b'{"metrics": {"lo{"checkpoint": {"step": 2}}\n')
    first.reported(metrics(3, 10.0))
    events, recorder = attempt(tmp_path / "events", received, number=2)
    assert events.last["step"] == 3
    assert [event.get("step", event.get("attempt")) for event in recorder.sent] == ([2] if received else [1, 3, 2])


def test_after_a_damaged_line_no_event_is_sent_twice(tmp_path: Path) -> None:
    """The master counts what it received; the line was counted, too, although it was left out."""
    attempt(tmp_path / "events")
    with (tmp_path / "events").open("ab") as file:
        file.write(b'{"metrics": {"lo\r{"checkpoint": {"step": 2}}\n')
    _, second = attempt(tmp_path / "events", number=2)
    received = len(second.sent)
    for number in (3, 4):
        _, later = attempt(tmp_path / "events", received, number)
        assert [event["attempt"] for event in later.sent] == [number]
        received += len(later.sent)


def test_an_engine_that_is_killed_before_it_removes_a_damaged_line_has_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master had received events whose number did not fit to the file: the next attempt did not send others."""
    attempt(tmp_path / "events")
    with (tmp_path / "events").open("ab") as file:
        file.write(b'{"metrics": {"lo\n')
    recorder = Recorder()
    with monkeypatch.context() as full, pytest.raises(OSError, match="no room"):
        full.setattr(Path, "replace", Mock(side_effect=OSError("no room")))
        Events(tmp_path / "events", Item(1, 7, 2, b"", 1, b"", 0), recorder)  # type: ignore[arg-type]
    assert recorder.sent == []


def test_a_line_for_which_the_disk_has_no_room_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, recorder = attempt(tmp_path / "events")
    whole = (tmp_path / "events").read_bytes()

    class Full:
        def __init__(self, file: Any) -> None:
            self.truncate, self.seek, self.name = file.truncate, file.seek, file.name
            self.write = lambda data: file.write(data[:5])

    monkeypatch.setattr(events, "_file", Full(events._file))
    with pytest.raises(OSError, match="No space left"):
        events.reported(metrics(3, 10.0))
    assert (tmp_path / "events").read_bytes() == whole
    assert len(recorder.sent) == 1


def test_of_a_long_job_fewer_metrics_are_kept(tmp_path: Path) -> None:
    events, recorder = attempt(tmp_path / "events")
    for step in range(100_000):
        events.reported(metrics(step, 1000.0 + step / 100))
    assert 8_000 < len(recorder.sent) < 14_000
    assert [event["step"] for event in recorder.sent[1:1000]] == [*range(999)], "the first ones are all kept"
    assert len(recorder.notes) == 100_000
    assert events.last["step"] == 99_999
    events.end()
    assert recorder.sent[-1]["step"] == 99_999, "the last one is kept"


def test_metrics_that_are_rare_are_kept_among_frequent_ones(tmp_path: Path) -> None:
    events, recorder = attempt(tmp_path / "events")
    for step in range(100_000):
        events.reported(metrics(step, 1000.0 + step / 100))
        if step % 1000 == 0:
            event = {"metrics": {"accuracy": 0.5}, "step": step, "time": 1000.0 + step / 100}
            events.reported(json.dumps(event))
            assert set(events.last["metrics"]) == {"loss", "accuracy"}, "those of one step add to each other"
    assert sum("accuracy" in event.get("metrics", ()) for event in recorder.sent) == 100


def test_more_than_the_master_takes_stays_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENT_BYTES_MAX", 10_000)
    events, recorder = attempt(tmp_path / "events")
    for step in range(100):
        events.reported(metrics(step, 1000.0 + step))
    assert 20 < len(recorder.sent) < 60
    assert len((tmp_path / "events").read_text().splitlines()) == 101

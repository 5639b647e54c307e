"""multigpu.train in a single process: reports, and checkpoints that count only when they are whole."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu import _checkpoints, train

fsspec = pytest.importorskip("fsspec", reason="torch is not installed")
torch = pytest.importorskip("torch", reason="the extra `worker` is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MULTIGPU_JOB_CHECKPOINTS", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("MULTIGPU_JOB_REPORTS", str(tmp_path / "reports"))
    yield tmp_path
    train.finish()


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "reports").read_text().splitlines() if line]


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def values(found: dict[str, Any]) -> list[float]:
    moments = [moment for entry in found["optimizer"].state.values() for moment in entry.values()]
    return [x for tensor in (*found["model"].parameters(), *moments) for x in tensor.flatten().tolist()]


def test_a_report_is_a_line(folder: Path) -> None:
    train.report({"loss": 2.5, "norm": float("nan")}, step=3, fraction=0.5)
    (line,) = reports(folder)
    assert line.pop("time") > 0
    assert line == {"metrics": {"loss": 2.5, "norm": "nan"}, "step": 3, "fraction": 0.5}


@pytest.mark.parametrize(
    ("metrics", "options", "error"),
    [
        ({}, {}, ValueError),
        ({str(n): 1.0 for n in range(65)}, {}, ValueError),
        ({"": 1.0}, {}, ValueError),
        ({"x" * 65: 1.0}, {}, ValueError),
        ({"loss\ud800": 1.0}, {}, ValueError),
        ({1: 1.0}, {}, TypeError),
        ({"loss": "low"}, {}, ValueError),
        ({"loss": 1.0}, {"fraction": 1.5}, ValueError),
        ({"loss": 1.0}, {"fraction": float("nan")}, ValueError),
    ],
)
def test_what_is_no_report_is_an_error(folder: Path, metrics: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        train.report(metrics, **options)
    assert not (folder / "reports").exists()


def test_outside_a_job_a_report_goes_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIGPU_JOB_REPORTS")
    train.report({"loss": 1.0})
    assert [*folder.iterdir()] == []


def test_the_last_checkpoint_is_restored(folder: Path) -> None:
    assert train.restore(state(9)) == 0
    for step in (5, 10, 15):
        train.checkpoint(state(step), step)
    other = state(9)
    assert train.restore(other) == 15
    assert values(other) == values(state(15))
    found = [report["checkpoint"] for report in reports(folder)]
    assert [each["step"] for each in found] == [5, 10, 15]
    assert sorted(map(str, (folder / "checkpoints").iterdir())) == [each["folder"] for each in found[1:]], (
        "two are kept"
    )


def test_it_is_committed_without_another_call(folder: Path) -> None:
    train.checkpoint(state(1), 5)
    saving = train._saving
    assert saving is not None
    saving._committed.result(120)
    assert [*folder.glob("checkpoints/step-*/COMMITTED")] != []


@pytest.mark.parametrize("broken", ["COMMITTED is missing", "COMMITTED is empty", "nothing but the folder"])
def test_what_is_not_committed_does_not_count(folder: Path, broken: str) -> None:
    train.checkpoint(state(1), 5, wait=True)
    train.checkpoint(state(2), 10, wait=True)
    (last,) = folder.glob("checkpoints/step-*10-*")
    if broken == "COMMITTED is missing":
        (last / "COMMITTED").unlink()
    elif broken == "COMMITTED is empty":
        (last / "COMMITTED").write_text("")
    else:
        shutil.rmtree(last)
        last.mkdir()
    other = state(9)
    assert train.restore(other) == 5
    assert values(other) == values(state(1))
    assert not last.exists(), "it is removed"


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_next_call(folder: Path) -> None:
    train.checkpoint(state(1), 5, wait=True)
    train.checkpoint(state(2), 10)
    saving = train._saving
    assert saving is not None
    saving._written.result()
    saving._committed.result()
    (folder / "checkpoints").rename(folder / "before")
    (folder / "checkpoints").touch()
    with pytest.raises(OSError):
        train.checkpoint(state(3), 15)
    (folder / "checkpoints").unlink()
    (folder / "before").rename(folder / "checkpoints")
    assert train.restore(state(9)) == 10


def test_a_commit_that_fails_is_raised_and_the_checkpoint_before_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.checkpoint(state(1), 5, wait=True)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(_checkpoints, "sync", full)
        train.checkpoint(state(2), 10)
        with pytest.raises(OSError, match="No space left"):
            train.finish()
    assert train.restore(state(9)) == 5


def test_state_that_cannot_be_saved_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['step'\] is of type int"):
        train.checkpoint({"step": 3}, 5)
    with pytest.raises(TypeError, match="give its module too"):
        train.checkpoint({"optimizer": state(1)["optimizer"]}, 5)
    with pytest.raises(ValueError, match="keep"):
        train.checkpoint(state(1), 5, keep=0)
    with pytest.raises(ValueError, match="step"):
        train.checkpoint(state(1), -1)
    assert not (folder / "checkpoints").exists()


def test_a_url_holds_checkpoints_as_a_folder_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGPU_JOB_CHECKPOINTS", f"memory://{folder.name}/checkpoints")
    assert train.restore(state(9)) == 0
    for step in (5, 10, 15):
        train.checkpoint(state(step), step, wait=True)
    other = state(9)
    assert train.restore(other) == 15
    assert values(other) == values(state(15))
    assert [step for step, _ in train._store().committed()] == [10, 15]
    place = reports(folder)[-1]["checkpoint"]["folder"]
    assert place.startswith("memory://")
    fsspec.filesystem("memory").rm(f"{place.removeprefix('memory://')}/COMMITTED")
    assert train.restore(other) == 10
    assert [step for step, _ in train._store().committed()] == [10]
    assert not fsspec.filesystem("memory").exists(place.removeprefix("memory://")), "what does not count is removed"
    assert [*folder.glob("checkpoints/*")] == []

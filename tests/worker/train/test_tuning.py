"""The texts of a job that fine-tunes, in the folder that its ranks may share."""

from pathlib import Path

import pytest
from multigpu._kinds.finetuning import Finetune
from multigpu_worker.engines.train.tuning import _texts_of


def test_ranks_with_one_pid_write_the_texts_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in two containers had the same temporary file: one moved it while the other one wrote or moved it."""
    tuning = Finetune(model="m", texts="a text")
    replace = Path.replace
    begun: list[Path] = []

    def replace_after_another_rank(path: Path, target: Path) -> Path:
        if not begun:
            begun.append(path)
            _texts_of(tuning, tmp_path, tmp_path)  # of the other rank, between this one's write and its move
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_after_another_rank)
    path = _texts_of(tuning, tmp_path, tmp_path)
    assert path.read_text() == "a text"
    assert [*tmp_path.iterdir()] == [path]


def test_texts_that_cannot_be_written_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        _texts_of(Finetune(model="m", texts="a text"), tmp_path, tmp_path)
    assert [*tmp_path.iterdir()] == []

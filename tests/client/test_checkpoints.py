"""The stores of checkpoints: the order of commits, whatever the steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu._checkpoints import COMMITTED, FolderStore, Store, UrlStore


def in_folder(path: Path) -> Store:
    return FolderStore(path)


def at_url(path: Path) -> Store:
    pytest.importorskip("fsspec", reason="torch is not installed")
    return UrlStore(f"file://{path}")


def written(store: Store, step: int) -> str:
    """A place with the files of a checkpoint."""
    place = store.new(step)
    folder = Path(place.removeprefix("file://"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(b"x")
    return place


def committed(store: Store, step: int) -> str:
    place = written(store, step)
    store.commit(place, step)
    return place


@pytest.mark.parametrize("make", [in_folder, at_url])
def test_the_newest_is_the_last_also_after_a_run_with_higher_steps(
    make: Callable[[Path], Store], tmp_path: Path
) -> None:
    store = make(tmp_path / "checkpoints")
    expected = [(step, committed(store, step)) for step in (900, 1000, 100, 200, 200)]
    assert store.committed() == expected
    store.remove(expected[0][1])
    written(store, 5000)
    store.remove_unfinished()
    assert store.committed() == expected[1:]


def test_what_is_no_mark_does_not_count(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for step, mark in ((8, {"step": 8}), (7, ["no mark"]), (6, "no mark")):
        (Path(written(store, step)) / COMMITTED).write_text(json.dumps(mark))
    committed(store, 100)
    assert [step for step, _ in store.committed()] == [100]

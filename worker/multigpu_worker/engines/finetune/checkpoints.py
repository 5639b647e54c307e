"""Checkpoints of transformers.Trainer that count once they are whole and on disk."""

import shutil
from pathlib import Path

from multigpu._checkpoints import COMMITTED, sync


def commit(folder: Path) -> None:
    """Makes a folder that all ranks have written count, also after a loss of power. OSError."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    mark = folder / COMMITTED
    mark.touch()
    for path in (mark, folder, folder.parent):
        sync(path)


def last_committed(parent: Path) -> Path | None:
    """The newest checkpoint that counts. Removes the others that don't."""
    committed = []
    for folder in parent.glob("checkpoint-*"):
        if (folder / COMMITTED).exists():
            committed.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return max(committed, key=step_of, default=None)


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])

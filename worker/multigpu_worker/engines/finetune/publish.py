"""A fine-tuned model becomes a version in the model repository, whole or not at all. If the process is killed before, a
hidden folder stays until the task publishes again.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from multigpu._checkpoints import sync

from multigpu_worker.repository.scan import VERSION

# What a version was made of.
ORIGIN = "finetune.json"


def published(parent: Path, task: int) -> int | None:
    """The version of a model's folder that an earlier attempt of the task has published."""
    for version in _versions(parent):
        try:
            if origin_of(parent, version)["task"] == task:
                return version
        except (OSError, ValueError, KeyError, TypeError):  # it is not of a job
            continue
    return None


def origin_of(parent: Path, version: int) -> dict[str, Any]:
    """What a version was made of. OSError, ValueError."""
    found: dict[str, Any] = json.loads((parent / str(version) / ORIGIN).read_text("utf-8"))
    return found


def publish(files: Path, parent: Path, origin: dict[str, Any]) -> int:
    """Copies a folder of transformers into a model's folder, as its next version, and returns that. OSError."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f".finetune-{origin['task']}-"
    for left in parent.glob(f"{prefix}*"):  # by an attempt that was killed
        shutil.rmtree(left, ignore_errors=True)
    hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        hidden.chmod(0o755)
        shutil.copytree(files, hidden, dirs_exist_ok=True)
        (hidden / ORIGIN).write_text(json.dumps(origin, indent=1), "utf-8")
        for path in (*hidden.rglob("*"), hidden):
            sync(path)
        while True:
            version = max(_versions(parent), default=0) + 1
            try:
                hidden.rename(parent / str(version))
            except OSError:
                if not (parent / str(version)).exists():  # else another job was faster
                    raise
            else:
                break
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    sync(parent)
    sync(parent.parent)
    return version


def _versions(parent: Path) -> list[int]:
    return [int(entry.name) for entry in parent.iterdir() if VERSION.fullmatch(entry.name)] if parent.is_dir() else []

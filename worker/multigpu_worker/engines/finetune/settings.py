"""What the engine tells the script, in a file."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from multigpu._kinds.finetuning import Finetune

from multigpu_worker.repository.model import ModelSpec

# The script's exit codes: it ran out of memory, and should run again with smaller passes; the texts or the settings are
# wrong.
OUT_OF_MEMORY, BAD_INPUT = 75, 65
# In the job's folder.
TEXTS, MICRO_BATCH, CHECKPOINTS, FINAL = "texts.jsonl", "micro-batch", "checkpoints", "final"


class DivergedError(ValueError):
    """The trained weights are of no use. The message says what to change."""

    def __init__(self) -> None:
        super().__init__(
            "the training diverged: the loss or the weights are not finite, and nothing was published. Choose a lower "
            "learning_rate, or precision fp32"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    tuning: Finetune
    # The task, by which its published version is known again.
    task: int
    name: str
    folder: Path
    texts: Path
    # The model to begin with, the repository, and the model in it that gets the new version.
    spec: ModelSpec
    repository: Path
    output: str
    # The artifact cache.
    artifacts: str
    artifacts_bytes_max: int
    # "cpu" or "cuda:N".
    device: str

    def write(self, path: Path) -> None:
        paths = {name: str(getattr(self, name)) for name in ("folder", "texts", "repository")}
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        path.write_text(json.dumps(values | paths | {"tuning": self.tuning.plain(), "spec": self.spec.plain()}))

    @classmethod
    def read(cls, path: Path) -> Self:
        values: dict[str, Any] = json.loads(path.read_text())
        paths = {name: Path(values[name]) for name in ("folder", "texts", "repository")}
        spec = ModelSpec.from_plain(_with_tuples(values["spec"]))
        return cls(**values | paths | {"tuning": Finetune(**values["tuning"]), "spec": spec})


def _with_tuples(value: Any) -> Any:
    """JSON has lists where a ModelSpec has tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value

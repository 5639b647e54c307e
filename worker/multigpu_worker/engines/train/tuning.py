"""Prepares jobs that fine-tune: what their script, multigpu_worker.engines.finetune, needs on this host."""

import importlib.util
import secrets
import sys
from pathlib import Path

from multigpu._kinds.finetuning import Finetune
from multigpu._kinds.training import Job

from multigpu_worker.engines.base import EngineSettings, Item
from multigpu_worker.engines.finetune.settings import TEXTS, Settings
from multigpu_worker.engines.train.errors import ScriptError
from multigpu_worker.repository.model import ModelFolderError, ModelSpec
from multigpu_worker.repository.scan import VERSION, scan

PACKAGES = ("torch", "transformers", "accelerate", "peft")


def command_of(job: Job, tuning: Finetune, settings: EngineSettings, item: Item, folder: Path, logs: Path) -> list[str]:
    """The command of a rank, whose files are ready. `folder`: the job's. OSError, ScriptError."""
    texts = _texts_of(tuning, Path(settings.train_dir), folder)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        message = f"fine-tuning needs {' and '.join(missing)}: pip install 'multigpu[finetune]' on the workers' hosts"
        raise ScriptError("MissingPackage", message, retryable=False)
    try:
        spec, output = _model_of(tuning, settings)
    except ModelFolderError as error:
        raise ScriptError("BadInput", str(error), retryable=False) from error
    path = logs / "settings.json"
    Settings(
        tuning=tuning,
        task=item.task_id,
        name=job.name,
        folder=folder,
        texts=texts,
        spec=spec,
        repository=Path(settings.repository),
        output=output,
        artifacts=settings.artifacts,
        artifacts_bytes_max=settings.artifacts_bytes_max,
        device=settings.device,
    ).write(path)
    return [sys.executable, "-u", "-P", "-m", "multigpu_worker.engines.finetune", str(path)]


def _model_of(tuning: Finetune, settings: EngineSettings) -> tuple[ModelSpec, str]:
    """The model to begin with, and the name of the one that gets the new version. ModelFolderError."""
    if not settings.repository:
        raise ModelFolderError("fine-tuned models go to a model repository: set model_repository of the worker")
    found = scan(Path(settings.repository))
    name = tuning.model if tuning.model in found.models else found.current.get(tuning.model, "")
    if not name:
        there = ", ".join(sorted(spec.name for spec in found.models.values() if spec.kind == "generate"))
        why = found.errors.get(tuning.model) or f"it has these that can be fine-tuned: {there or 'none'}"
        raise ModelFolderError(f"the model repository of this worker has no model {tuning.model!r}; {why}")
    spec = found.models[name]
    if spec.kind != "generate" or spec.source not in ("huggingface", "gguf"):
        what = f"{spec.kind}, {spec.source}"
        raise ModelFolderError(f"{tuning.model} ({what}) can't be fine-tuned: it must be a language model (generate)")
    fits = bool(spec.version) and spec.source == "huggingface"
    output = tuning.output or (spec.name if fits else f"{spec.name}-tuned")
    _check_output(output, Path(settings.repository))
    return spec, output


def _check_output(output: str, repository: Path) -> None:
    """ModelFolderError: it can't get a version."""
    parts = output.split("/")
    if any(not part or part.startswith((".", "-")) or VERSION.fullmatch(part) for part in parts) or any(
        character in output for character in " :=,\\"
    ):
        raise ModelFolderError(f"output is {output!r}, which can't be the name of a model: docs/models.md")
    folder = repository / output
    if folder.is_dir() and not all(VERSION.fullmatch(entry.name) or entry.name == "model.toml"
                                   for entry in folder.iterdir() if not entry.name.startswith(".")):  # fmt: skip
        raise ModelFolderError(f"{folder} has files beside versions: choose another output")


def _texts_of(tuning: Finetune, train_dir: Path, folder: Path) -> Path:
    if tuning.file:
        path = (train_dir / tuning.file).resolve()
        if not path.is_relative_to(train_dir.resolve()) or not path.is_file():
            raise ScriptError("BadInput", f"there is no file {tuning.file} in train_dir, {train_dir}", retryable=False)
        return path
    path = folder / TEXTS
    if tuning.texts:  # the same on all ranks, which may share the folder
        # Not the pid: ranks in several containers may have the same one.
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            fresh.write_text(tuning.texts, "utf-8")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    elif not path.exists():
        raise ScriptError("BadInput", f"the texts of the job are gone: there is no {path}", retryable=False)
    return path

"""The prompts of a scenario: a file, or a dataset of Hugging Face."""

import csv
import importlib
import json
from pathlib import Path

from multigpu_worker.energy.config import ScenarioConfig


class PromptsError(Exception):
    """There are no prompts; the message says what to do."""


def load_prompts(scenario: ScenarioConfig) -> list[str]:
    """The first num_samples prompts. A file has a prompt in each line (.txt), object (.jsonl) or row (.csv); of the
    latter two, the column text_column_name. Raises PromptsError.
    """
    path, column = Path(scenario.dataset_name).expanduser(), scenario.text_column_name
    try:
        found = _from_file(path, column) if path.is_file() else _from_hub(scenario.dataset_name, column)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error, KeyError, TypeError) as error:
        raise PromptsError(f"the prompts of {scenario.dataset_name} can't be read: {error!r}") from error
    prompts = [prompt for prompt in found if prompt.strip()][: scenario.num_samples]
    if not prompts:
        raise PromptsError(f"{scenario.dataset_name} has no prompts")
    return prompts


def _from_file(path: Path, column: str) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            return [str(json.loads(line)[column]) for line in file if line.strip()]
        if path.suffix == ".csv":
            return [str(row[column]) for row in csv.DictReader(file)]
        return file.read().splitlines()


def _from_hub(name: str, column: str) -> list[str]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise PromptsError(
            f"there is no file {name}, and datasets of Hugging Face need the package: pip install datasets. Or name a "
            "file: --set scenario.dataset_name=prompts.txt"
        ) from None
    try:
        rows = datasets.load_dataset(name, split="train")
        return [str(text) for text in rows[column]]
    except Exception as error:  # it raises errors of many libraries
        raise PromptsError(f"the dataset {name} can't be loaded: {error}") from error

"""Training jobs that fine-tune a model of the workers on given texts: their settings, for clients and engines."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from multigpu.options import EmbedOptions

METHODS = ("full", "lora")
STRATEGIES = ("auto", "dp", "ddp", "fsdp2")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
# How often a job begins at most if each run out of memory halves its micro-batch.
ATTEMPTS_MAX = 16


class FinetuneOptions(EmbedOptions, total=False):
    """How a model is fine-tuned, beside the options of the task. Every one is optional.

    Attributes:
        world_size: so many workers train together, each as one rank; default 1.
        output: the model of the repository that gets the new version; default: `model`, if its versions are folders of
            transformers, else `model` with "-tuned".
        method: "full" (the default) trains all weights; "lora" trains small matrices beside them, merged at the end.
        strategy: "ddp", "fsdp2" (weights are shared out among the ranks), "dp" (one process, all devices that its
            worker sees), or "auto" (the default): ddp if it fits the memory, as measured, else fsdp2.
        epochs: passes over the texts; default 3.
        steps_max: steps in place of `epochs`.
        learning_rate: falls linearly to 0. Default: 5e-5, and 2e-4 for lora.
        batch: examples in each step, over all ranks; default 8.
        accumulation: in so many passes; default 1. A pass that runs out of memory doubles it.
        length: tokens of an example; longer texts are cut into several. Default 512.
        precision: "fp32", "bf16" or "fp16" (mixed precision), or "auto" (the default): bf16 on GPUs that have it.
        memory_fraction: the share of the device's memory that a rank may take; default 0.9.
        evaluation_fraction: the share of the texts that is held out for evaluation; default 0.1.
        every: steps between evaluations, each with a checkpoint; default: a tenth of the steps.
        patience: stop after so many evaluations without a better loss. Default 0: never. The best model is kept.
        lora_rank: of the matrices; default 16.
        seed: of the order of the texts, and of the matrices; default 0.
    """

    world_size: int
    output: str
    method: str
    strategy: str
    epochs: float
    steps_max: int
    learning_rate: float
    batch: int
    accumulation: int
    length: int
    precision: str
    memory_fraction: float
    evaluation_fraction: float
    every: int
    patience: int
    lora_rank: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetune:
    """What a job fine-tunes, and how: FinetuneOptions says more."""

    # Of the workers' model repository: NAME or NAME:VERSION.
    model: str
    # JSON lines. Empty: those that an earlier run of the job has left in its folder, or `file`.
    texts: str = ""
    # Of the workers' hosts, relative to train_dir or absolute, with such lines.
    file: str = ""
    output: str = ""
    method: str = "full"
    strategy: str = "auto"
    epochs: float = 3.0
    steps_max: int = 0
    learning_rate: float = 0.0
    batch: int = 8
    accumulation: int = 1
    length: int = 512
    precision: str = "auto"
    memory_fraction: float = 0.9
    evaluation_fraction: float = 0.1
    every: int = 0
    patience: int = 0
    lora_rank: int = 16
    seed: int = 0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


_NUMBERS = {
    "epochs": (0.01, 10_000),
    "steps_max": (0, 10**9),
    "learning_rate": (0, 1),
    "batch": (1, 1_000_000),
    "accumulation": (1, 1_000_000),
    "length": (2, 1_000_000),
    "memory_fraction": (0.01, 1),
    "evaluation_fraction": (0, 0.9),
    "every": (0, 10**9),
    "patience": (0, 1_000_000),
    "lora_rank": (1, 4096),
    "seed": (0, 2**32 - 1),
}
_FLOATS = frozenset({"epochs", "learning_rate", "memory_fraction", "evaluation_fraction"})
CHOICES = {"method": METHODS, "strategy": STRATEGIES, "precision": PRECISIONS}


def finetune_of(
    model: str, texts: Iterable[str], file: str, options: Mapping[str, Any]
) -> tuple[Finetune, dict[str, Any]]:
    """The settings of a new job, and the options of its task. ValueError, TypeError: there can't be such a job."""
    if isinstance(texts, str | bytes):
        raise TypeError("texts is a list of strings, not a str")
    lines = [_line(text) for text in texts]
    if bool(lines) == bool(file):
        raise ValueError("give texts, or a file of the workers' hosts" + (", not both" if file else ""))
    for name in options:
        if name not in FinetuneOptions.__annotations__:
            near = difflib.get_close_matches(name, FinetuneOptions.__annotations__, 1)
            known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FinetuneOptions.__annotations__)}"
            raise TypeError(f"finetune has no option {name!r}; {known}")
    rest = dict(options)
    own = {each.name: rest.pop(each.name) for each in fields(Finetune) if each.name in rest}
    rest.setdefault("attempts_max", ATTEMPTS_MAX)
    tuning = checked(Finetune(model=model, texts="".join(lines), file=file, **own), rest.get("world_size", 1))
    return tuning, rest


class TextsError(ValueError):
    """The texts can't be trained with."""


def read_texts(path: Path) -> list[str]:
    """The texts of a file of JSON lines: each a string, or an object with `text`. TextsError, OSError."""
    texts = []
    with path.open("rb") as lines:
        for number, data in enumerate(lines, 1):
            try:
                line = data.decode()
            except UnicodeDecodeError:
                raise TextsError(f"{path.name} line {number} is not UTF-8: convert the file") from None
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                text = value if isinstance(value, str) else value["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                shown = line.strip()[:60]
                raise TextsError(f'{path.name} line {number} is neither {{"text": "…"}} nor a string: {shown}')
            texts.append(text)
    return texts


def _line(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a text is a str, not {type(text).__name__}")
    return json.dumps({"text": text}, ensure_ascii=False) + "\n"


def read_finetune(value: Any, world_size: int) -> Finetune:
    """ValueError: these are no such settings."""
    known = {each.name for each in fields(Finetune)}
    if not isinstance(value, dict) or value.keys() != known:
        raise ValueError(f"finetune is a JSON object with {', '.join(sorted(known))}: see Client.finetune")
    try:
        return checked(Finetune(**value), world_size)
    except TypeError as error:
        raise ValueError(str(error)) from error


def checked(tuning: Finetune, world_size: int) -> Finetune:
    for name in ("model", "texts", "file", "output"):
        if not isinstance(getattr(tuning, name), str):
            raise TypeError(f"{name} must be a str, not {getattr(tuning, name)!r}")
    if not tuning.model:
        raise ValueError("model is empty: name one of the workers' model repository")
    for name, (low, high) in _NUMBERS.items():
        value, whole = getattr(tuning, name), name not in _FLOATS
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not math.isfinite(value):
            raise TypeError(f"{name} must be {'an int' if whole else 'a number'}, not {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be {low} to {high}")
    for name, choices in CHOICES.items():
        if getattr(tuning, name) not in choices:
            raise ValueError(f"{name} is {getattr(tuning, name)!r}; it must be {', '.join(choices)}")
    if type(world_size) is not int:
        raise TypeError(f"world_size must be an int, not {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    if tuning.strategy == "dp" and world_size > 1:
        raise ValueError("the strategy dp is one process: give world_size 1, or the strategy ddp")
    if tuning.batch % (world_size * tuning.accumulation):
        passes = f"{world_size} ranks" + (f" and {tuning.accumulation} passes" if tuning.accumulation > 1 else "")
        raise ValueError(f"a batch of {tuning.batch} can't be divided among {passes}: choose a multiple")
    if tuning.patience and not tuning.evaluation_fraction:
        raise ValueError("patience needs texts to evaluate with: evaluation_fraction is 0")
    return tuning

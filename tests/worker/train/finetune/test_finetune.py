"""What comes before and after the training: examples, plans, strategies, advice, versions. The training itself:
tests/integration/train.
"""

import contextlib
import functools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra `finetune` is not installed")
pytest.importorskip("accelerate", reason="the extra `finetune` is not installed")

import torch
import transformers
from multigpu._kinds.finetuning import Finetune, TextsError
from multigpu_worker.engines.finetune.advice import advice
from multigpu_worker.engines.finetune.checkpoints import commit, last_committed
from multigpu_worker.engines.finetune.examples import IGNORED, collate, examples_of, split
from multigpu_worker.engines.finetune.memory import GIB, Need, choose
from multigpu_worker.engines.finetune.plan import Plan, plan_of
from multigpu_worker.engines.finetune.publish import origin_of, publish, published
from multigpu_worker.engines.finetune.settings import DivergedError, Settings
from multigpu_worker.engines.finetune.trainer import Trainer
from multigpu_worker.engines.finetune.training import _diverged, _finish_files
from multigpu_worker.repository.model import ModelSpec


class Tokenizer:
    """A token for each character."""

    eos_token_id: int | None = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def test_long_texts_are_cut_and_single_tokens_dropped() -> None:
    found = examples_of(["abcdef", "", "abc"], Tokenizer(), 3)
    rows = [each["input_ids"] for each in found]
    assert rows == [[97, 98, 99], [100, 101, 102], [97, 98, 99]], "the end tokens alone predict nothing"
    without_end = Tokenizer()
    without_end.eos_token_id = None
    assert [each["input_ids"] for each in examples_of(["ab"], without_end, 3)] == [[97, 98]]


def test_padding_is_not_trained_with() -> None:
    batch = collate([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch["labels"].tolist() == [[5, 6, IGNORED], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_the_same_texts_are_held_out_for_the_same_seed() -> None:
    texts = [str(n) for n in range(20)]
    training, held_out = split(texts, 0.1, 3)
    assert (len(training), len(held_out)) == (18, 2)
    assert sorted(training + held_out) == sorted(texts)
    assert split(texts, 0.1, 3) == (training, held_out)
    assert split(texts, 0.1, 4) != (training, held_out)


@pytest.mark.parametrize(
    ("settings", "examples", "ranks", "limit", "plan"),
    [
        ({}, 80, 1, None, Plan(8, 8, 1, 30, 3)),
        ({}, 80, 4, None, Plan(8, 2, 1, 30, 3)),
        ({"accumulation": 2}, 80, 2, None, Plan(8, 2, 2, 30, 3)),
        ({"steps_max": 7, "every": 5}, 80, 1, None, Plan(8, 8, 1, 7, 5)),
        ({"epochs": 0.01}, 80, 1, None, Plan(8, 8, 1, 1, 1)),
        ({}, 5, 2, None, Plan(4, 2, 1, 3, 1)),  # fewer examples than a batch
        ({"accumulation": 4}, 5, 2, None, Plan(4, 2, 1, 3, 1)),
        ({}, 80, 1, 4, Plan(8, 4, 2, 30, 3)),  # it ran out of memory
        ({"batch": 12}, 80, 1, 5, Plan(12, 4, 3, 18, 1)),  # 5 does not divide 12
        ({"batch": 7}, 80, 1, 3, Plan(7, 1, 7, 33, 3)),
        ({}, 80, 1, 0, Plan(8, 1, 8, 30, 3)),
    ],
)
def test_the_plan(settings: dict[str, Any], examples: int, ranks: int, limit: int | None, plan: Plan) -> None:
    assert plan_of(Finetune(model="m", **settings), examples, ranks, limit) == plan


def test_each_rank_needs_an_example() -> None:
    with pytest.raises(TextsError, match="make 1 example of at least two tokens: each rank needs one"):
        plan_of(Finetune(model="m"), 1, 2, None)


@pytest.mark.parametrize(
    ("needs", "strategy", "says"),
    [
        ([Need(2 * GIB, 4 * GIB), Need(3 * GIB, 4 * GIB)], "ddp", "3.0 GiB"),
        ([Need(2 * GIB, 4 * GIB), Need(3 * GIB, 2 * GIB)], "fsdp2", "of the 2.0 GiB"),
        ([Need(2 * GIB, 4 * GIB), Need(None, 4 * GIB)], "fsdp2", "ran out of a rank's memory"),
    ],
)
def test_a_model_that_does_not_fit_a_rank_is_shared_out(needs: list[Need], strategy: str, says: str) -> None:
    chosen, why = choose(needs)
    assert chosen == strategy
    assert says in why


CALM = {
    "micro_batch": 8, "accumulation": 1, "accumulation_asked": 1, "memory_peak": 0.7, "pauses": 0.1, "padding": 0.1,
    "evaluations": [(0, 3.0), (5, 2.0)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"accumulation": 4}, ["accumulation 4: 1 ran out of memory"]),
        ({"accumulation": 4, "accumulation_asked": 4, "memory_peak": 0.2}, ["accumulation 2: passes of 8 took 20%"]),
        ({"accumulation": 4, "accumulation_asked": 4}, []),
        ({"evaluations": []}, ["more texts: none were held out"]),
        ({"evaluations": [], "pauses": 0.5}, ["more texts", "a larger every: checkpoints took 50%"]),
        ({"evaluations": [(0, 3.0), (5, 4.0)]}, ["a lower learning_rate"]),
        ({"evaluations": [(0, 3.0), (5, 2.0), (10, 1.0)]}, ["more epochs"]),
        ({"evaluations": [(0, 3.0), (5, 1.0), (10, 2.0), (15, 3.0)]}, ["lowest at step 5 of 15"]),
        ({"evaluations": [(0, 3.0), (5, 2.0), (10, 1.0), (15, 1.1)]}, []),
        ({"pauses": 0.5}, ["a larger every: evaluations and checkpoints took 50%"]),
        ({"padding": 0.5}, ["50% of what was computed was padding"]),
    ],
)
def test_advice_follows_from_measurements(changes: dict[str, Any], says: list[str]) -> None:
    found = advice(CALM | changes)
    assert len(found) == len(says)
    assert all(part in text for part, text in zip(says, found, strict=True))


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    assert last_committed(tmp_path / "none") is None
    for step in (5, 10, 20):
        (tmp_path / f"checkpoint-{step}" / "inner").mkdir(parents=True)
        (tmp_path / f"checkpoint-{step}" / "inner" / "weights").write_text("x")
    commit(tmp_path / "checkpoint-5")
    commit(tmp_path / "checkpoint-10")
    assert last_committed(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-20").exists(), "it is removed"


def test_a_version_appears_whole_under_the_next_number(tmp_path: Path) -> None:
    files, model = tmp_path / "final", tmp_path / "models" / "acme" / "chat"
    files.mkdir()
    (files / "config.json").write_text("{}")
    assert publish(files, model, {"task": 17}) == 1
    assert publish(files, model, {"task": 18}) == 2
    (model / "7").mkdir()
    assert publish(files, model, {"task": 19}) == 8
    assert sorted(entry.name for entry in model.iterdir()) == ["1", "2", "7", "8"]
    assert sorted(entry.name for entry in (model / "8").iterdir()) == ["config.json", "finetune.json"]
    assert origin_of(model, 8) == {"task": 19}
    assert published(model, 18) == 2
    assert published(model, 20) is None
    assert published(tmp_path / "none", 17) is None


def test_a_version_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, model = tmp_path / "final", tmp_path / "chat"
    files.mkdir()
    (files / "config.json").write_text("{}")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        publish(files, model, {"task": 1})
    assert [*model.iterdir()] == []


def test_what_a_killed_publish_left_is_removed(tmp_path: Path) -> None:
    files, parent = tmp_path / "files", tmp_path / "model"
    files.mkdir()
    for name in (".finetune-7-killed", ".finetune-8-of-another-task"):
        (parent / name).mkdir(parents=True)
    assert publish(files, parent, {"task": 7}) == 1
    assert sorted(path.name for path in parent.iterdir()) == [".finetune-8-of-another-task", "1"]


def test_the_loss_of_an_evaluation_stays_no_number() -> None:
    """It counted as 0.0, so weights that are no numbers were the best."""
    trainer: Any = Trainer.__new__(Trainer)
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.compute_loss_context_manager = contextlib.nullcontext
    trainer.eval_dataset = [{"input_ids": [1, 2, 3]}]
    labels = torch.tensor([[1, 2, 3], [1, 2, 3]])
    for loss, shown, expected in (
        (1.5, labels, 1.5),
        (math.nan, labels, math.nan),
        (math.nan, labels * 0 + IGNORED, 0.0),
    ):
        model = functools.partial(_Output, torch.tensor(loss))
        found, *_ = trainer.prediction_step(model, {"labels": shown})
        assert float(found) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ({}, False),
        ({0: 3.0}, False),  # there was none after the beginning
        ({0: 3.0, 5: math.nan, 10: math.inf}, True),
        ({0: 3.0, 5: 2.5, 10: math.nan}, False),  # the best checkpoint is published
    ],
)
def test_a_training_diverges_if_no_evaluation_after_its_beginning_is_finite(
    losses: dict[int, float], *, diverged: bool
) -> None:
    history = [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
    assert _diverged([*history, {"step": 10, "loss": 1.0}]) is diverged


def test_weights_that_are_no_numbers_are_not_published(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    )
    with torch.no_grad():
        model.transformer.wte.weight[3, 3] = math.inf
    model.save_pretrained(tmp_path)
    settings: Any = SimpleNamespace(tuning=Finetune(model="m"), spec=SimpleNamespace(source="packaged"))
    with pytest.raises(DivergedError, match="lower learning_rate"):
        _finish_files(settings, tmp_path, None)


class _Output:
    def __init__(self, loss: Any, **_: Any) -> None:
        self.loss = loss


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = Settings(
        tuning=Finetune(model="chat", epochs=2.5), task=17, name="night", folder=tmp_path, texts=tmp_path / "texts",
        spec=ModelSpec(name="chat", folder=tmp_path / "chat", kind="generate", allow_pickle=("a",)),
        repository=tmp_path, output="chat-tuned", artifacts="", artifacts_bytes_max=1 << 30, device="cuda:0",
    )  # fmt: skip
    settings.write(tmp_path / "settings.json")
    assert Settings.read(tmp_path / "settings.json") == settings
    assert json.loads((tmp_path / "settings.json").read_text())["tuning"]["epochs"] == 2.5

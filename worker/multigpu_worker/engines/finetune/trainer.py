"""transformers.Trainer with our evaluations, checkpoints and reports."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from multigpu import train
from multigpu._kinds.training import tell
from torch.distributed.tensor import DTensor

from multigpu_worker.engines.common.pretrained import transformers
from multigpu_worker.engines.finetune.checkpoints import commit
from multigpu_worker.engines.finetune.examples import IGNORED
from multigpu_worker.engines.finetune.plan import Plan

# Seconds between lines of the log, at least.
LOG_S = 1.0


class Trainer(transformers.Trainer):
    def _run_epoch(self, *args: Any, **given: Any) -> None:
        """Trains no step more, if the checkpoint is that of the last one: Trainer looks only after a step."""
        if self.state.global_step < self.state.max_steps:
            base: Any = super()
            base._run_epoch(*args, **given)  # noqa: SLF001  there is no public place for this
        else:
            self.control.should_training_stop = True

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
        """So that an evaluation has the mean loss of its tokens: Trainer averages what this returns by example."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs).loss
        tokens = (labels[:, 1:] != IGNORED).sum()
        # Of examples that only fill a batch, the mean loss is not a number. One of real examples has to stay so.
        loss = torch.where(tokens > 0, loss.float(), 0.0)
        return loss * tokens / (len(labels) * self._mean_tokens), None, None

    @functools.cached_property
    def _mean_tokens(self) -> float:
        """Predicted tokens of an example that is held out."""
        examples: Any = self.eval_dataset
        return sum(len(each["input_ids"]) - 1 for each in examples) / len(examples)


@dataclass
class Reports(transformers.TrainerCallback):
    """Passes on what Trainer measures, and makes its checkpoints count."""

    plan: Plan
    say: Callable[..., None]
    shards: bool
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    begin_s: float = field(default_factory=time.monotonic)
    begin_step: int = 0
    _pauses_s: float = 0.0
    _paused_s: float = 0.0
    _said_s: float = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.shards and not all(isinstance(each, DTensor) for each in given["model"].parameters()):
            raise RuntimeError("accelerate has not shared the weights out: FSDP2 needs accelerate 1.10 or newer")
        self.begin_s, self.begin_step = time.monotonic(), state.global_step
        before = [(entry["step"], entry["eval_loss"]) for entry in state.log_history if "eval_loss" in entry]
        self.evaluations += [each for each in before if math.isfinite(each[1])]  # of an earlier attempt

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._paused_s = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._paused_s:
            self._pauses_s += time.monotonic() - self._paused_s

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        logs: dict[str, float] = given["logs"]
        names = ("loss", "grad_norm", "learning_rate", "eval_loss")
        metrics = {name: float(logs[name]) for name in names if name in logs}
        if "eval_loss" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
            if math.isfinite(metrics["eval_loss"]):
                self.evaluations.append((state.global_step, metrics["eval_loss"]))
        if not metrics:  # Trainer's summary at the end
            return
        train.report(metrics, step=state.global_step, fraction=min(1.0, state.global_step / self.plan.steps))
        now = time.monotonic()
        if now - self._said_s >= LOG_S or "eval_loss" in metrics:
            self._said_s = now
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "grad_norm")
            self.say(f"step {state.global_step} of {self.plan.steps}: {shown}{self._left(state, now)}", flush=True)

    @property
    def pauses(self) -> float:
        """The share of the time that was between steps: in evaluations and checkpoints."""
        return self._pauses_s / (time.monotonic() - self.begin_s)

    def _left(self, state: Any, now: float) -> str:
        done = state.global_step - self.begin_step
        if not done:
            return ""
        return f", {(now - self.begin_s) / done * (self.plan.steps - state.global_step):.0f} s left"

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            commit(folder)
            tell({"checkpoint": {"step": state.global_step, "folder": str(folder)}})

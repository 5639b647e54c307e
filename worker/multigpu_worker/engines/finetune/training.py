"""The training itself: transformers.Trainer with our checkpoints and reports."""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from multigpu import train
from multigpu._kinds.finetuning import Finetune, TextsError, read_texts
from multigpu._kinds.training import tell
from torch.distributed.tensor import DTensor

from multigpu_worker.engines.common.pretrained import transformers
from multigpu_worker.engines.finetune.advice import advice
from multigpu_worker.engines.finetune.checkpoints import commit, last_committed
from multigpu_worker.engines.finetune.examples import IGNORED, Example, collate, examples_of, split
from multigpu_worker.engines.finetune.memory import (
    Need,
    begin_peak,
    choose,
    device_bytes,
    limit_memory,
    measure,
    peak_bytes,
    ranks_beside,
)
from multigpu_worker.engines.finetune.publish import origin_of, publish, published
from multigpu_worker.engines.finetune.settings import CHECKPOINTS, FINAL, MICRO_BATCH, Settings
from multigpu_worker.engines.generate.weights import read_weights

# What torchrun's variables make a distributed job of, which DataParallel is not.
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Checkpoints that are kept: the best, the last, and the one before, as the last counts only after it is removed.
KEPT = 3
# A line of the log comes at most so often.
LOG_S = 1.0
LEARNING_RATES = {"full": 5e-5, "lora": 2e-4}


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the work of each step. `batch`: examples over all ranks; `micro_batch`: of a rank in a pass."""

    batch: int
    micro_batch: int
    accumulation: int
    steps: int
    every: int


def plan_of(tuning: Finetune, examples: int, ranks: int, limit: int | None) -> Plan:
    """`limit`: of the micro-batch, if larger ones ran out of memory. TextsError: there are too few examples."""
    batch, accumulation = tuning.batch, tuning.accumulation
    if examples < batch:
        batch, accumulation = examples // ranks * ranks, 1
    if not batch:
        raise TextsError(f"the texts make {examples} examples of at least two tokens: {ranks} ranks need one each")
    of_rank = batch // ranks
    micro = of_rank // accumulation
    if limit is not None:
        micro = max(size for size in range(1, micro + 1) if of_rank % size == 0 and size <= max(1, limit))
    steps = tuning.steps_max or max(1, round(tuning.epochs * (examples // batch)))
    return Plan(batch, micro, of_rank // micro, steps, tuning.every or max(1, steps // 10))


def finetune(settings: Settings, use_plan: Callable[[Plan], None]) -> None:
    """Trains and publishes. `use_plan`: is told of the plan before any memory is used for it."""
    tuning = settings.tuning
    on_cpu, alone = settings.device == "cpu", tuning.strategy == "dp"
    if alone:
        for name in OF_RANKS:
            os.environ.pop(name, None)
    state: Any = PartialState(cpu=on_cpu, backend="gloo" if on_cpu and not alone else None)
    ranks = torch.cuda.device_count() if alone and not on_cpu else state.num_processes
    parent = settings.repository / settings.output
    (version,) = broadcast_object_list([published(parent, settings.task) if state.is_main_process else None])
    if version is not None:
        if state.is_main_process:
            _tell(settings, version, origin_of(parent, version)["found"])
        return
    limit_memory(state.device, tuning.memory_fraction)
    precision = _precision(tuning, state.device)
    # Weights that don't change need no float32.
    half = precision == "bf16" and tuning.method == "lora" and tuning.strategy != "fsdp2"
    dtype = torch.bfloat16 if half else torch.float32
    model, tokenizer, _ = read_weights(settings.spec, settings.artifacts, settings.artifacts_bytes_max, dtype)
    if tuning.method == "lora":
        model = _with_lora(model, tuning)
    texts, held_out = split(read_texts(settings.texts), tuning.evaluation_fraction, tuning.seed)
    examples = examples_of(texts, tokenizer, tuning.length)
    evaluated = examples_of(held_out, tokenizer, tuning.length)
    limit_file = settings.folder / MICRO_BATCH
    plan = plan_of(tuning, len(examples), ranks, int(limit_file.read_text()) if limit_file.exists() else None)
    use_plan(plan)
    # So each epoch has the same steps on any number of ranks.
    examples = examples[: len(examples) // plan.batch * plan.batch]
    strategy, why = tuning.strategy, "it was asked for"
    if strategy == "auto" and ranks == 1:
        strategy, why = "ddp", "there is one rank"
    elif strategy == "auto":
        longest = sorted(examples, key=lambda each: -len(each["input_ids"]))[: plan.micro_batch]
        beside = ranks_beside(state.device, gather_object)
        own = measure(model, collate(longest), state.device, beside, tuning.memory_fraction)
        strategy, why = choose([Need(*each) for each in gather_object([(own.peak_bytes, own.usable_bytes)])])
    if strategy == "fsdp2":
        model.float()  # it wants one type
    say = print if state.is_main_process else lambda *_, **__: None
    say(f"strategy {strategy}: {why}")
    say(f"{len(examples)} examples, {len(evaluated)} held out; {plan.steps} steps of {plan.batch}")
    say(f"each rank makes {plan.accumulation} passes of {plan.micro_batch} a step", flush=True)

    arguments = _arguments(settings, plan, strategy, precision, evaluates=bool(evaluated))
    if strategy == "fsdp2":
        # accelerate shares weights out on accelerators alone, and would train as DDP does on CPUs without a word.
        assert arguments.device == state.device, "it has made a new PartialState"
        PartialState().distributed_type = DistributedType.MULTI_GPU
    reports = Reports(plan, say, shards=strategy == "fsdp2")
    # Examples that predict nothing make all batches of evaluations full: else accelerate repeats some.
    filled = evaluated + [{"input_ids": [0]}] * (-len(evaluated) % (ranks * plan.micro_batch))
    trainer: Any = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=filled or None,
        data_collator=collate,
        callbacks=[reports, *([transformers.EarlyStoppingCallback(tuning.patience)] if tuning.patience else [])],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    begin_peak(state.device)
    found_there = last_committed(settings.folder / CHECKPOINTS) if state.is_main_process else None
    (checkpoint,) = broadcast_object_list([found_there])
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    found = _found(settings, plan, strategy, why, examples, evaluated, reports, state)
    final = settings.folder / FINAL
    trainer.save_model(str(final))  # a collective
    if state.is_main_process:
        _finish_files(settings, final, tokenizer)
        origin = {"task": settings.task, "job": settings.name, "settings": tuning.plain() | {"texts": ""}}
        version = publish(final, parent, origin | {"found": found})
        _tell(settings, version, found)
        for done in (final, settings.folder / CHECKPOINTS):
            shutil.rmtree(done, ignore_errors=True)
    state.wait_for_everyone()
    state.destroy_process_group()


class Trainer(transformers.Trainer):
    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
        """So that an evaluation has the mean loss of its tokens: Trainer averages what this returns by example."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs).loss
        predicted: Any = self.eval_dataset
        mean_tokens = sum(len(each["input_ids"]) - 1 for each in predicted) / len(predicted)
        tokens = (labels[:, 1:] != IGNORED).sum()
        return loss.float().nan_to_num() * tokens / (len(labels) * mean_tokens), None, None


@dataclass
class Reports(transformers.TrainerCallback):
    """Passes on what Trainer measures, and makes its checkpoints count."""

    plan: Plan
    say: Callable[..., None]
    shards: bool
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    pauses_s: float = 0.0
    begin_s: float = field(default_factory=time.monotonic)
    begin_step: int = 0
    _paused_s: float = 0.0
    _said_s: float = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.shards and not all(isinstance(each, DTensor) for each in given["model"].parameters()):
            raise RuntimeError("accelerate has not shared the weights out: FSDP2 needs accelerate 1.10 or newer")
        self.begin_s, self.begin_step = time.monotonic(), state.global_step
        for entry in state.log_history:  # of an earlier attempt
            if "eval_loss" in entry:
                self.evaluations.append((entry["step"], entry["eval_loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._paused_s = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._paused_s:
            self.pauses_s += time.monotonic() - self._paused_s

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        logs: dict[str, float] = given["logs"]
        names = ("loss", "grad_norm", "learning_rate", "eval_loss")
        metrics = {name: float(logs[name]) for name in names if name in logs}
        if "eval_loss" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
            self.evaluations.append((state.global_step, metrics["eval_loss"]))
        if not metrics:  # Trainer's summary at the end
            return
        train.report(metrics, step=state.global_step, fraction=min(1.0, state.global_step / self.plan.steps))
        now = time.monotonic()
        if now - self._said_s >= LOG_S or "eval_loss" in metrics:
            self._said_s = now
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "grad_norm")
            self.say(f"step {state.global_step} of {self.plan.steps}: {shown}{self._left(state, now)}", flush=True)

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


def _precision(tuning: Finetune, device: torch.device) -> str:
    if tuning.precision != "auto":
        return tuning.precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def _with_lora(model: Any, tuning: Finetune) -> Any:
    import peft  # noqa: PLC0415  slow, and of an extra

    torch.manual_seed(tuning.seed)  # all ranks begin with the same matrices
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=tuning.lora_rank,
            lora_alpha=2 * tuning.lora_rank,
            target_modules="all-linear",
        ),
    )


def _arguments(settings: Settings, plan: Plan, strategy: str, precision: str, *, evaluates: bool) -> Any:
    tuning = settings.tuning
    sharding: dict[str, Any] = {}
    if strategy == "fsdp2":
        sharding = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
    on_cpu = settings.device == "cpu"
    return transformers.TrainingArguments(
        output_dir=str(settings.folder / CHECKPOINTS),
        per_device_train_batch_size=plan.micro_batch,
        per_device_eval_batch_size=plan.micro_batch,
        gradient_accumulation_steps=plan.accumulation,
        learning_rate=tuning.learning_rate or LEARNING_RATES[tuning.method],
        max_steps=plan.steps,
        seed=tuning.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and strategy != "dp" else None,
        ddp_find_unused_parameters=False,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        logging_steps=1,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=plan.every,
        eval_on_start=evaluates,
        save_strategy="steps",
        save_steps=plan.every,
        save_total_limit=KEPT,
        load_best_model_at_end=evaluates,
        metric_for_best_model="eval_loss" if evaluates else None,
        greater_is_better=False if evaluates else None,
        report_to="none",
        disable_tqdm=True,
        **sharding,
    )


def _found(
    settings: Settings,
    plan: Plan,
    strategy: str,
    why: str,
    examples: Sequence[Example],
    evaluated: Sequence[Example],
    reports: Reports,
    state: Any,
) -> dict[str, Any]:
    """What was trained, and how well."""
    seconds = time.monotonic() - reports.begin_s
    lengths = [len(each["input_ids"]) for each in examples]
    padded = sum(max(part) * len(part) for part in _parts(lengths, plan.micro_batch))
    found = {
        "base": settings.spec.id,
        "method": settings.tuning.method,
        "strategy": strategy,
        "strategy_reason": why,
        "examples": len(examples),
        "examples_evaluated": len(evaluated),
        "tokens": sum(lengths),
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "accumulation_asked": settings.tuning.accumulation,
        "evaluations": reports.evaluations,
        "pauses": reports.pauses_s / seconds,
        "padding": 1 - sum(lengths) / padded,
        "memory_peak": peak_bytes(state.device) / device_bytes(state.device),
    }
    return found | {"advice": advice(found)}


def _parts(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    return [lengths[at : at + size] for at in range(0, len(lengths), size)]


def _finish_files(settings: Settings, folder: Path, tokenizer: Any) -> None:
    """Makes what Trainer has saved a model folder: without pickles, and with LoRA's matrices merged."""
    if settings.tuning.method == "lora":
        import peft  # noqa: PLC0415  slow, and of an extra

        base, _, _ = read_weights(settings.spec, settings.artifacts, settings.artifacts_bytes_max, torch.float32)
        merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
        shutil.rmtree(folder)
    else:
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged.to(_saved_type(settings)).save_pretrained(folder)
    (folder / "training_args.bin").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def _saved_type(settings: Settings) -> torch.dtype:
    """That of the model's own files."""
    if settings.spec.source != "huggingface":
        return torch.float16
    config = transformers.AutoConfig.from_pretrained(settings.spec.folder, local_files_only=True)
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _tell(settings: Settings, version: int, found: dict[str, Any]) -> None:
    tell({"finetuned": {"model": f"{settings.output}:{version}"} | found})

"""A rank of a job that fine-tunes, from the texts to the published version."""

import gc
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from multigpu._kinds.finetuning import Finetune, TextsError, read_texts
from multigpu._kinds.training import tell

from multigpu_worker.engines.common.pretrained import transformers
from multigpu_worker.engines.common.torch_runtime import memory_errors
from multigpu_worker.engines.finetune.advice import advice
from multigpu_worker.engines.finetune.checkpoints import last_committed, step_of
from multigpu_worker.engines.finetune.examples import Example, collate, examples_of, split
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
from multigpu_worker.engines.finetune.plan import Plan, plan_of
from multigpu_worker.engines.finetune.publish import origin_of, publish, published
from multigpu_worker.engines.finetune.settings import CHECKPOINTS, FINAL, MICRO_BATCH, DivergedError, Settings
from multigpu_worker.engines.finetune.trainer import Reports, Trainer
from multigpu_worker.engines.generate.weights import read_weights

# The variables by which torchrun makes a job distributed. DataParallel must not see them.
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Checkpoints that are kept: the best, the last, and the one before, because Trainer removes the oldest before the last
# is committed.
KEPT = 3
LEARNING_RATES = {"full": 5e-5, "lora": 2e-4}


def finetune(settings: Settings, use_plan: Callable[[Plan], None]) -> None:
    """Trains and publishes. `use_plan` is called with the plan before the first pass."""
    tuning = settings.tuning
    on_cpu, alone = settings.device == "cpu", tuning.strategy == "dp"
    if alone:
        for name in OF_RANKS:
            os.environ.pop(name, None)
    state: Any = PartialState(cpu=on_cpu, backend="gloo" if on_cpu and not alone else None)
    ranks = torch.cuda.device_count() if alone and not on_cpu else state.num_processes
    parent = settings.repository / settings.output
    (version,) = broadcast_object_list([published(parent, settings.task) if state.is_main_process else None])
    if version is None:
        devices = [torch.device("cuda", n) for n in range(ranks)] if alone and not on_cpu else [state.device]
        limit_memory(devices, tuning.memory_fraction)
        _train(settings, state, ranks, use_plan)
    elif state.is_main_process:  # by an earlier attempt
        _tell(settings, version, origin_of(parent, version)["found"])


def _train(settings: Settings, state: Any, ranks: int, use_plan: Callable[[Plan], None]) -> None:
    tuning = settings.tuning
    precision = _precision(tuning, state.device)
    model, tokenizer = _model(settings, precision)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and tuning.length > context:
        raise TextsError(f"length is {tuning.length}, and the context of {tuning.model} {context} tokens: choose less")
    texts, held_out = split(read_texts(settings.texts), tuning.evaluation_fraction, tuning.seed)
    examples = examples_of(texts, tokenizer, tuning.length)
    evaluated = examples_of(held_out, tokenizer, tuning.length)
    limit = settings.folder / MICRO_BATCH
    plan = plan_of(tuning, len(examples), ranks, int(limit.read_text()) if limit.exists() else None)
    use_plan(plan)
    # Whole batches only: so an epoch has the same steps on any number of ranks.
    examples = examples[: len(examples) // plan.batch * plan.batch]
    strategy, why = _strategy(tuning, model, examples, plan, ranks, state.device)
    say = print if state.is_main_process else lambda *_, **__: None
    say(f"strategy {strategy}: {why}")
    say(f"{len(examples)} examples, {len(evaluated)} held out; {plan.steps} steps of {plan.batch}")
    _say_plan(say, plan, tuning)

    last = last_committed(settings.folder / CHECKPOINTS) if state.is_main_process else None
    (checkpoint,) = broadcast_object_list([last])
    if checkpoint is not None:
        say(f"goes on from the checkpoint of step {step_of(checkpoint)}", flush=True)
    arguments = _arguments(settings, plan, strategy, precision, evaluates=bool(evaluated))
    arguments.eval_on_start = bool(evaluated) and checkpoint is None
    if strategy == "fsdp2":
        model.float()  # it wants one type
        # accelerate shares weights out on accelerators alone, and would train as DDP does on CPUs without a word.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    reports = Reports(plan, say, shards=strategy == "fsdp2")
    # Examples that predict nothing make all batches of evaluations full: else accelerate repeats some.
    filled = evaluated + [{"input_ids": [0]}] * (-len(evaluated) % (ranks * plan.micro_batch))
    trainer = _trainer(model, arguments, examples, filled, reports, tuning.patience)
    begin_peak(state.device)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model(str(settings.folder / FINAL))  # a collective
    state.wait_for_everyone()
    state.destroy_process_group()  # other ranks would wait for the files of a large model longer than NCCL lets them
    if state.is_main_process:
        if _diverged(trainer.state.log_history):
            raise DivergedError
        found: dict[str, Any] = {
            "base": settings.spec.id,
            "method": tuning.method,
            "strategy": strategy,
            "strategy_reason": why,
        }
        found |= {"precision": precision, "learning_rate": arguments.learning_rate, "steps": plan.steps}
        found |= {"every": plan.every} | _measured(tuning, plan, examples, evaluated, reports, state.device)
        del trainer, model  # merging needs the memory
        _publish(settings, tokenizer, found | {"advice": advice(found)})


def _say_plan(say: Callable[..., object], plan: Plan, tuning: Finetune) -> None:
    if plan.batch < tuning.batch:
        say(f"a step takes {plan.batch} examples, as there are fewer than the batch of {tuning.batch}")
    passes = "one pass" if plan.accumulation == 1 else f"{plan.accumulation} passes"
    say(f"each rank makes {passes} of {plan.micro_batch} a step", flush=True)


def _model(settings: Settings, precision: str) -> tuple[Any, Any]:
    """The model on the CPU, as it is trained, and its tokenizer."""
    tuning = settings.tuning
    # Weights that don't change need no float32.
    half = precision == "bf16" and tuning.method == "lora" and tuning.strategy != "fsdp2"
    dtype = torch.bfloat16 if half else torch.float32
    model, tokenizer, _ = read_weights(settings.spec, settings.artifacts, settings.artifacts_bytes_max, dtype)
    return _with_lora(model, tuning) if tuning.method == "lora" else model, tokenizer


def _strategy(
    tuning: Finetune, model: Any, examples: list[Example], plan: Plan, ranks: int, device: torch.device
) -> tuple[str, str]:
    """The strategy, and why."""
    if tuning.strategy != "auto":
        return tuning.strategy, "it was asked for"
    if ranks == 1:
        return "ddp", "there is one rank"
    longest = sorted(examples, key=lambda each: -len(each["input_ids"]))[: plan.micro_batch]
    beside = ranks_beside(device, gather_object)
    own = measure(model, collate(longest), device, beside, tuning.memory_fraction)
    return choose([Need(*each) for each in gather_object([(own.peak_bytes, own.usable_bytes)])])


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


def _trainer(
    model: Any, arguments: Any, examples: list[Example], evaluated: list[Example], reports: Reports, patience: int
) -> Any:
    stop_early = [transformers.EarlyStoppingCallback(patience)] if patience else []
    trainer: Any = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=evaluated or None,
        data_collator=collate,
        callbacks=[reports, *stop_early],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _diverged(log_history: Sequence[dict[str, Any]]) -> bool:
    """Whether there were evaluations after the first step, and none of them had a finite loss."""
    losses = [entry["eval_loss"] for entry in log_history if "eval_loss" in entry and entry["step"]]
    return bool(losses) and not any(map(math.isfinite, losses))


def _measured(
    tuning: Finetune, plan: Plan, examples: Sequence[Example], evaluated: Sequence[Example], reports: Reports,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    lengths = [len(each["input_ids"]) for each in examples]
    padded = sum(max(part) * len(part) for part in _parts(lengths, plan.micro_batch))
    return {
        "examples": len(examples),
        "examples_evaluated": len(evaluated),
        "tokens": sum(lengths),
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "accumulation_asked": tuning.accumulation,
        "evaluations": reports.evaluations,
        "pauses": reports.pauses,
        "padding": 1 - sum(lengths) / padded,
        "memory_peak": peak_bytes(device) / device_bytes(device),
    }


def _parts(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    return [lengths[at : at + size] for at in range(0, len(lengths), size)]


def _publish(settings: Settings, tokenizer: Any, found: dict[str, Any]) -> None:
    """Makes a version of what Trainer has saved. Then removes the checkpoints and the saved files."""
    final = settings.folder / FINAL
    gc.collect()
    try:
        with memory_errors():
            _finish_files(settings, final, tokenizer)
    except MemoryError as error:  # smaller passes would not help
        text = f"the model is trained, but it can't be saved in this memory, and nothing was published: {error}"
        raise RuntimeError(text) from error
    origin = {"task": settings.task, "job": settings.name, "settings": settings.tuning.plain() | {"texts": ""}}
    version = publish(final, settings.repository / settings.output, origin | {"found": found})
    _tell(settings, version, found)
    for done in (final, settings.folder / CHECKPOINTS):
        shutil.rmtree(done, ignore_errors=True)


def _finish_files(settings: Settings, folder: Path, tokenizer: Any) -> None:
    """Makes what Trainer has saved a model folder: without pickles, and with LoRA's matrices merged."""
    if settings.tuning.method == "lora":
        import peft  # noqa: PLC0415  slow, and of an extra

        base, _, _ = read_weights(settings.spec, settings.artifacts, settings.artifacts_bytes_max, torch.float32)
        merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
        shutil.rmtree(folder)
    else:
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged.to(_saved_type(settings))
    if not all(bool(torch.isfinite(each).all()) for each in merged.parameters()):
        raise DivergedError
    merged.save_pretrained(folder)
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

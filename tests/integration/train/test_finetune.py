"""Jobs that fine-tune a model of the repository, on a real fleet, with torch.distributed over Gloo."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import multigpu
import pytest

from tests.fleet import Fleet, until
from tests.worker.generate.tiny_llama import save_tiny_llama

for module in ("torch", "transformers", "accelerate", "peft"):
    pytest.importorskip(module, reason="the extra `finetune` is not installed")
pytestmark = pytest.mark.slow
WORKERS = 2
STEPS = 50


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "train").mkdir()
    (folder / "train" / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(100)))
    save_tiny_llama(folder / "models" / "tiny")
    save_tiny_llama(folder / "models" / "versions" / "1")
    flags = ["--train-dir", str(folder / "train"), "--model-repository", str(folder / "models")]
    with Fleet(folder, workers=WORKERS, worker_flags=[*flags, "--repository-poll-s", "1"]) as fleet:
        fleet.wait_for_workers()
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[multigpu.Client]:
    fleet.wait_for_workers()
    with fleet.client() as client:
        yield client


def texts(count: int) -> list[str]:
    """Sentences that are easy to learn, of different lengths."""
    rng = random.Random(7)
    return [" ".join(["the cat sat on the mat"] * rng.randint(1, 4)) for _ in range(count)]


def losses(outcome: multigpu.Outcome) -> list[float]:
    events = [json.loads(data) for data in outcome.message.partials]
    return [event["metrics"]["loss"] for event in events if "loss" in event.get("metrics", {})]


def tuned(client: multigpu.Client, **options: Any) -> tuple[dict[str, Any], list[float]]:
    settings: dict[str, Any] = {"steps_max": STEPS, "learning_rate": 1e-3, "every": 25, "length": 64}
    handle = client.finetune("tiny", texts(100), **settings | options)
    outcome = handle.outcome(timeout=240)
    assert outcome.succeeded, outcome
    return outcome.value()["finetuned"], losses(outcome)


@pytest.fixture(scope="module")
def of_one_rank(fleet: Fleet) -> dict[str, list[float]]:
    with fleet.client() as client:
        return {method: tuned(client, method=method, output=f"one-{method}")[1] for method in ("full", "lora")}


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_does(
    client: multigpu.Client, of_one_rank: dict[str, list[float]], strategy: str, method: str
) -> None:
    name = f"two-{strategy}-{method}"
    found, curve = tuned(client, world_size=2, strategy=strategy, method=method, output=name)
    assert len(curve) == STEPS
    assert curve == pytest.approx(of_one_rank[method], abs=1e-4)
    evaluations = [loss for _, loss in found["evaluations"]]
    assert len(evaluations) == 3
    assert evaluations == sorted(evaluations, reverse=True), "the perplexity falls"
    assert found["model"] == f"{name}:1"


def test_the_result_is_served(fleet: Fleet, client: multigpu.Client) -> None:
    found, _ = tuned(client, output="served", steps_max=300, learning_rate=3e-3, every=100)
    until(lambda: any(model.name == "served:1" for model in client.admin.models()), 30)
    answer = client.generate("the cat ", model="served", max_tokens=15)
    assert answer.text.startswith("sat on the mat")

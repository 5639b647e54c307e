"""Jobs that fine-tune a model of the repository, on a real fleet, with torch.distributed over Gloo."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import multigpu
import pytest
from multigpu._kinds.job_history import History, by_step

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


def events(outcome: multigpu.Outcome) -> list[dict[str, Any]]:
    return [json.loads(data) for data in outcome.message.partials]


def losses(outcome: multigpu.Outcome) -> list[tuple[int, float]]:
    """The kept losses with their steps, in the order in which they came."""
    found = [event for event in events(outcome) if "loss" in event.get("metrics", {})]
    return [(event["step"], event["metrics"]["loss"]) for event in found]


def ctl(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multigpu.cli", *words, "--master", fleet.address]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def processes(word: str) -> list[int]:
    """The pids of the ranks that have this word in a command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if word in command and "multigpu_worker.engines.finetune" in command:
            found.append(int(folder.name))
    return found


def tuned(client: multigpu.Client, **options: Any) -> tuple[dict[str, Any], list[float]]:
    settings: dict[str, Any] = {"steps_max": STEPS, "learning_rate": 1e-3, "every": 25, "length": 64}
    handle = client.finetune("tiny", texts(100), **settings | options)
    outcome = handle.outcome()
    assert outcome.succeeded, outcome
    return outcome.value()["finetuned"], [loss for _, loss in losses(outcome)]


@pytest.fixture(scope="module")
def of_one_rank(fleet: Fleet) -> dict[str, tuple[dict[str, Any], list[float]]]:
    with fleet.client() as client:
        return {method: tuned(client, method=method, output=f"one-{method}") for method in ("full", "lora")}


@pytest.mark.parametrize(("strategy", "method"), [("ddp", "full"), ("fsdp2", "lora")])
def test_two_ranks_train_as_one_does(
    client: multigpu.Client, of_one_rank: dict[str, tuple[dict[str, Any], list[float]]], strategy: str, method: str
) -> None:
    name = f"two-{strategy}-{method}"
    found, curve = tuned(client, world_size=2, strategy=strategy, method=method, output=name)
    assert len(curve) == STEPS
    of_one, wanted = of_one_rank[method]
    assert curve == pytest.approx(wanted, abs=1e-4)
    evaluations = [loss for _, loss in found["evaluations"]]
    assert evaluations == pytest.approx([loss for _, loss in of_one["evaluations"]], abs=1e-4)
    assert len(evaluations) == 3
    assert evaluations == sorted(evaluations, reverse=True), "the perplexity falls"
    assert found["model"] == f"{name}:1"


def test_the_result_is_served(client: multigpu.Client) -> None:
    tuned(client, output="served", steps_max=300, learning_rate=3e-3, every=100)
    assert client.generate("the cat ", model="served", max_tokens=14, wait_for_worker=True) == "sat on the mat"


def test_versions_are_counted_up(fleet: Fleet, client: multigpu.Client) -> None:
    for version, every in ((2, 0), (3, 100)):  # also more than the steps
        handle = client.finetune("versions", texts(100), steps_max=5, every=every, length=64, method="lora")
        assert handle.outcome().value()["finetuned"]["model"] == f"versions:{version}"
    folder = fleet.folder / "models" / "versions"
    assert sorted(entry.name for entry in folder.iterdir()) == ["1", "2", "3"]
    assert json.loads((folder / "3" / "finetune.json").read_text())["job"] == handle.request_id


def test_a_pass_that_runs_out_of_memory_is_halved(fleet: Fleet, client: multigpu.Client) -> None:
    """The limit is one of the kernel, as no GPU's is here: of 4 GiB for a pass of 2,048 examples with 512 tokens."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    handle = client.finetune(
        "tiny", ["the cat sat on the mat " * 60] * 1024, output="halved", batch=1024, length=512, steps_max=1,
        memory_fraction=(3 << 30) / host_bytes, evaluation_fraction=0.0, backoff_initial_s=0.01,
    )  # fmt: skip
    outcome = handle.outcome(timeout=560)
    assert outcome.succeeded, outcome
    found = outcome.value()["finetuned"]
    assert outcome.attempts > 1
    assert found["micro_batch"] * found["accumulation"] == 1024
    assert any(text.startswith("accumulation") for text in found["advice"])


def test_a_killed_job_ends_as_the_undisturbed_one(fleet: Fleet, client: multigpu.Client) -> None:
    settings: dict[str, Any] = {"world_size": 2, "every": 20, "learning_rate": 1e-3, "length": 64, "steps_max": 300}
    whole = dict(losses(client.finetune("tiny", texts(100), output="whole", **settings).outcome()))
    handle = client.finetune("tiny", texts(100), name="killed", output="killed", **settings)
    folder = fleet.folder / "train" / "jobs" / "killed"
    until(lambda: [*folder.glob("checkpoints/checkpoint-*/COMMITTED")], 120)
    ranks = processes(str(folder))
    assert ranks != [], "it still runs"
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    outcome = handle.outcome()
    assert outcome.succeeded, outcome
    assert outcome.attempts == 2
    reported = losses(outcome)
    # Of a job that takes long, steps that follow another one at once are left out (Events).
    shared = dict(reported).keys() & whole.keys()
    assert len(shared) > 250
    assert [dict(reported)[step] for step in shared] == pytest.approx([whole[step] for step in shared], abs=1e-6)
    assert len(reported) <= 300 + 280, "it began at a checkpoint"
    assert not (folder / "checkpoints").exists(), "the result replaces them"
    assert outcome.value()["checkpoint"] is None
    assert "goes on from the checkpoint of step" in outcome.log
    reports = by_step(History.of(outcome.message.partials))
    assert all("loss" in each["metrics"] for each in reports if each["step"]), "an evaluation hides no loss"


def test_a_result_that_cannot_be_written_is_not_trained_again(fleet: Fleet, client: multigpu.Client) -> None:
    (fleet.folder / "models" / "taken").write_text("a file")
    given: dict[str, Any] = {"name": "taken", "output": "taken", "steps_max": 20, "every": 5, "length": 64}
    outcome = client.finetune("tiny", texts(100), **given).outcome()
    assert outcome.error_type == "ScriptFailed", outcome
    assert "FileExistsError" in outcome.error_message
    shown = ctl(fleet, "train", "logs", "--rank", "1", "taken")
    assert "taken has no rank 1" in shown.stderr
    (fleet.folder / "models" / "taken").unlink()
    outcome = client.finetune("tiny", texts(100), **given).outcome()
    assert outcome.succeeded, outcome
    assert outcome.value()["finetuned"]["model"] == "taken:1"
    assert [event["step"] for event in events(outcome) if "loss" in event.get("metrics", {})] == [*range(1, 21)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "missing"}, "has no model 'missing'; it has these that can be fine-tuned: "),
        ({"output": "../out"}, "can't be the name of a model"),
        ({"output": "tiny"}, "has files beside versions"),
        (
            {"texts": ["x"], "world_size": 2},
            "make 1 example of at least two tokens",
        ),
        ({"texts": [""]}, "make 0 examples"),
        ({"length": 513}, "length is 513, and the context of tiny 512 tokens"),
        ({"texts": [], "file": "../outside.jsonl"}, "there is no file ../outside.jsonl in train_dir"),
        ({"texts": [], "file": "broken.jsonl"}, "broken.jsonl line 2 is neither"),
    ],
)
def test_what_cannot_be_fine_tuned_is_a_final_error(
    fleet: Fleet, client: multigpu.Client, options: dict[str, Any], says: str
) -> None:
    (fleet.folder / "train" / "broken.jsonl").write_text('"fine"\n{"txt": "not"}\n')
    given: dict[str, Any] = {"model": "tiny", "texts": ["some text"] * 20, "steps_max": 1} | options
    model, lines = given.pop("model"), given.pop("texts")
    outcome = client.finetune(model, lines, **given).outcome()
    assert outcome.state is multigpu.OutcomeState.FAILED, outcome
    assert (outcome.attempts, outcome.error_type) == (1, "BadInput")
    assert says in outcome.error_message


def test_a_job_whose_settings_were_wrong_says_so_and_can_go_on(fleet: Fleet, client: multigpu.Client) -> None:
    outcome = client.finetune("later", texts(20), name="early", steps_max=1, length=32).outcome(timeout=60)
    assert outcome.error_type == "BadInput", outcome
    shown = ctl(fleet, "train", "logs", "early")
    assert "has no model 'later'" in shown.stderr
    save_tiny_llama(fleet.folder / "models" / "later")
    ran = ctl(fleet, "train", "resume", "early")
    assert ran.returncode == 0, ran.stderr
    assert "later-tuned:1 is in the model repository" in ran.stderr


def test_the_command_line_says_what_it_has_made(fleet: Fleet, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(40)))
    ran = ctl(fleet,
        "train", "finetune", "--model", "tiny", "--data", str(data), "--steps-max", "4", "--name", "by-hand",
        "--output", "by-hand", "--length", "32",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "strategy ddp: there is one rank" in ran.stdout
    assert "by-hand:1 is in the model repository; perplexity" in ran.stderr
    shown = ctl(fleet, "train", "show", "by-hand").stdout
    assert "steps_max 4" in shown
    assert "by-hand:1 is in the model repository" in shown
    assert json.loads(ctl(fleet, "train", "show", "by-hand", "--json").stdout)["device_hours"] > 0

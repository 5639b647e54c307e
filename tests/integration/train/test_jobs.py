"""Training jobs on a real fleet, with torch.distributed over Gloo."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multigpu
import pytest

from tests.fleet import Fleet, until
from tests.integration.train.jobs import gone, job_folder, kill, pid_of, weights, worker_of

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytestmark = pytest.mark.slow
WORKERS = 3
# Longer than a busy host takes to import torch, in silence.
HANG_S = 40
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("train")
    shutil.copytree(SCRIPTS, folder / "train")
    with Fleet(folder, workers=WORKERS, worker_flags=["--train-dir", str(folder / "train")]) as fleet:
        fleet.wait_for_workers()
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[multigpu.Client]:
    fleet.wait_for_workers()
    with fleet.client() as client:
        yield client


def events(outcome: multigpu.Outcome) -> list[dict[str, Any]]:
    return [json.loads(data) for data in outcome.message.partials]


@pytest.mark.parametrize("script", ["tutorial_ddp.py", "tutorial_fsdp2.py", "with_accelerate.py"])
def test_scripts_for_torchrun_run_unchanged(fleet: Fleet, client: multigpu.Client, script: str) -> None:
    handle = client.train(script, world_size=2)
    outcome = handle.outcome()
    assert outcome.succeeded, outcome
    wanted = {
        "tutorial_ddp.py": "Finished running basic DDP example on rank 0.",
        "tutorial_fsdp2.py": "sharded over 2 ranks",
        "with_accelerate.py": "processes: 2, DistributedType.MULTI_CPU",
    }
    assert wanted[script] in outcome.log


@pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp2"])
def test_a_job_on_one_and_on_two_ranks_learns_the_same(fleet: Fleet, client: multigpu.Client, shard: bool) -> None:
    args = ["--steps", "20", *(["--shard"] if shard else [])]
    found = {}
    for size in (1, 2):
        name = f"same-{shard}-{size}"
        result = client.train("steps.py", args, name=name, world_size=size).result()
        assert result["step"] == result["checkpoint"]["step"] == 20
        found[size] = weights(fleet, name), result["metrics"]["loss"]
    assert found[1][0] == pytest.approx(found[2][0], abs=1e-5)
    assert found[1][1] == pytest.approx(found[2][1], abs=1e-5)


def test_what_a_script_reports_is_kept_with_the_job(client: multigpu.Client) -> None:
    handle = client.train("steps.py", ["--steps", "10"], name="reports", world_size=2)
    followed = [json.loads(part.data) for part in handle.follow() if not isinstance(part, multigpu.Outcome)]
    outcome = handle.outcome()
    assert events(outcome) == followed
    assert [event["step"] for event in followed if "metrics" in event] == [*range(1, 11)]
    assert [event["checkpoint"]["step"] for event in followed if "checkpoint" in event] == [5, 10]
    assert followed[0]["job"]["script"] == "steps.py"
    assert followed[0]["world_size"] == 2


@pytest.mark.parametrize("victim", ["rank 1", "host", "master"])  # all of them: python -m tests.integration.train
def test_a_killed_job_goes_on_from_its_last_checkpoint(fleet: Fleet, client: multigpu.Client, victim: str) -> None:
    undisturbed, name = "undisturbed", f"killed-{victim.replace(' ', '-')}"
    args = ["--steps", "30"]
    client.train("steps.py", args, name=undisturbed, world_size=2).result()
    handle = client.train("steps.py", [*args, "--sleep", "0.05"], name=name, world_size=2, backoff_initial_s=0.01)
    steps = job_folder(fleet, name) / "steps-0"
    until(lambda: steps.exists() and len(steps.read_text().split()) >= 12, 120)
    pid = pid_of(fleet, name, 1)
    kill(fleet, name, victim)
    outcome = handle.outcome()
    assert outcome.succeeded, outcome
    assert weights(fleet, name) == weights(fleet, undisturbed)
    ran = [int(step) for step in steps.read_text().split()]
    resumed = int(re.findall(r"rank 0 of 2 begins at step (\d+)", outcome.log)[-1])
    assert resumed >= 5, "it did not begin at a checkpoint"
    assert resumed % 5 == 0
    # The checkpoint of the last 5 steps may have been under way.
    assert len(ran) - 30 <= 10, "more steps than since the last checkpoint ran again"
    assert gone(pid)


def test_a_stopped_job_goes_on_with_another_number_of_ranks(fleet: Fleet, client: multigpu.Client) -> None:
    args = ["--steps", "30", "--shard"]
    client.train("steps.py", args, name="whole", world_size=2).result()
    handle = client.train("steps.py", [*args, "--sleep", "0.1"], name="resized", world_size=2)
    folder = job_folder(fleet, "resized") / "checkpoints"
    until(lambda: [*folder.glob("step-*/COMMITTED")] != [], 120)
    pid = pid_of(fleet, "resized", 1)
    assert handle.cancel()
    assert handle.outcome(timeout=60).state is multigpu.OutcomeState.CANCELLED
    until(lambda: gone(pid), 30)
    handle = client.train("steps.py", args, name="resized", world_size=3)
    outcome = handle.outcome()
    assert outcome.succeeded, outcome
    attempts = [event for event in events(outcome) if "job" in event]
    assert [attempt["world_size"] for attempt in attempts] == [2, 3], "the history of the job is whole"
    assert weights(fleet, "resized") == pytest.approx(weights(fleet, "whole"), abs=1e-5)


def test_an_elastic_job_shrinks_and_grows(fleet: Fleet, client: multigpu.Client) -> None:
    """A worker is killed, and comes back: the job goes on with the other two, and grows at the next checkpoint."""
    args = ["--steps", "100", "--shard"]
    client.train("steps.py", args, name="fixed", world_size=3).result()
    slower = [*args, "--sleep", "0.5"]
    handle = client.train("steps.py", slower, name="elastic", world_size=3, world_size_min=1)
    folder = job_folder(fleet, "elastic") / "checkpoints"
    until(lambda: [*folder.glob("step-*/COMMITTED")] != [], 120)
    name = worker_of(fleet, pid_of(fleet, "elastic", 1))
    fleet.workers[name].kill()
    file = job_folder(fleet, "elastic") / "events.jsonl"

    def sizes() -> list[int]:
        return [event["world_size"] for event in map(json.loads, file.read_text().splitlines()) if "job" in event]

    until(lambda: sizes() == [3, 2], 60)
    fleet.start_worker(name)
    outcome = handle.outcome()
    assert outcome.succeeded, outcome
    assert [event["world_size"] for event in events(outcome) if "job" in event] == [3, 2, 3]
    assert outcome.attempts == 1, "neither is charged"
    assert weights(fleet, "elastic") == pytest.approx(weights(fleet, "fixed"), abs=1e-5)


def test_the_log_of_each_rank_can_be_read(fleet: Fleet, client: multigpu.Client) -> None:
    handle = client.train("steps.py", ["--steps", "1000", "--sleep", "0.1"], name="logs", world_size=2)
    for rank in (0, 1):
        wanted = f"rank {rank} of 2 begins at step 0"
        until(lambda: client.get("logs", rank=rank).log.strip() == wanted, 120)  # noqa: B023  called at once
    handle.cancel()
    files = [*job_folder(fleet, "logs").rglob("rank-1/**/stdout.log")]
    assert [file.read_text().strip() for file in files] == ["rank 1 of 2 begins at step 0"]


def failure(client: multigpu.Client, how: str, **options: Any) -> multigpu.Outcome:
    return client.train("mistakes.py", [how], world_size=2, **options).outcome()


@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", "ValueError: there is no such column: text"), ("in a collective", "ValueError: rank 1 has had enough")],
)
def test_an_error_of_a_script_is_final_and_says_what_it_was(client: multigpu.Client, how: str, says: str) -> None:
    outcome = failure(client, how)
    assert outcome.state is multigpu.OutcomeState.FAILED
    assert outcome.error_type == "ScriptFailed"
    assert f"rank 1 ended with exit code 1: {says}" in outcome.error_message
    assert "Traceback" in outcome.message.error.traceback


@pytest.mark.parametrize(
    ("how", "retries", "succeeds"), [("once", 0, False), ("once", 1, True), ("killed once", 0, True)]
)
def test_a_script_that_fails_runs_again_if_asked_and_one_that_is_killed_always(
    client: multigpu.Client, how: str, retries: int, succeeds: bool
) -> None:
    outcome = failure(client, how, retries=retries, backoff_initial_s=0.01)
    assert outcome.succeeded == succeeds, outcome


def test_a_checkpoint_that_ranks_wrote_alone_does_not_count(fleet: Fleet, client: multigpu.Client) -> None:
    """The script destroys its process group while a checkpoint is under way: each rank may write as if it was alone."""
    for _ in range(3):
        client.train("mistakes.py", ["forgets finish"], name="forgets", world_size=2).outcome()
        marks = [*(job_folder(fleet, "forgets") / "checkpoints").glob("step-*/COMMITTED")]
        assert marks != []
        for mark in marks:
            assert len([*mark.parent.glob("*.distcp")]) == 2, "each rank has written its part"


def test_an_error_whose_process_aborts_is_an_error(client: multigpu.Client) -> None:
    outcome = failure(client, "aborts after an error")
    assert (outcome.error_type, outcome.attempts) == ("ScriptFailed", 1)
    assert "raised an error: OSError: no space" in outcome.error_message


def test_a_url_that_cannot_be_used_fails_on_all_ranks(client: multigpu.Client) -> None:
    """And leaves none of them waiting for rank 0."""
    handle = client.train("steps.py", ["--steps", "5"], world_size=2, checkpoints="nosuch://bucket/checkpoints")
    outcome = handle.outcome()
    assert outcome.error_type == "ScriptFailed"
    assert "nosuch" in outcome.error_message


def test_a_job_that_hangs_ends_with_the_place_of_each_rank(client: multigpu.Client) -> None:
    outcome = failure(client, "hangs", hang_timeout_s=HANG_S)
    assert (outcome.state, outcome.error_type) == (multigpu.OutcomeState.FAILED, "Hang"), outcome
    assert re.search(
        rf"no rank has written or reported anything for {HANG_S} s: "
        r"rank 0 waits in all_reduce at mistakes.py line \d+ in work; rank 1 is at mistakes.py line \d+ in work$",
        outcome.error_message,
    ), outcome.error_message


def test_a_job_that_reports_does_not_hang(client: multigpu.Client) -> None:
    args = ["--steps", str(2 * HANG_S), "--sleep", "0.6"]
    outcome = client.train("steps.py", args, world_size=2, hang_timeout_s=HANG_S).outcome()
    assert outcome.succeeded, outcome


def test_rank_0_waits_for_ranks_that_end_later(client: multigpu.Client) -> None:
    """Its engine has the store that theirs use."""
    outcome = failure(client, "one ends later", hang_timeout_s=HANG_S)
    assert (outcome.succeeded, outcome.attempts) == (True, 1), outcome


def test_a_progress_bar_is_seen_while_it_moves(client: multigpu.Client) -> None:
    handle = client.train("mistakes.py", ["shows a bar"], name="bar")
    until(lambda: re.search(r"^[1-9]\d* %$", client.get("bar").log, re.MULTILINE), 120)
    assert not handle.done()
    handle.cancel()


def test_a_script_runs_in_its_own_folder(fleet: Fleet, client: multigpu.Client) -> None:
    outcome = client.train("mistakes.py", ["where"]).outcome()
    assert outcome.log.strip() == str((fleet.folder / "train").resolve())
    assert outcome.value() == {
        "folder": str(job_folder(fleet, outcome.request_id)),
        "name": outcome.request_id,
        "step": None,
        "metrics": {},
        "checkpoint": None,
        "seconds": outcome.value()["seconds"],
    }


def test_a_script_that_ignores_sigterm_is_killed(fleet: Fleet, client: multigpu.Client) -> None:
    handle = client.train("mistakes.py", ["ignores SIGTERM"], name="deaf", world_size=2)
    pids = [pid_of(fleet, "deaf", rank) for rank in (0, 1)]
    handle.cancel()
    until(lambda: all(map(gone, pids)), 30)


@pytest.mark.parametrize("script", ["/etc/passwd", "../outside.py", "missing.py", "link.py"])
def test_only_scripts_of_the_folder_are_run(fleet: Fleet, client: multigpu.Client, script: str) -> None:
    (fleet.folder / "outside.py").write_text("print('outside')")
    link = fleet.folder / "train" / "link.py"
    link.unlink(missing_ok=True)
    link.symlink_to(fleet.folder / "outside.py")
    outcome = client.train(script, world_size=1).outcome()
    assert (outcome.state, outcome.error_type) == (multigpu.OutcomeState.FAILED, "BadInput")
    assert "train_dir" in outcome.error_message or "there is no script" in outcome.error_message


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"name": "x"}', b"\xff", b'{"name":"../x","script":"a"}'])
def test_payloads_that_are_no_jobs_are_rejected(client: multigpu.Client, payload: bytes) -> None:
    outcome = client.run_outcome("train", payload)
    assert (outcome.state, outcome.error_type) == (multigpu.OutcomeState.FAILED, "BadInput")


@pytest.fixture
def mgpuctl(fleet: Fleet) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "multigpu.cli", "train", *args]
        env = {**os.environ, "MGPU_MASTER": fleet.address}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    return run


def test_the_command_line(
    fleet: Fleet, mgpuctl: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = mgpuctl("run", "--world-size", "2", "--name", "cli", "steps.py", "--", "--steps", "12")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 begins at step 0\n" in done.stdout
    assert "job cli succeeded" in done.stderr
    assert "cli" in mgpuctl("list").stdout
    shown = mgpuctl("show", "cli").stdout
    assert "steps.py --steps 12" in shown
    assert "step 10 in " in shown
    table = mgpuctl("metrics", "cli").stdout.splitlines()
    assert table[0].split() == ["TIME", "STEP", "LOSS"]
    assert len(table) == 13
    assert [report["step"] for report in json.loads(mgpuctl("metrics", "cli", "--json").stdout)] == [*range(1, 13)]
    picture = tmp_path / "loss.png"
    assert mgpuctl("metrics", "cli", "--plot", str(picture)).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "begins at step 0" in mgpuctl("logs", "cli").stdout
    again = mgpuctl("resume", "cli")
    assert again.returncode == 1
    assert "has succeeded" in again.stderr
    other = mgpuctl("run", "--name", "cli", "steps.py", "--", "--steps", "13")
    assert other.returncode == 1
    assert "another script, arguments or options" in other.stderr
    failed = mgpuctl("run", "--name", "cli-failed", "mistakes.py", "once")
    assert failed.returncode == 5
    assert "resume" not in failed.stderr, "there is no checkpoint"
    assert mgpuctl("resume", "cli-failed").returncode == 0
    assert [line.split()[0] for line in mgpuctl("list").stdout.splitlines()].count("cli-failed") == 1
    detached = mgpuctl("run", "--name", "cli-long", "--detach", "steps.py", "--", "--steps", "5000", "--sleep", "0.1")
    assert detached.stdout == "cli-long\n"
    pid = pid_of(fleet, "cli-long", 0)
    assert mgpuctl("stop", "cli-long").stdout == "stopped cli-long\n"
    until(lambda: gone(pid), 30)
    assert mgpuctl("show", "nothing").returncode == 4

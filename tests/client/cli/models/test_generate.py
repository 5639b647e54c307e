"""mgpuctl generate in a pipe: an engine that never ends, and a reader that closes the pipe."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner
from multigpu.cli import cli

from tests.client.cli.fleet_up import MGPUCTL, mgpuctl, ok, running
from tests.waiting import until

ENGINE = '''
import time
from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.base import ModelEngine

class Counter(ModelEngine):
    """Counts in words of two characters, up to max_tokens, or for ever."""

    one_by_one = True

    def load(self):
        return {}

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            reporter.begin(item)
            count, text = pb.GeneratePayload.FromString(item.payload).max_tokens, ""
            for n in range(count or 10**9):
                if reporter.cancelled(item):
                    break
                text += f"{n % 10} "
                reporter.partial(item, pb.GenerateChunk(text=f"{n % 10} ", token_ids=[n]).SerializeToString())
                time.sleep(0.001)
            else:
                result = pb.GenerateResult(text=text, token_ids=range(count), finish_reason=pb.FINISH_REASON_LENGTH)
                reporter.succeed(item, result.SerializeToString())
'''
Stop = Callable[["subprocess.Popen[bytes]", IO[bytes]], None]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "counter").mkdir()
    (folder / "counter" / "counter_engine.py").write_text(ENGINE)
    lines = ('kind = "generate"', 'engine = "counter_engine:Counter"', 'source = "python"')
    (folder / "counter" / "model.toml").write_text("\n".join(lines))
    with running(folder, "--workers", "1", "--model", f"counter={folder / 'counter'}") as up:
        yield up.address


def counts(address: str) -> dict[str, int]:
    done = CliRunner().invoke(cli, ["tasks", "count", "--master", address, "--kind", "generate", "--json"])
    found: dict[str, int] = json.loads(done.stdout)
    return found


def nothing_runs(address: str) -> bool:
    found = counts(address)
    return found["queued"] + found["leased"] == 0


def close(process: "subprocess.Popen[bytes]", out: IO[bytes]) -> None:
    """As `head -c 5` does."""
    out.close()


def interrupt(process: "subprocess.Popen[bytes]", out: IO[bytes]) -> None:
    process.send_signal(signal.SIGINT)


def terminate(process: "subprocess.Popen[bytes]", out: IO[bytes]) -> None:
    process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("stop", "status", "flags"),
    [(close, 141, ()), (close, 141, ("--json-lines",)), (interrupt, 130, ()), (terminate, 143, ("--json-lines",))],
)
def test_a_reader_that_closes_the_pipe_cancels_the_task(
    address: str, stop: Stop, status: int, flags: tuple[str, ...]
) -> None:
    before = counts(address)["cancelled"]
    argv = [*MGPUCTL, "generate", "Count", "--model", "counter", *flags]
    env = {**os.environ, "MGPU_MASTER": address}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # The answer has begun, and is read as it comes.
        assert len(process.stdout.read(5)) == 5
        stop(process, process.stdout)
        # An unread answer must not block its exit.
        until(lambda: process.poll() is not None, 60)
        stderr = process.stderr.read().decode()
    assert process.returncode == status
    assert stderr.strip() == ""
    until(lambda: nothing_runs(address))
    assert counts(address)["cancelled"] == before + 1


# A signal may come at any time: here it comes before the client has passed on the call that it just made.
INTERRUPTED = """
from multigpu.cli import main
from multigpu._calls.blocking import BlockingCore as Core

passed = Core._wait
def _wait(self, coroutine):
    if coroutine.__name__ != "_next":
        return passed(self, coroutine)
    raise KeyboardInterrupt
Core._wait = _wait
main()
"""


def test_a_call_that_never_began_is_not_reported(address: str) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, "generate", "Count", "--model", "counter", "--master", address]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize("flags", [(), ("--json", "--max-tokens", "3")])
def test_a_full_disk_is_reported_and_nothing_goes_on(address: str, flags: tuple[str, ...]) -> None:
    argv = [*MGPUCTL, "generate", "Count", "--model", "counter", *flags]
    env = {**os.environ, "MGPU_MASTER": address}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=400, env=env)
    assert (done.returncode, done.stderr) == (1, "mgpuctl: can't write: No space left on device\n")
    until(lambda: nothing_runs(address))


def test_json_lines_are_the_pieces_and_then_the_whole(address: str) -> None:
    flags = ("--model", "counter", "--max-tokens", "12")
    *pieces, whole = map(json.loads, ok(address, "generate", "Count", *flags, "--json-lines").splitlines())
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == "0 1 2 3 4 5 6 7 8 9 0 1 "
    assert (whole["finish_reason"], whole["tokens"]) == ("length", 12)
    same = json.loads(ok(address, "generate", "Count", *flags, "--json"))
    assert same | {"seconds": 0} == whole | {"seconds": 0}
    assert ok(address, "generate", "-", *flags, input="Count") == whole["text"]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["", "--model", "counter"], 1, "the prompt is empty"),
        (["x", "--temperature", "nan"], 2, "'nan' is not a number"),
        (["x", "--max-tokens", "99999999999"], 2, "1<=x<=4294967295"),
        # At once, and not after a minute: workers are there, and have other models.
        (["x", "--model", "countr"], 1, "with the model 'countr', did you mean 'counter'?"),
    ],
)
def test_nonsense_is_reported_at_once(address: str, flags: list[str], status: int, words: str) -> None:
    done = CliRunner().invoke(cli, ["generate", "--master", address, *flags])
    assert (done.exit_code, words in done.output) == (status, True), done.output
    assert "waiting" not in done.output


@pytest.mark.slow
def test_a_prompt_that_is_not_utf_8_is_reported(address: str) -> None:
    argv = [*MGPUCTL, "generate", "-", "--master", address]
    done = subprocess.run(argv, input=b"\xff", capture_output=True, check=False, timeout=400)
    assert done.returncode == 1
    assert b"not UTF-8" in done.stderr


@pytest.mark.slow
def test_no_master_is_reported() -> None:
    done = mgpuctl("127.0.0.1:1", "generate", "x", "--wait-for-worker", "0.1")
    assert done.returncode == 3
    assert "start one with `mgpuctl up`" in done.stderr

"""Files that mgpuctl reads and writes (lines, vectors), rejected flags, the fleet that `mgpuctl up` plans, and the
output of submit and watch.
"""

import io
import json
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from multigpu.cli import cli, options
from multigpu.cli.failures import Failure
from multigpu.cli.kinds import vectors
from multigpu.cli.local import up as up_module
from multigpu.cli.local.up import choose_addresses, plan_fleet
from multigpu.cli.tasks import lines

from tests.client.cli.fleet_up import MGPUCTL, mgpuctl
from tests.client.scripted_master import Reply, Spec, Task, ThreadedMaster, echo
from tests.waiting import until


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_lines_keep_blanks_and_order_and_lose_only_their_ends(tmp_path: Path) -> None:
    first = write(tmp_path / "a", b"\xef\xbb\xbfone\r\n\n three \n")
    second = write(tmp_path / "b", "vier\u2028fünf".encode())
    empty = write(tmp_path / "c", b"")
    paths = [first, empty, second]
    assert list(lines.read_lines(paths)) == ["one", "", " three ", "vier\u2028fünf"]
    assert lines.count_lines(paths) == 4


def test_the_count_of_a_pipe_is_unknown(tmp_path: Path) -> None:
    assert lines.count_lines([write(tmp_path / "a", b"x\n"), "-"]) is None
    os.mkfifo(tmp_path / "fifo")
    assert lines.count_lines([str(tmp_path / "fifo")]) is None


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a\nb")))
    assert list(lines.read_lines(["-"])) == ["a", "b"]


def test_broken_utf8_names_file_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"good\nbad \xff\n")
    with pytest.raises(Failure, match=r"a, line 2: not UTF-8 \(byte 0xff at position 4\)"):
        list(lines.read_lines([path]))
    with pytest.raises(Failure, match="can't read /nonexistent: No such file"):
        list(lines.read_lines(["/nonexistent"]))


@pytest.mark.parametrize("chunks", [[], [1], [32, 32, 5], [0, 3]])
def test_npy_is_what_numpy_loads(tmp_path: Path, chunks: list[int]) -> None:
    rng = np.random.default_rng(7)
    parts = [rng.standard_normal((rows, 384), dtype=np.float32) for rows in chunks]
    path = tmp_path / "out.npy"
    with vectors.NpyFile(path) as file:
        for part in parts:
            file.add(part)
        assert not path.exists()
    expected = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
    for mode in (None, "r"):
        loaded = np.load(path, mmap_mode=mode)
        assert loaded.dtype == np.float32
        np.testing.assert_array_equal(loaded, expected)
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]


def test_header_of_the_largest_shape_fits() -> None:
    header = vectors.npy_header(10**15, 65536)
    assert len(header) == vectors.NPY_HEADER_BYTES
    assert np.lib.format.read_magic(io.BytesIO(header)) == (1, 0)


@pytest.mark.parametrize(("name", "cls"), [("out.npy", vectors.NpyFile), ("out.jsonl", vectors.JsonLinesFile)])
def test_a_run_that_ended_early_is_resumed_after_its_last_whole_row(tmp_path: Path, name: str, cls: Any) -> None:
    path = tmp_path / name
    path.write_bytes(b"yesterday's")
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)

    def interrupted() -> None:
        with cls(path) as file:
            file.add(rows[:2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"yesterday's"
    part = tmp_path / f"{name}.part"
    with part.open("ab") as file:
        file.write(b"[torn")  # an incomplete row, as after kill -9
    with cls(path, resume=True) as file:
        assert file.rows == 2
        with pytest.raises(Failure, match="another process writes"):
            cls(path, resume=True).__enter__()
        file.add(rows[2:])
    found = np.load(path) if cls is vectors.NpyFile else [json.loads(line) for line in path.open()]
    np.testing.assert_array_equal(found, rows)
    assert not part.exists()


def test_a_run_that_ended_before_its_first_row_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.npy"
    path.write_bytes(b"yesterday's")

    def interrupted() -> None:
        with vectors.NpyFile(path, resume=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"yesterday's"
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]


def test_workers_that_disagree_on_the_dimension_are_found_out(tmp_path: Path) -> None:
    def mixed() -> None:
        with vectors.NpyFile(tmp_path / "out.npy") as file:
            file.add(np.ones((2, 3), np.float32))
            file.add(np.ones((2, 4), np.float32))

    with pytest.raises(Failure, match="vectors of 4 numbers, others with 3"):
        mixed()


def test_a_full_disk_is_a_clear_failure_that_keeps_what_was_written(tmp_path: Path) -> None:
    def fill() -> None:
        with vectors.NpyFile(tmp_path / "out.npy") as file:
            for _ in range(64):
                file.add(np.ones((50, 1024), np.float32))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(Failure, match=r"can't write .*out.npy: File too large"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy.part"]
    with vectors.NpyFile(tmp_path / "out.npy", resume=True) as file:
        assert 200 < file.rows < 256


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(Failure, match="not a regular file"):
        vectors.NpyFile(fifo).__enter__()
    assert fifo.is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.npy").symlink_to(tmp_path / "real.npy")
    with vectors.NpyFile(tmp_path / "link.npy") as file:
        file.add(np.ones((2, 3), np.float32))
    assert (tmp_path / "link.npy").is_symlink()
    assert np.load(tmp_path / "real.npy").shape == (2, 3)


def test_json_lines_give_the_same_float32_again(tmp_path: Path) -> None:
    rows = np.array([[1 / 3, -1e-30, 16777217.0], [0.0, 3.4e38, 1.0]], np.float32)
    path = tmp_path / "out.jsonl"
    with vectors.JsonLinesFile(path) as file:
        file.add(rows)
    parsed = [json.loads(line) for line in path.read_text().splitlines()]
    np.testing.assert_array_equal(np.array(parsed, np.float32), rows)
    with pytest.raises(Failure, match="NaN"):
        vectors.json_lines(np.array([[np.nan]], np.float32))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["embed", "x.txt"], "-o vectors.npy"),
        (["embed", "x.txt", "--format", "jsonl", "--json"], "can't both go to stdout"),
        (["embed", "x.txt", "-o", "a.npy", "--batch-size", "0"], "--batch-size"),
        (["submit", "--payload", "x"], "--kind"),
        (["submit", "--kind", "echo", "--payload", "x", "--file", "y"], "one of --payload"),
        (["submit", "--kind", "echo", "--payload", "x", "--priority", "9"], "--priority"),
        (["submit", "--kind", "echo", "--payload", "x", "--label", "nonsense"], "KEY=VALUE"),
        (["submit", "--kind", "echo", "--lines", "x", "--retry-failed"], "give one"),
        (
            ["submit", "--kind", "echo", "--payload", "x", "--retry-failed"],
            "--retry-failed runs the task of a --request-id",
        ),
        (
            ["tasks", "get", "order-4711"],
            "not a valid task id; a client's own id goes with --request-id",
        ),
        (["tasks", "cancel", "0"], "--request-id"),
        (["watch", "--cursor", "x", "--from-now"], "either --cursor or --from-now"),
    ],
)
def test_wrong_flags_are_rejected_before_anything_is_asked(args: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_missing_input_is_rejected_before_anything_is_asked(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["embed", "/nonexistent", "-o", str(tmp_path / "a.npy")])
    assert result.exit_code == 1
    assert "can't read /nonexistent" in result.stderr


# The fleet that `up` plans.


@pytest.fixture
def context() -> Iterator[click.Context]:
    with click.Context(up_module.up, obj=options.Globals()) as context:
        yield context


def flags(**given: Any) -> dict[str, Any]:
    names = [parameter.name for parameter in up_module.up.params]
    empty: dict[str, Any] = {name: () if name in ("handlers", "models", "labels") else None for name in names if name}
    return empty | {"stop_timeout": 15.0, "listen": "127.0.0.1:0", "device": "cpu"} | given


def value_of(words: tuple[str, ...], flag: str) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == flag]


@pytest.mark.usefixtures("context")
def test_fleet_on_the_cpu_shares_the_cores(tmp_path: Path) -> None:
    fleet = plan_fleet(
        flags(
            data_dir=str(tmp_path),
            handlers=("a", "b"),
            models=("m=/x",),
            model_repository="/r",
            slots="3",
            allow_pickle=True,
        )
    )
    host = socket.gethostname()
    assert list(fleet.workers) == [f"{host}-cpu-0", f"{host}-cpu-1"]
    for worker_id, words in fleet.workers.items():
        assert value_of(words, "--worker-id") == [worker_id]
        assert value_of(words, "--master") == [fleet.address]
        assert value_of(words, "--device") == ["cpu"]
        assert value_of(words, "--handlers") == ["a", "b"]
        assert value_of(words, "--models") == ["m=/x"]
        assert value_of(words, "--model-repository") == ["/r"]
        assert value_of(words, "--slots") == ["3"]
        assert "--allow-pickle" in words
        assert value_of(words, "--device-workers") == ["2"]
        assert value_of(words, "--threads") == [str(max(1, len(os.sched_getaffinity(0)) // 2))]
        # The worker's drain timeout ends before the supervisor kills it.
        assert float(value_of(words, "--drain-timeout-s")[0]) < 15.0 * up_module.WORKERS_STOP_SHARE
    assert value_of(fleet.master_flags, "--listen") == [fleet.address]
    assert value_of(fleet.master_flags, "--data-dir") == [str(tmp_path)]


@pytest.mark.usefixtures("context")
def test_one_worker_for_each_gpu_and_twins_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-aaa\necho GPU-bbb\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host = socket.gethostname()
    fleet = plan_fleet(flags(device="auto"))
    devices = {name: value_of(words, "--device")[0] for name, words in fleet.workers.items()}
    assert devices == {f"{host}-GPU-aaa": "cuda:0", f"{host}-GPU-bbb": "cuda:1"}
    fleet = plan_fleet(flags(device="auto", workers=3))
    assert list(fleet.workers)[2] == f"{host}-GPU-aaa-1"
    sharing = [value_of(words, "--device-workers") for words in fleet.workers.values()]
    assert sharing == [["2"], ["1"], ["2"]], "the first GPU has two workers, which share its memory"
    fleet = plan_fleet(flags(device="cuda:1"))
    assert list(fleet.workers) == [f"{host}-GPU-bbb"]
    fleet = plan_fleet(flags(device="cuda:1,GPU-aaa"))
    assert {name: value_of(words, "--device") for name, words in fleet.workers.items()} == {
        f"{host}-GPU-bbb+1": ["cuda:1,GPU-aaa"]
    }
    with pytest.raises(Failure, match="no cuda:7 here"):
        plan_fleet(flags(device="cuda:1,cuda:7"))
    with pytest.raises(Failure, match="is one worker with several GPUs: leave out --workers 2"):
        plan_fleet(flags(device="cuda:0,cuda:1", workers=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert list(plan_fleet(flags(device="auto")).workers) == [f"{host}-GPU-bbb"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    assert list(plan_fleet(flags(device="auto")).workers) == [f"{host}-GPU-aaa"]
    assert list(plan_fleet(flags(device="GPU-aaa")).workers) == [f"{host}-GPU-aaa"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c,MIG-d")
    instances = plan_fleet(flags(device="auto")).workers
    assert [value_of(words, "--device")[0] for words in instances.values()] == ["MIG-c", "MIG-d"]
    assert list(plan_fleet(flags(device="MIG-d")).workers) == [f"{host}-MIG-d"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(plan_fleet(flags(device="auto")).workers) == [f"{host}-cpu-0", f"{host}-cpu-1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(Failure, match="no cuda:5 here"):
        plan_fleet(flags(device="cuda:5"))


@pytest.mark.usefixtures("context")
def test_a_driver_that_fails_does_not_count_as_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    tool.chmod(0o755)
    with pytest.raises(Failure, match="version mismatch; repair the driver"):
        plan_fleet(flags(device="auto"))
    tool.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert len(plan_fleet(flags(device="auto")).workers) == 2


@pytest.fixture
def probes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_addresses(probes: ExitStack) -> None:
    listen, address = choose_addresses("0.0.0.0:0", probes)
    port = int(listen.rpartition(":")[2])
    assert port > 0
    assert (listen, address) == (f"0.0.0.0:{port}", f"127.0.0.1:{port}")
    assert choose_addresses("unix:/tmp/x", probes) == ("unix:/tmp/x", "unix:/tmp/x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Failure, match="another master may run there"):
            choose_addresses(f"127.0.0.1:{taken.getsockname()[1]}", probes)


def test_daemons_of_a_fleet_never_get_the_same_free_port(probes: ExitStack) -> None:
    """The gateway once got the master's port: the master's probe was closed before the gateway's port was chosen."""
    _, master = choose_addresses("127.0.0.1:0", probes)
    with pytest.raises(Failure, match="another master may run there"):
        choose_addresses(master, probes)


def test_a_result_with_a_line_break_is_no_line_of_submit(tmp_path: Path) -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        outcome = echo(spec, task)
        outcome.result = task.payload.replace(b"LF", b"\n").replace(b"CR", b"\r")
        return outcome

    file = write(tmp_path / "lines", b"one\ntwo LF twoCRLF\nCR\nLF\nfive\n")
    with ThreadedMaster(answer) as master:
        done = mgpuctl(master.address, "submit", "--kind", "echo", "--lines", file, "--wait")
        assert (done.returncode, done.stdout) == (5, "one\n\n\n\nfive\n")
        for number in (2, 3, 4):
            assert f"line {number}: the result holds a line break" in done.stderr
        assert "3 of 5 tasks have a result with a line break" in done.stderr
        assert "did not succeed" not in done.stderr
        done = mgpuctl(master.address, "submit", "--kind", "echo", "--lines", file, "--wait", "--json")
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) == 5


def test_watch_from_now_prints_a_cursor_even_if_no_task_ends() -> None:
    with ThreadedMaster() as master:
        argv = [*MGPUCTL, "watch", "--from-now", "--master", master.address]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            until(lambda: master.watchers == 1 and master.watches == 2)
            process.send_signal(signal.SIGINT)
            printed, stderr = process.communicate(timeout=400)
    assert (process.returncode, printed, stderr.strip()) == (130, "", "cursor: 0")

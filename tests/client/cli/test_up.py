"""mgpuctl with a real fleet: `up` with a real master and real workers, and work through it while they are killed."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.cli.fleet_up import MGPUCTL, Up, children_of, mgpuctl, ok, running
from tests.fakes.amd import SimulatedAmdGpus
from tests.waiting import until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, str]]:
    with running(tmp_path_factory.mktemp("fleet"), "--workers", "2") as up:
        yield up, up.address


def active(address: str) -> list[str]:
    done = mgpuctl(address, "workers", "--json")
    if done.returncode:
        return []
    return [each["worker_id"] for each in json.loads(done.stdout) if each["state"] == "ACTIVE"]


def test_up_says_where_its_data_is(fleet: tuple[Up, str]) -> None:
    up, _ = fleet
    assert f"the journal of this fleet is in {up.folder / 'data'}" in up.log.read_text()


def test_one_task(fleet: tuple[Up, str]) -> None:
    _, address = fleet
    assert ok(address, "submit", "--kind", "echo", "--payload", "héllo", "--wait") == "héllo"
    assert ok(address, "submit", "--kind", "echo", "--wait", input="from a pipe") == "from a pipe"
    outcome = json.loads(ok(address, "submit", "--kind", "echo", "--payload", "hi", "--wait", "--json"))
    assert (outcome["state"], outcome["result"]) == ("SUCCEEDED", "hi")
    parsed = json.loads(
        ok(address, "submit", "--kind", "echo", "--parse-json", "--payload", '{"n": [1]}', "--wait", "--json")
    )
    assert parsed["result"] == {"n": [1]}


def test_many_tasks_from_lines(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    texts = [f"line {number}" for number in range(2500)]
    file = tmp_path / "lines"
    file.write_text("\n".join(texts))
    assert ok(address, "submit", "--kind", "echo", "--lines", str(file), "--wait").splitlines() == texts
    ids = [int(line) for line in ok(address, "submit", "--kind", "echo", "--lines", str(file)).splitlines()]
    assert len(set(ids)) == 2500
    task = json.loads(ok(address, "tasks", "get", str(ids[17]), "--wait", "10", "--json"))
    assert task["outcome"]["result"] == "line 17"
    listed = json.loads(ok(address, "tasks", "list", "--kind", "echo", "--limit", "1200", "--json"))
    assert len(listed) == 1200


def test_results_of_lines_stay_with_their_lines_when_a_task_fails(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    file = tmp_path / "lines"
    file.write_text("0.001\nx\n0.003\n")
    done = mgpuctl(address, "submit", "--kind", "sleep", "--lines", str(file), "--wait")
    assert done.returncode == 5
    assert done.stdout == "0.001\n\n0.003\n"
    assert "line 2: task" in done.stderr


def test_a_line_that_is_no_json_is_named_by_file_and_line(fleet: tuple[Up, str], tmp_path: Path) -> None:
    _, address = fleet
    file = tmp_path / "lines"
    for line, reason in (("", "Expecting value at column 1: ''"), ("[NaN]", "JSON has no NaN: '[NaN]'")):
        file.write_text(f'{{"n": 1}}\n2\n{line}\n')
        done = mgpuctl(address, "submit", "--kind", "echo", "--parse-json", "--lines", str(file), "--wait")
        assert done.returncode == 1
        assert f"{file}, line 3: not JSON: {reason}" in done.stderr


def test_failures_have_their_exit_codes(fleet: tuple[Up, str]) -> None:
    _, address = fleet
    failed = mgpuctl(address, "submit", "--kind", "fail", "--payload", "", "--parameter", "retryable=0", "--wait")
    assert failed.returncode == 5, failed.stderr
    assert "did not succeed" in failed.stderr
    assert mgpuctl(address, "tasks", "get", "999999999").returncode == 4
    rejected = mgpuctl(address, "submit", "--kind", "no.such.kind", "--payload", "x")
    assert rejected.returncode == 1
    assert "no.such.kind" in rejected.stderr
    assert mgpuctl(address, "cordon", "nobody").returncode == 4
    unknown = mgpuctl(address, "strategy", "set", "luck")
    assert unknown.returncode == 1
    assert "round_robin" in unknown.stderr


def test_dead_letters_come_back(fleet: tuple[Up, str]) -> None:
    _, address = fleet
    args = ("--kind", "fail", "--payload", "x", "--queue", "sick", "--attempts-max", "1", "--wait", "--json")
    done = mgpuctl(address, "submit", *args)
    assert done.returncode == 5
    outcome = json.loads(done.stdout)
    assert outcome["state"] == "DEAD_LETTERED"
    assert str(outcome["task_id"]) in ok(address, "dead-letters", "list", "--queue", "sick")
    fresh = ok(address, "dead-letters", "requeue", str(outcome["task_id"])).strip()
    task = json.loads(ok(address, "tasks", "get", fresh, "--wait", "20", "--json"))
    assert task["outcome"]["state"] == "DEAD_LETTERED"
    assert ok(address, "dead-letters", "delete", "--queue", "sick", "--yes") == "deleted 1\n"


@pytest.mark.slow
def test_watch_goes_on_where_it_ended(fleet: tuple[Up, str]) -> None:
    _, address = fleet
    ids = [int(ok(address, "submit", "--kind", "echo", "--payload", str(n), "--queue", "w")) for n in range(6)]
    seen = []
    cursor: tuple[str, ...] = ()
    for _ in range(3):
        done = mgpuctl(address, "watch", "--queue", "w", "--limit", "2", "--json", *cursor)
        assert done.returncode == 0, done.stderr
        seen += [json.loads(line)["task_id"] for line in done.stdout.splitlines()]
        cursor = ("--cursor", done.stderr.strip().removeprefix("cursor: "))
    assert sorted(seen) == ids


def test_ctrl_c_cancels_what_a_submit_waits_for(fleet: tuple[Up, str]) -> None:
    _, address = fleet
    env = {**os.environ, "MGPU_MASTER": address}
    argv = [*MGPUCTL, "submit", "--kind", "sleep", "--payload", "600", "--queue", "nap", "--wait"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        counted = ("tasks", "count", "--queue", "nap", "--json")
        until(lambda: json.loads(ok(address, *counted))["leased"] == 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    until(lambda: json.loads(ok(address, *counted))["cancelled"] == 1)


def test_a_killed_worker_is_back_quickly(fleet: tuple[Up, str]) -> None:
    up, address = fleet
    workers = until(lambda: found if len(found := active(address)) == 2 else None)
    before = up.children()
    sessions = {each["worker_id"]: each["session_id"] for each in json.loads(ok(address, "workers", "--json"))}
    os.kill(before[workers[0]], signal.SIGKILL)
    after = until(lambda: (pid := up.children().get(workers[0])) and pid != before[workers[0]] and pid)

    def connected_anew() -> Any:
        (each,) = (w for w in json.loads(ok(address, "workers", "--json")) if w["worker_id"] == workers[0])
        anew = each["session_id"] != sessions[workers[0]] and each["pid"] == after
        return anew and each["state"] == "ACTIVE"

    until(connected_anew)
    assert up.children()["multigpu_master.main"] == before["multigpu_master.main"]


def test_submit_survives_the_death_of_the_master(fleet: tuple[Up, str], tmp_path: Path) -> None:
    up, address = fleet
    file = tmp_path / "lines"
    file.write_text("".join(f"{number}\n" for number in range(3000)))
    env = {**os.environ, "MGPU_MASTER": address}
    out = tmp_path / "out"
    argv = [*MGPUCTL, "submit", "--kind", "sleep", "--parameter", "seconds=0.0005", "--queue", "hard"]
    argv += ["--lines", str(file), "--wait"]
    with out.open("w") as stdout, subprocess.Popen(argv, env=env, stdout=stdout) as process:
        until(lambda: json.loads(ok(address, "tasks", "count", "--queue", "hard", "--json"))["succeeded"] > 100)
        os.kill(up.children()["multigpu_master.main"], signal.SIGKILL)
        assert process.wait(60) == 0
    assert out.read_text() == file.read_text()


def test_up_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    up = Up(tmp_path, "--workers", "1")
    try:
        up.ready()
        family = [*up.children().values()]
        engines = [engine for pid in family for engine in children_of(pid)]
        assert len(family) == 2
        assert engines
        up.process.kill()
        up.process.wait(120)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family + engines))
    finally:
        up.process.kill()


def test_an_import_error_is_reported_by_the_lines_of_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import multigpu\nimport no_such_module\n")
    up = Up(tmp_path, "--workers", "1", "--handlers", "mine")
    assert up.process.wait(60) == 1
    *_, last = log = up.log.read_text().splitlines()
    assert "-cpu-0 can't run: the modules of --handlers (mine) can't be loaded: ModuleNotFoundError: No module" in last
    lines = [line for line in log if "-cpu-0 | " in line]
    assert "import no_such_module" in "\n".join(lines)
    assert len(lines) < 8
    assert not any("importlib" in line or "multigpu_worker" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "args", "workers", "strategy"),
    [
        ({"WORKER_COUNT": "1", "LOAD_BALANCING_STRATEGY": "round_robin"}, (), 1, "round_robin"),
        # What is set by a name of multigpu's own, or a flag, wins.
        (
            {"WORKER_COUNT": "1", "LOAD_BALANCING_STRATEGY": "round_robin"},
            ("--workers", "0", "--strategy", "auto"),
            0,
            "auto",
        ),
        (
            {"MGPU_MASTER_STRATEGY": "task_type", "LOAD_BALANCING_STRATEGY": "round_robin"},
            ("--workers", "0"),
            0,
            "task_type",
        ),
    ],
)
def test_up_obeys_the_variables_of_earlier_deployments(
    tmp_path: Path, env: dict[str, str], args: tuple[str, ...], workers: int, strategy: str
) -> None:
    with running(tmp_path, *args, env=env) as up:
        assert len(up.children()) == 1 + workers
        assert json.loads(ok(up.address, "strategy", "get", "--json"))["strategy"] == strategy


@pytest.mark.slow
def test_up_runs_a_worker_on_each_visible_amd_gpu(tmp_path: Path) -> None:
    amd = SimulatedAmdGpus(tmp_path / "amd", 4)
    env = {**amd.env(), "ROCR_VISIBLE_DEVICES": f"0,{amd.uuid(1)}"}  # HIP counts from the last one
    with running(tmp_path, "--device", "auto", env=env) as up:
        workers = json.loads(ok(up.address, "workers", "--json"))
    assert {each["device"]["name"]: each["device"]["device_id"] for each in workers} == {
        "rocm:1": amd.uuid(1), "rocm:3": amd.uuid(3),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "value"), [("WORKER_COUNT", "two"), ("LOAD_BALANCING_STRATEGY", "luck")])
def test_up_names_a_variable_that_it_can_not_obey(tmp_path: Path, variable: str, value: str) -> None:
    up = Up(tmp_path, env={variable: value})
    assert up.process.wait(60) == 2
    assert variable in up.log.read_text()
    assert value in up.log.read_text()


@pytest.mark.slow
def test_up_ends_when_the_master_rejects_its_data(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "data").symlink_to(tmp_path / "data")
    with running(tmp_path, "--workers", "0") as up:
        second = Up(other, "--workers", "0")
        try:
            assert second.process.wait(60) == 1
            # The master's error names the process that holds the data.
            assert str(up.children()["multigpu_master.main"]) in second.log.read_text()
        finally:
            second.process.kill()

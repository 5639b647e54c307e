"""mgpuctl as a program: help, addresses, exit codes, imports of cheap commands, pipes, units, progress."""

import base64
import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from multigpu import Outcome
from multigpu.cli import COMMANDS, cli, messages, progress, show
from multigpu.cli.commands import Command, Group
from multigpu.v1 import task_pb2

from tests.client.cli.fleet_up import MGPUCTL


def mgpuctl(*args: str, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*MGPUCTL, *args], capture_output=True, text=True, timeout=30, check=False, **kwargs)


def all_commands() -> list[tuple[str, click.Command]]:
    """Every command that is not a group, with its full name."""
    found: list[tuple[str, click.Command]] = []
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found += [(f"{name} {sub}", each) for sub, each in command.commands.items()]
        else:
            found.append((name, command))
    return found


@pytest.mark.parametrize(("name", "command"), all_commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_has_examples(name: str, command: click.Command) -> None:
    assert isinstance(command, Command)
    assert command.examples, f"{name} shows no example"
    assert command.help
    result = CliRunner().invoke(cli, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    undescribed = [p.name for p in command.params if isinstance(p, click.Option) and not (p.help or p.show_default)]
    assert undescribed == []


def test_summaries_in_the_list_are_those_of_the_commands() -> None:
    context = click.Context(cli)
    for name, (_, summary) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help
        assert isinstance(command, Command | Group)
        first = command.help.split("\n\n")[0].replace("\n", " ")
        assert first.startswith(summary), name


def test_help_and_version_import_nothing_heavy() -> None:
    code = """if True:
        import sys
        from multigpu.cli import cli
        for args in (["--help"], ["--version"]):
            cli.main(args, standalone_mode=False)
        print(sorted({"grpc", "numpy", "rich", "asyncio", "torch", "google.protobuf"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_up_never_loads_grpc_because_it_forks() -> None:
    code = "import sys, multigpu.cli.local.up; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "False\n"


def test_no_master_is_exit_code_3_and_says_what_to_do() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for args in (["status"], ["workers"], ["tasks", "get", "1"], ["queues", "list"]):
        result = CliRunner().invoke(cli, ["--master", address, *args])
        assert result.exit_code == 3, result.output
        assert result.stderr == f"mgpuctl: no master at {address}: connection refused; start one with `mgpuctl up`\n"


def test_the_nearer_address_wins(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[client]\nmaster = "127.0.0.1:1"\n')
    steps = [
        ([], {}, "127.0.0.1:1"),
        ([], {"MGPU_MASTER": "127.0.0.1:2"}, "127.0.0.1:2"),
        (["--master", "127.0.0.1:3"], {"MGPU_MASTER": "127.0.0.1:2"}, "127.0.0.1:3"),
    ]
    for before, env, address in steps:
        result = CliRunner().invoke(cli, ["--config", str(file), *before, "status"], env=env)
        assert f"no master at {address}:" in result.stderr
    result = CliRunner().invoke(cli, ["--master", "127.0.0.1:3", "status", "--master", "127.0.0.1:4"])
    assert "no master at 127.0.0.1:4:" in result.stderr


@pytest.mark.parametrize(
    "args",
    [["--master", "nonsense", "status"], ["--config", "/nonexistent", "status"], ["stauts"], ["tasks", "get", "x"]],
)
def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert result.stderr


def test_config_show_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[worker]\nslots = 4\n")
    env = {"MGPU_MASTER_LISTEN": "127.0.0.1:9", "MGPU_CONFIG": str(file)}
    settings = json.loads(CliRunner().invoke(cli, ["config", "show", "--json"], env=env).output)["settings"]
    assert settings["worker"]["slots"] == {"value": 4, "source": str(file)}
    assert settings["master"]["listen"] == {"value": "127.0.0.1:9", "source": "MGPU_MASTER_LISTEN"}
    assert settings["client"]["max_in_flight"]["source"] == "default"
    printed = CliRunner().invoke(cli, ["config", "show", "worker"], env=env).output
    assert "[worker]" in printed
    assert "[master]" not in printed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_and_what_they_call(shell: str) -> None:
    script = mgpuctl(env={**os.environ, "_MGPUCTL_COMPLETE": f"{shell}_source"})
    assert script.returncode == 0
    assert "_MGPUCTL_COMPLETE" in script.stdout
    env = {**os.environ, "_MGPUCTL_COMPLETE": f"{shell}_complete", "COMP_WORDS": "mgpuctl dea", "COMP_CWORD": "1"}
    if shell == "fish":
        env["COMP_CWORD"] = "dea"
    assert "dead-letters" in mgpuctl(env=env).stdout


def test_a_reader_that_closes_the_pipe_ends_it_without_a_message() -> None:
    command = f"{' '.join(MGPUCTL)} config show | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    head, status = done.stdout.splitlines()
    assert head.startswith("# file")
    assert status in ("0", "141")
    assert done.stderr == ""


def test_partials_that_are_no_text_are_all_base64() -> None:
    data = messages.as_dict(Outcome(task_pb2.Outcome(partials=[b"text", b"\xff"])))
    assert data["partials_base64"] == ["dGV4dA==", "/w=="]
    assert messages.as_dict(Outcome(task_pb2.Outcome(partials=[b"text"])))["partials"] == ["text"]


def test_a_result_that_utf_8_or_json_cannot_hold_is_printed_all_the_same() -> None:
    kinds = {
        b'["\\ud800","\\u00e9"]': ("result", ["\ud800", "\u00e9"]),
        b"[" * 100_000: ("result_base64", base64.b64encode(b"[" * 100_000).decode()),
    }
    for result, (name, shown) in kinds.items():
        outcome = Outcome(task_pb2.Outcome(result=result, content_type="application/json"))
        printed = show.as_json(messages.as_dict(outcome))
        assert json.loads(printed.encode())[name] == shown


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["submit", "--kind", "echo", "--deadline", "nan"], "is not a number"),
        (["submit", "--kind", "echo", "--deadline", "inf"], "is not a number"),
        (["submit", "--kind", "echo", "--run-timeout", "1e300"], "is not a number"),
        (["drain", "w", "--timeout", "nan"], "is not a number"),
        (["dead-letters", "delete", "--queue", "night"], "--yes deletes"),
        (["embed", "-", "-", "--format", "jsonl"], "name it once"),
        (["up", "--ready-file", "/nope/x"], "--ready-file /nope/x can't be written"),
        (["up", "--ready-file", "/"], "--ready-file / can't be written"),
    ],
)
def test_a_value_that_cannot_be_used_is_wrong_usage_and_no_traceback(args: list[str], says: str) -> None:
    done = mgpuctl(*args, input="")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [["status"], ["submit", "--kind", "echo"], ["submit", "--kind", "echo", "--wait"]])
def test_a_token_file_that_is_missing_is_exit_code_2(args: list[str]) -> None:
    done = mgpuctl(*args, input="x", env={**os.environ, "MGPU_TOKEN_FILE": "/nope", "MGPU_MASTER": "127.0.0.1:1"})
    assert (done.returncode, "/nope can't be read" in done.stderr) == (2, True), done.stderr


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 600.0)
    with progress.Progress("lines", 4000) as bar:
        bar.begin()
        bar.add(1000)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
        bar.add(500)
        assert capsys.readouterr().err.startswith("1,500 of 4,000 lines, ")
        bar.say("waiting \x1b[2J")
        assert capsys.readouterr().err == "waiting \ufffd[2J\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    code = """if True:
        from multigpu.cli.progress import Progress
        with Progress("lines", 40) as bar:
            bar.begin()
            bar.add(30)
            bar.say("a remark")
            bar.add(10)
        print("done")
    """
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stderr=follower, stdout=subprocess.PIPE, text=True, timeout=30, check=True
        )
    finally:
        os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: all was read; a read gives a part of what a slow run has drawn
        while part := os.read(leader, 100_000):
            shown += part
    os.close(leader)
    assert done.stdout == "done\n"
    assert b"40 of 40 lines" in shown
    assert b"a remark" in shown


def test_every_command_is_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "mgpuctl.md").read_text()
    missing = [name for name, _ in all_commands() if f"mgpuctl {name.split()[0]}" not in page]
    assert set(missing) <= {"uncordon"}
    assert "uncordon" in page


def test_names_of_facts_are_printed_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show.facts([("label \x1b[2J\u202e", "value")])
    assert capsys.readouterr().out.split() == ["label", "\ufffd[2J\ufffd", "value"]

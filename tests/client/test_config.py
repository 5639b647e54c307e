"""Configuration: which place wins, and that every mistake is named with its place and its remedy."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from multigpu.config.config import (
    CONFIG_CLASSES,
    ClientConfig,
    ConfigError,
    MasterConfig,
    WorkerConfig,
    click_options,
    env_names,
    find_file,
    flag_name,
    load,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_config_of_this_hosts_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, "utf-8")
    return path


def test_flags_beat_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, '[master]\nstrategy = "round_robin"\nlisten = "1.2.3.4:1"\nsubmit_tasks_max = 5\n')
    env = {"MGPU_MASTER_STRATEGY": "task_type", "MGPU_MASTER_LISTEN": "1.2.3.4:2"}
    loaded = load(MasterConfig, file=file, env=env, flags={"listen": "1.2.3.4:3", "data_dir": None})
    assert loaded.config.listen == "1.2.3.4:3"
    assert loaded.config.strategy == "task_type"
    assert loaded.config.submit_tasks_max == 5
    assert loaded.config.stop_timeout_s == 10.0
    assert {name: source for name, source in loaded.sources.items() if source != "default"} == {
        "listen": "--listen",
        "strategy": "MGPU_MASTER_STRATEGY",
        "submit_tasks_max": str(file),
    }
    assert loaded.sources.keys() == {field.name for field in dataclasses.fields(MasterConfig)}


def test_every_type_is_read_from_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[worker]\nmaster = "[::1]:7433"\nlabels = { zone = "a,b" }\nhandlers = ["one", "two"]\n'
        'window_bytes = "1 GiB"\nresult_bytes_max = 2048\ncancel_grace_s = 1\nslots = 3\n'
        '[master]\ndata_dir = "~/journal"\n',
    )
    worker = load(WorkerConfig, file=file, env={}).config
    assert worker.master == "[::1]:7433"
    assert worker.labels == {"zone": "a,b"}
    assert worker.handlers == ("one", "two")
    assert (worker.window_bytes, worker.result_bytes_max) == (1024**3, 2048)
    assert worker.cancel_grace_s == 1.0
    assert isinstance(worker.cancel_grace_s, float)
    assert load(MasterConfig, file=file, env={}).config.data_dir == Path.home() / "journal"


def test_mgpu_master_and_mgpu_master_listen_set_different_settings() -> None:
    env = {"MGPU_MASTER": "far:1", "MGPU_MASTER_LISTEN": "0.0.0.0:2"}
    assert load(ClientConfig, env=env).config.master == "far:1"
    assert load(MasterConfig, env=env).config.listen == "0.0.0.0:2"
    worker = load(WorkerConfig, env=env)
    assert (worker.config.master, worker.sources["master"]) == ("far:1", "MGPU_MASTER")
    worker = load(WorkerConfig, env={**env, "MGPU_WORKER_MASTER": "near:1"})
    assert (worker.config.master, worker.sources["master"]) == ("near:1", "MGPU_WORKER_MASTER")


def test_variable_names_are_unambiguous() -> None:
    owners: dict[str, list[str]] = {}
    for cls in CONFIG_CLASSES:
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every config class is a dataclass
            owners.setdefault(env_names(cls, field.name)[0], []).append(f"{cls.section}.{field.name}")
    assert [names for names in owners.values() if len(names) > 1] == []
    sections = tuple(f"{cls.section}_" for cls in CONFIG_CLASSES)
    assert [field.name for field in dataclasses.fields(ClientConfig) if field.name.startswith(sections)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[master]\nlistn = 'a:1'", r"config.toml: \[master\] unknown key: listn; did you mean listen\?"),
        ("[worker]\nslot = 1", r"config.toml: \[worker\] unknown key: slot; did you mean slots\?"),
        ("[mastr]\n", r"config.toml: unknown section: mastr; did you mean master\?"),
        ("master = 'a:1'", r"master must be a section: write \[master\]"),
        ("[master]\nzzzz = 1", r"zzzz; known: listen, data_dir"),
        ("[master]\nlisten = 7433", r"config.toml: \[master\] listen: 7433 is not a string"),
        ("[master]\nlisten = 'nowhere'", r"\[master\] listen: 'nowhere': not an address: write HOST:PORT"),
        ("[master]\nlisten = 'a:99999'", r"not an address"),
        ("[master]\nsubmit_tasks_max = true", r"submit_tasks_max: True is not a whole number"),
        ("[master]\nsubmit_tasks_max = 1.5", r"1.5 is not a whole number"),
        ("[master]\nsubmit_tasks_max = 0", r"0 is too small: at least 1"),
        ("[master]\nmemory_threshold_percent = 101", r"101.0 is too large: at most 100"),
        ("[master]\nmemory_threshold_percent = nan", r"nan is not a finite number"),
        ("[master]\npayload_bytes_max = '1 TiB'", r"too large: at most 60MiB"),
        ("[master]\npayload_bytes_max = '1 Tib/s'", r"not a size: write bytes, or a number with KiB"),
        ("[master]\npayload_bytes_max = []", r'not a whole number or a size: "64MiB"'),
        ("[master]\ndata_dir = ''", r"a path can't be empty"),
        ("[master]\nlog_format = 'xml'", r"'xml' is none of auto, json, console"),
        ("[master]\nsession_timeout_s = 1", r"session_timeout_s \(1\) must be at least twice heartbeat_interval_s"),
        ("[master", r"config.toml is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(MasterConfig, file=write(tmp_path, text), env={})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MGPU_MASTER_LISTN": "a:1"}, r"variable MGPU_MASTER_LISTN; did you mean MGPU_MASTER_LISTEN\?"),
        ({"MGPU_WORKER_QQQQQQQQQQQQQQ": "1"}, r"unknown environment variable MGPU_WORKER_Q+; unset it"),
        ({"MGPU_MAX_IN_FLIGT": "1"}, r"did you mean MGPU_MAX_IN_FLIGHT\?"),
        ({"MGPU_WORKER_SLOTS": "many"}, r"MGPU_WORKER_SLOTS: 'many' is not a whole number"),
        ({"MGPU_WORKER_SLOTS": "0"}, r"MGPU_WORKER_SLOTS: 0 is too small"),
        ({"MGPU_WORKER_CANCEL_GRACE_S": "soon"}, r"'soon' is not a number"),
        ({"MGPU_WORKER_CANCEL_GRACE_S": "inf"}, r"inf is not a finite number"),
        ({"MGPU_WORKER_LABELS": "zone"}, r"MGPU_WORKER_LABELS: 'zone' is not of the form KEY=VALUE"),
        ({"MGPU_WORKER_DEVICE": "gpu0"}, r'write "auto", "cpu", "cuda:N", "rocm:N" or a UUID'),
        ({"MGPU_WORKER_MODELS": "/models/a"}, r"'/models/a' is not NAME=PATH"),
        ({"MGPU_MASTER": "7433"}, r"MGPU_MASTER: '7433': not an address"),
        ({"MGPU_CONFIG": "/nowhere/at/all.toml"}, r"MGPU_CONFIG names /nowhere/at/all.toml, which is not a file"),
        ({"MGPU_CONFIG": "/" + "x" * 300}, r"can't look for /xxx.*: File name too long; run this as root"),
    ],
)
def test_a_mistake_in_the_environment_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(WorkerConfig, env=env)


def test_variables_of_others_are_left_alone() -> None:
    load(WorkerConfig, env={"MGPU_HOME_PAGE": "x", "MGPU_VENV": "/venv", "PATH": "/bin"})


def test_an_unknown_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown flag: --slot; did you mean --slots\?"):
        load(WorkerConfig, env={}, flags={"slot": "1"})


def test_the_first_file_there_is_read(tmp_path: Path) -> None:
    user = tmp_path / "multigpu"
    user.mkdir()
    own = write(user, "[client]\nmax_in_flight = 7\n")
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    loaded = load(ClientConfig, env=env)
    assert (loaded.config.max_in_flight, loaded.file) == (7, own)
    other = write(tmp_path, "[client]\nmax_in_flight = 8\n")
    assert load(ClientConfig, env={**env, "MGPU_CONFIG": str(other)}).config.max_in_flight == 8
    assert load(ClientConfig, file=own, env={**env, "MGPU_CONFIG": str(other)}).config.max_in_flight == 7
    with pytest.raises(ConfigError, match=r"--config names .*absent, which is not a file"):
        find_file(tmp_path / "absent", env)


def command(seen: list[Any]) -> click.Command:
    @click.command()
    @click_options(WorkerConfig)
    def main(config_file: str | None, **flags: Any) -> None:
        seen.append(load(WorkerConfig, file=config_file, env={}, flags=flags))

    return main


def test_click_flags_reach_the_config(tmp_path: Path) -> None:
    seen: list[Any] = []
    file = write(tmp_path, "[worker]\nslots = 2\nthreads = 4\n")
    arguments = ["--config", str(file), "--slots", "3", "--models", "a=/x", "--models", "b=/y", "--labels", "k=v,l=w"]
    result = CliRunner().invoke(command(seen), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (loaded,) = seen
    assert (loaded.config.slots, loaded.config.threads) == (3, 4)
    assert loaded.config.models == ("a=/x", "b=/y")
    assert loaded.config.labels == {"k": "v", "l": "w"}
    assert (loaded.sources["slots"], loaded.sources["threads"]) == ("--slots", str(file))


def test_help_shows_every_flag_with_its_default() -> None:
    output = CliRunner().invoke(command([]), ["--help"], terminal_width=200).output
    for field in dataclasses.fields(WorkerConfig):
        assert flag_name(field.name) in output
        assert field.metadata["help"][:30] in output
    assert "[default: 64MiB]" in output


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("multigpu", "asyncio click google.protobuf grpc importlib.metadata numpy opentelemetry rich structlog"),
        ("multigpu.config.config", "grpc click structlog numpy asyncio rich google.protobuf"),
        (
            "multigpu._sync.client, multigpu._async.client",
            "click rich structlog cryptography numpy opentelemetry prometheus_client uvloop",
        ),
    ],
)
def test_importing_is_cheap(module: str, heavy: str) -> None:
    code = f"import sys, {module}\nheavy = set({heavy.split()}) & set(sys.modules)\nassert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_the_documentation_lists_every_setting_as_it_is() -> None:
    tool = ROOT / "tools" / "generate_configuration.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_a_profile_sets_values_that_are_not_set_elsewhere() -> None:
    env = {"MGPU_WORKER_PROFILE": "throughput", "MGPU_WORKER_BATCH_TOKENS_MAX": "100", "EMBEDDING_BATCH_SIZE": "8"}
    loaded = load(WorkerConfig, env=env)
    assert (loaded.config.batch_tasks_max, loaded.config.batch_tokens_max, loaded.config.batch_delay_s) == (
        8,
        100,
        0.005,
    )
    assert loaded.sources["batch_delay_s"] == "profile throughput"
    latency = load(WorkerConfig, env={}, flags={"profile": "latency"}).config
    assert (latency.batch_tasks_max, latency.batch_tokens_max, latency.batch_delay_s) == (32, 2048, 0.0)
    assert load(WorkerConfig, env={}).config == WorkerConfig()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_the_error_for_an_unreadable_folder_names_it(tmp_path: Path) -> None:
    """As /etc/multigpu of a deployed host is for its ordinary users."""
    folder = tmp_path / "multigpu"
    folder.mkdir()
    (folder / "config.toml").touch()
    folder.chmod(0o700)
    code = "import os; from multigpu.config import config as c; os.seteuid(65534); c.find_file(None, os.environ)"
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    env.pop("MGPU_CONFIG", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stderr.splitlines()[-1].startswith("multigpu.errors.ConfigError: ")
    assert "multigpu/config.toml: Permission denied; run this as root" in done.stderr

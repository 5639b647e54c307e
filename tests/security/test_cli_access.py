"""Every mgpuctl command that connects honours --config, and with it TLS and the token.

A command that is in none of the tables below fails the first test: a new one can't be left out.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from multigpu.cli import cli

from tests.client.cli.fleet_up import Up
from tests.client.cli.models.test_generate import ENGINE as COUNTER
from tests.client.cli.models.test_infer import ENGINE as DOUBLER
from tests.security.test_tls import TlsFleet

HASHES = """
import numpy as np
from multigpu.v1 import embed_pb2
from doubler_engine import Base

class Hashes(Base):
    def answer(self, item, batch):
        texts = embed_pb2.EmbedPayload.FromString(item.payload).texts
        values = np.array([[len(text), sum(text.encode())] for text in texts], "<f4")
        return embed_pb2.EmbedResult(dimension=2, values=values.tobytes()).SerializeToString()
"""
# Commands that ask no master.
OFFLINE = {"up", "certs issue", "certs renew", "config show", "models plan"} | {
    *(f"containers {command}" for command in ("deploy", "list", "logs", "stop", "detect")),
    *(f"energy {command}" for command in ("run", "check", "info", "recommend", "compare", "report")),
}
# Every other command, as it is called here, in an order in which each has something to do. {} is a folder of the test.
CALLS: dict[str, str] = {
    "submit": "--kind echo --payload hi --wait --request-id first",
    "embed": "{}/lines.txt -o {}/vectors.npy --model hashes",
    "generate": "1 --model counter --max-tokens 3",
    "infer": "doubler --input x=[1.5]",
    "classify": "letters --text {}/lines.txt",
    "bench": "hashes --batch-size 2 --items 4 --rounds 1 --concurrency 2",
    "train run": "job.py --name job",
    "train finetune": "--model none --data-on-workers lines.jsonl --name job",
    "train list": "",
    "train show": "first",
    "train logs": "first",
    "train metrics": "first",
    "train stop": "first",
    "train resume": "first",
    "watch": "--limit 1",
    "tasks list": "",
    "tasks count": "",
    "tasks get": "--request-id first",
    "tasks explain": "{task_id}",
    "tasks cancel": "--request-id first",
    "status": "",
    "workers": "",
    "gpus": "",
    "top": "",
    "check": "--all",
    "drain": "w1",
    "uncordon": "w1",
    "cordon": "w2",
    "forget": "w2",
    "breaker show": "",
    "breaker reset": "",
    "models list": "",
    "models show": "doubler",
    "models load": "doubler",
    "models unload": "doubler",
    "handlers reload": "--all",
    "energy usage": "",
    "queues list": "",
    "queues pause": "night",
    "queues resume": "night",
    "queues limits": "night --tasks-max 5",
    "dead-letters list": "",
    "dead-letters requeue": "--queue night",
    "dead-letters delete": "--queue night --yes",
    "strategy get": "",
    "strategy set": "auto",
    "tokens list": "",
    "tokens create": "again --role read",
    "tokens revoke": "{token_id}",
    "doctor": "",
}  # fmt: skip
# Those that may end otherwise than with 0 though the master answered, and the words that tell: the worker is
# connected; no worker has training scripts, and "first" is no job; this host is not fit for everything.
ANSWERED = {
    "train run": "--train-dir",
    "train finetune": "--train-dir",
    **dict.fromkeys(
        (f"train {command}" for command in ("show", "logs", "metrics", "stop", "resume")), "not a training"
    ),
    "forget": "worker 'w2' is connected",
    "doctor": r"ok +master  .* version",
    "handlers reload": "no connected worker has handlers",
}


def leaves(command: click.Command, context: click.Context, words: str = "") -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield words.strip()
        return
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, context, f"{words} {name}")


def test_every_command_is_in_a_table() -> None:
    assert set(leaves(cli, click.Context(cli))) == OFFLINE | set(CALLS)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFleet]:
    folder = tmp_path_factory.mktemp("access")
    with TlsFleet(folder) as it:
        ca = it.ca
        flags = ["--tls-ca", str(ca / "ca.crt"), "--tls-cert", str(ca / "worker.crt")]
        flags += ["--tls-key", str(ca / "worker.key")]
        for name, kind, engine, source in (
            ("doubler", "infer", "doubler_engine:Doubler", DOUBLER),
            ("letters", "classify", "doubler_engine:Letters", DOUBLER),
            ("counter", "generate", "counter_engine:Counter", COUNTER),
            ("hashes", "embed", "hashes_engine:Hashes", HASHES),
        ):
            (folder / name).mkdir()
            (folder / name / f"{engine.partition(':')[0]}.py").write_text(source)
            if name == "hashes":
                (folder / name / "doubler_engine.py").write_text(DOUBLER)
            lines = [f'kind = "{kind}"', f'engine = "{engine}"', 'source = "python"']
            (folder / name / "model.toml").write_text("\n".join(lines))
            flags += ["--models", f"{name}={folder / name}"]
        it.start_worker("w1", *flags)
        it.start_worker("w2", *flags)
        yield it


@pytest.fixture
def settings(secured: TlsFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file with all settings; neither the environment nor another file has any of them."""
    for name in [name for name in os.environ if name.startswith("MGPU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secured.admin_token)
    ca = secured.ca
    file = tmp_path / "client.toml"
    file.write_text(f"""[client]
master = "{secured.fleet.address}"
tls_ca = "{ca / "ca.crt"}"
tls_cert = "{ca / "client.crt"}"
tls_key = "{ca / "client.key"}"
token_file = "{token}"
""")
    (tmp_path / "lines.txt").write_text("ab\nbc\n")
    return file


def call(file: Path, words: str, arguments: str, **names: object) -> Result:
    given = [word.format(str(file.parent), **names) for word in arguments.split()]
    return CliRunner().invoke(cli, ["--config", str(file), *words.split(), *given])


def test_every_command_that_connects_takes_its_settings_from_the_file(secured: TlsFleet, settings: Path) -> None:
    token_id, _ = secured.create("revoked", "read")
    task_id = secured.admin.submit("default", b"x")[0].task_id
    for words, arguments in CALLS.items():
        done = call(settings, words, arguments, task_id=task_id, token_id=token_id)
        answered = re.search(ANSWERED[words], done.output) if words in ANSWERED else done.exit_code == 0
        assert answered, f"{words}: {done.output} {done.exception!r}"


def test_every_command_that_connects_sends_the_token(secured: TlsFleet, settings: Path) -> None:
    """Without the token each command is rejected, so the commands above used it."""
    settings.write_text("".join(line for line in settings.open() if "token_file" not in line))
    for words, arguments in CALLS.items():
        done = call(settings, words, arguments, task_id=1, token_id="none")
        assert done.exit_code != 0, words
        assert "token" in done.output, f"{words}: {done.output}"


def test_up_uses_the_token_that_its_new_master_writes(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    token = tmp_path / "data" / "admin.token"
    lines = ["[master]", "require_tokens = true", "[client]", f'token_file = "{token}"']
    file.write_text("\n".join(lines))
    up = Up(tmp_path, "--config", str(file), "--workers", "0")
    try:
        assert up.ready()
    finally:
        assert up.stop() == 0


def test_completion_uses_the_settings_of_the_file(settings: Path) -> None:
    env = {**os.environ, "_MGPUCTL_COMPLETE": "bash_complete", "COMP_CWORD": "4"}
    env["COMP_WORDS"] = f"mgpuctl --config {settings} drain w"
    argv = [sys.executable, "-c", "from multigpu.cli import cli; cli(prog_name='mgpuctl')"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout.split() == ["plain,w1", "plain,w2"], done.stderr

"""`mgpuctl containers` against a peer that speaks Docker's Engine API: what is asked of it, and what follows.

No container is started: that needs an engine.
"""

import http.client
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu import _extras
from multigpu.cli import cli
from multigpu.cli.containers import engines

from tests.client.cli.containers.engine_peer import DOCKER, PODMAN, Peer
from tests.client.cli.fleet_up import MGPUCTL

Cli = Callable[..., Result]
ONE = ("deploy", "--model", "a/m", "--devices", "0,2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `mgpuctl containers` on a host without engines."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{tmp_path}/podman.sock")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engines, "CDI_FOLDERS", (str(tmp_path / "cdi"),))
    return lambda *args: CliRunner().invoke(cli, ["containers", *args])


@pytest.fixture
def docker(run: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    peer = Peer(DOCKER)
    monkeypatch.setenv("DOCKER_HOST", peer.address)
    yield peer
    peer.close()


@pytest.fixture
def podman(run: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    peer = Peer(PODMAN)
    monkeypatch.setenv("CONTAINER_HOST", peer.address)
    yield peer
    peer.close()


def test_what_is_asked_of_docker(docker: Peer, run: Cli, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_secret")
    token = ("--hf-token-file", str(tmp_path / "token"))
    done = run(*ONE, "--api", "vllm", "--env", "A=b", *token, "--json")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    port = row["url"].rpartition(":")[2]
    (body,) = docker.bodies("containers/create")
    assert (body["Image"], body["Cmd"]) == (
        "docker.io/vllm/vllm-openai:v0.26.0", ["--model", "a/m", "--tensor-parallel-size", "2"]
    )  # fmt: skip
    assert body["Labels"] == {"multigpu.api": "vllm", "multigpu.model": "a/m", "multigpu.devices": "0,2"}
    env = ["HF_HOME=/data", "HUGGINGFACE_HUB_CACHE=/data/hub", "HF_TOKEN_PATH=/data/token", "A=b"]
    assert sorted(body["Env"]) == sorted(env)
    host = body["HostConfig"]
    (gpus,) = host["DeviceRequests"]
    assert (gpus["DeviceIDs"], gpus["Capabilities"], gpus["Count"]) == (["0", "2"], [["gpu"]], 0)
    assert (host["ShmSize"], host["RestartPolicy"]) == (16 << 30, {"Name": "unless-stopped"})
    assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}]}
    mounts = [(each["Source"], each["Target"], each["ReadOnly"]) for each in host["Mounts"]]
    cache = tmp_path / "cache"
    assert mounts == [(str(cache), "/data/hub", False), (str(tmp_path / "token"), "/data/token", True)]
    assert cache.is_dir()
    assert "hf_secret" not in json.dumps(docker.asked)
    assert docker.bodies("images/create") == [{"fromImage": "docker.io/vllm/vllm-openai", "tag": "v0.26.0"}]
    assert (row["name"], row["devices"], row["state"]) == ("multigpu-vllm-m", ["0", "2"], "running")


def test_what_is_asked_of_podman(podman: Peer, run: Cli) -> None:
    done = run(*ONE, "--engine", "podman")
    assert done.exit_code == 0, done.output
    host = podman.bodies("containers/create")[0]["HostConfig"]
    (gpus,) = host["DeviceRequests"]
    assert (gpus["Driver"], gpus["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=0", "nvidia.com/gpu=2"])
    assert host["SecurityOpt"] == ["label=disable"]


def test_a_podman_that_ignores_gpus_is_rejected(podman: Peer, run: Cli) -> None:
    podman.version = PODMAN | {"Version": "5.3.2"}
    done = run(*ONE, "--engine", "podman")
    assert (done.exit_code, podman.bodies("containers/create")) == (1, [])
    assert podman.bodies("images/create") == [], "an image of gigabytes was fetched first"
    assert "Podman 5.3.2 ignores the GPUs that its API is asked for; 5.4 is needed" in done.stderr


def test_podman_at_the_address_of_docker_is_named(docker: Peer, run: Cli) -> None:
    docker.version = PODMAN
    assert "at the address of docker, podman answers: use --engine podman" in run(*ONE).stderr


def test_an_image_that_is_there_is_not_fetched(docker: Peer, run: Cli) -> None:
    docker.images.add("mine:1")
    assert run(*ONE, "--image", "mine:1").exit_code == 0
    assert docker.bodies("images/create") == []


def test_an_image_that_cannot_be_fetched(docker: Peer, run: Cli) -> None:
    docker.pull_error = "manifest unknown"
    done = run(*ONE, "--image", "no:1")
    assert (done.exit_code, docker.bodies("containers/create")) == (1, [])
    assert "no:1: manifest unknown" in done.stderr


def test_what_an_engine_rejects(docker: Peer, run: Cli) -> None:
    run(*ONE)
    again = run(*ONE)
    assert (again.exit_code, again.stderr.splitlines()[-1]) == (1, "mgpuctl: multigpu-tgi-m is in use")
    assert len(docker.containers) == 1


@pytest.mark.parametrize("ends", [{"State": {"Status": "exited"}}, {"RestartCount": 1}], ids=["exited", "restarted"])
def test_a_server_that_ends_shows_its_last_lines_and_is_removed(
    docker: Peer, run: Cli, ends: dict[str, object]
) -> None:
    docker.ends = ends
    done = run(*ONE)
    assert done.exit_code == 1
    assert "multigpu-tgi-m ended before it answered, and is removed. Its last lines:\nloading\nready" in done.stderr
    assert docker.containers == {}


@pytest.mark.parametrize("status", [404, 409], ids=["removed", "being removed"])
def test_a_server_that_somebody_removes_while_it_is_waited_for(docker: Peer, run: Cli, status: int) -> None:
    docker.gone = status
    done = run(*ONE)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        1, "mgpuctl: multigpu-tgi-m was removed before it answered"
    )  # fmt: skip


def exit_code_of_ctrl_c(when: threading.Event) -> int:
    argv = [*MGPUCTL, "containers", *ONE]
    with subprocess.Popen(argv, env={**os.environ}, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert when.wait(120)
            process.send_signal(signal.SIGINT)
            return process.wait(120)
        finally:
            process.kill()


def test_ctrl_c_removes_what_was_begun(docker: Peer, run: Cli) -> None:
    docker.health = 503
    assert exit_code_of_ctrl_c(docker.health_asked) == 130
    assert docker.containers == {}
    assert ("DELETE", f"containers/{1:064x}") in [asked[:2] for asked in docker.asked]


def test_ctrl_c_while_the_engine_makes_the_container(docker: Peer, run: Cli) -> None:
    docker.create_s = 1.0
    assert exit_code_of_ctrl_c(docker.create_asked) == 130
    assert docker.created.wait(30)
    assert docker.containers == {}


def test_ctrl_c_before_the_container_is_known(docker: Peer, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container stayed: any thread may receive the signal, so it does not help that the main thread blocks it."""
    create = engines.Engine.create

    def interrupted(*arguments: Any) -> Any:
        container = create(*arguments)
        receiver = threading.Thread(target=signal.raise_signal, args=[signal.SIGINT])
        receiver.start()
        receiver.join()
        return container

    monkeypatch.setattr(engines.Engine, "create", interrupted)
    assert run(*ONE).exit_code == 1  # of click, without our main()
    assert docker.containers == {}


def test_ctrl_c_during_a_health_check_is_not_lost(docker: Peer, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI: the deployment went on. Python closed the answer of /health by a finalizer, which drops KeyboardInterrupt."""
    closed = http.client.HTTPResponse.close

    def interrupted(response: http.client.HTTPResponse) -> None:
        closed(response)
        if docker.health_asked.is_set() and docker.health == 503:
            docker.health = 200  # without the interrupt, the deployment succeeds
            signal.raise_signal(signal.SIGINT)

    docker.health = 503
    monkeypatch.setattr(http.client.HTTPResponse, "close", interrupted)
    assert run(*ONE).exit_code == 1  # of click, without our main()
    assert docker.containers == {}


def test_list_logs_and_stop_find_only_ours(docker: Peer, podman: Peer, run: Cli) -> None:
    assert "no model server" in run("list").stderr
    run(*ONE, "--name", "first")
    run(*ONE, "--name", "second", "--engine", "podman")
    other = docker.add("other", {"Labels": {}, "Image": "x", "HostConfig": {"PortBindings": None}})
    rows = json.loads(run("list", "--json").stdout)
    assert [(row["name"], row["engine"], row["model"], row["state"]) for row in rows] == [
        ("first", "docker", "a/m", "running"), ("second", "podman", "a/m", "running")
    ]  # fmt: skip
    assert rows[0]["url"] in run("list").stdout
    assert run("logs", "second").stdout == "loading\nready \ufffd\n"
    assert run("stop", "second").exit_code == 0
    assert podman.containers == {}
    assert ("POST", f"containers/{1:064x}/stop") in [asked[:2] for asked in podman.asked]
    for command in ("logs", "stop"):
        missing = run(command, "other")
        assert (missing.exit_code, "there is no model server 'other'" in missing.stderr) == (4, True)
    assert other in docker.containers


def test_detect(docker: Peer, podman: Peer, run: Cli, tmp_path: Path) -> None:
    run(*ONE)
    found = run("detect").stdout
    assert "docker 29.1.0: gives GPUs by NVIDIA's runtime" in found
    assert "podman 5.4.0: names no way to give GPUs to containers" in found
    assert "multigpu-tgi-m" in found
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    docker.info = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}
    docker.stop(f"{1:064x}")
    answer = json.loads(run("detect", "--json").stdout)
    how = {name: each["gives_gpus_by"] for name, each in answer["engines"].items()}
    assert (how, answer["servers"]) == ({"docker": "CDI", "podman": "CDI"}, [])
    podman.version = PODMAN | {"Version": "5.3.2"}
    assert json.loads(run("detect", "--json").stdout)["engines"]["podman"]["gives_gpus_by"] == ""


def test_a_host_without_engines(run: Cli) -> None:
    done = run("list")
    assert done.exit_code == 1
    assert "docker does not answer at unix://" in done.stderr and "; podman does not answer at unix://" in done.stderr
    assert sorted(json.loads(run("detect", "--json").stdout)["errors"]) == ["docker", "podman"]
    assert "docker does not answer at " in run(*ONE).stderr


def test_without_the_extra(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_extras.MODULES, "containers", ("no_such_module",))
    for args in (ONE, ("list",), ("logs", "x"), ("stop", "x"), ("detect",)):
        message = str(run(*args).exception)
        assert message == (
            "mgpuctl containers: not installed: no_such_module; run `pip install 'multigpu[containers]'`"
        ), args

"""`mgpuctl containers deploy --dry-run`: the command lines word by word, and the choice of GPUs."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from multigpu import _extras
from multigpu.cli import cli
from multigpu.cli.containers import gpus
from multigpu.cli.failures import Failure

from tests.fakes.gpus import SimulatedGpus

TGI = "ghcr.io/huggingface/text-generation-inference:3.3.7"
TEI = "ghcr.io/huggingface/text-embeddings-inference:cuda-1.9.3"
VLLM = "docker.io/vllm/vllm-openai:v0.26.0"
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run needs neither an engine nor the package docker."""
    monkeypatch.setitem(sys.modules, "docker", None)
    monkeypatch.setenv("HF_HOME", "/hf")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpus:
    found = SimulatedGpus(tmp_path / "gpus", n=4)
    for name, value in found.env().items():
        monkeypatch.setenv(name, value)
    return found


def deploy(*args: str) -> Result:
    return CliRunner().invoke(cli, ["containers", "deploy", *args])


def line(
    name: str, devices: str, image: str, command: str, *, port: str = "8080:80", shm: str = "1g", more: str = ""
) -> str:
    """`name`: the API and the model."""
    api, _, model = name.partition(" ")
    request = f'"device={devices}"' if "," in devices else f"device={devices}"
    return (
        f"docker run --detach --name multigpu-{api}-{model.rpartition('/')[2]} --gpus {shlex.quote(request)} "
        f"--shm-size {shm} --restart unless-stopped --publish 127.0.0.1:{port} "
        "--mount type=bind,source=/hf/hub,target=/data/hub "
        f"--env HF_HOME=/data --env HUGGINGFACE_HUB_CACHE=/data/hub {more}"
        f"--label multigpu.api={api} --label multigpu.model={model} --label multigpu.devices={devices} "
        f"{image} {command}\n"
    )


OPT = "facebook/opt-1.3b"
MINI = "sentence-transformers/all-MiniLM-L6-v2"
TGI_ONE = f"--model-id {OPT} --num-shard 1"
TGI_TWO = f"--model-id {OPT} --num-shard 2"
# Each deployment of the earlier document, in its order, with a port.
EARLIER = [
    (f"--model {OPT} --auto-select", line(f"tgi {OPT}", "1", TGI, TGI_ONE)),
    (f"--model {OPT} --devices cuda:0,cuda:1", line(f"tgi {OPT}", "0,1", TGI, TGI_TWO)),
    (
        f"--model {OPT} --api-type tgi --image huggingface/text-generation-inference:latest --devices cuda:0,cuda:1",
        line(f"tgi {OPT}", "0,1", "huggingface/text-generation-inference:latest", TGI_TWO),
    ),
    (f"--model {OPT}", line(f"tgi {OPT}", "1", TGI, TGI_ONE)),
    (f"--model {OPT} --api-type tgi", line(f"tgi {OPT}", "1", TGI, TGI_ONE)),
    (f"--model {MINI} --api-type tei", line(f"tei {MINI}", "1", TEI, f"--model-id {MINI}")),
    (
        f"--model {OPT} --api-type vllm --image vllm/vllm-openai:latest",
        line(
            f"vllm {OPT}", "1", "vllm/vllm-openai:latest", f"--model {OPT} --tensor-parallel-size 1",
            port="8080:8000", shm="16g",
        ),
    ),
    (
        f"--model {OPT} --env MAX_BATCH_SIZE=32 --env ALLOW_TENSORFLOW=true",
        line(f"tgi {OPT}", "1", TGI, TGI_ONE, more="--env MAX_BATCH_SIZE=32 --env ALLOW_TENSORFLOW=true "),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("args", "expected"), EARLIER)
def test_deployments_of_the_earlier_system(host: SimulatedGpus, args: str, expected: str) -> None:
    host.use_memory(0, 1 * GIB)
    host.use_memory(2, 2 * GIB)
    host.use_memory(3, 3 * GIB)
    done = deploy(*args.split(), "--port", "8080", "--dry-run")
    assert (done.exit_code, done.stdout) == (0, expected), done.output


def test_a_line_for_docker_word_by_word(tmp_path: Path) -> None:
    token = tmp_path / "my, token"
    token.write_text("hf_secret")
    args = ["--model", "a/m", "--api", "vllm", "--devices", "0,GPU-1a-2b", "--name", "nn", "--port", "81"]
    done = deploy(*args, "--env", "A=it's", "--hf-token-file", str(token), "--dry-run")
    assert done.stdout == (
        "docker run --detach --name nn --gpus '\"device=0,GPU-1a-2b\"' --shm-size 16g --restart unless-stopped "
        "--publish 127.0.0.1:81:8000 --mount type=bind,source=/hf/hub,target=/data/hub "
        f"--mount 'type=bind,\"source={token}\",target=/data/token,readonly' "
        "--env HF_HOME=/data --env HUGGINGFACE_HUB_CACHE=/data/hub --env HF_TOKEN_PATH=/data/token "
        "--env 'A=it'\"'\"'s' --label multigpu.api=vllm --label multigpu.model=a/m "
        f"--label multigpu.devices=0,GPU-1a-2b {VLLM} --model a/m --tensor-parallel-size 2\n"
    ), done.output
    assert "hf_secret" not in done.output


def test_a_line_for_podman_names_gpus_by_cdi() -> None:
    args = "--engine podman --model a/m --devices 0,2 --port 81 --dry-run --json"
    assert json.loads(deploy(*args.split()).stdout)["command"] == [
        "podman", "run", "--detach", "--name", "multigpu-tgi-m", "--device", "nvidia.com/gpu=0", "--device",
        "nvidia.com/gpu=2", "--security-opt", "label=disable", "--shm-size", "1g", "--restart", "unless-stopped",
        "--publish", "127.0.0.1:81:80", "--mount", "type=bind,source=/hf/hub,target=/data/hub", "--env",
        "HF_HOME=/data", "--env", "HUGGINGFACE_HUB_CACHE=/data/hub", "--label", "multigpu.api=tgi", "--label",
        "multigpu.model=a/m", "--label", "multigpu.devices=0,2", TGI, "--model-id", "a/m", "--num-shard", "2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--devices 0,0", "names a GPU twice"),
        ("--devices all", "'all' is neither the index nor the UUID of a GPU"),
        ("--devices 0 --auto-select", "exclude each other"),
        ("--devices 0,1 --api tei", "tei uses one GPU; --devices names 2"),
        ("--devices 0 --env HF_TOKEN=hf_x", "use --hf-token-file"),
        ("--devices 0 --env A", "not of the form KEY=VALUE"),
        ("--devices 0 --hf-token-file /none", "does not exist"),
        ("--devices 0 --model ./models/m", "the container does not see ./models/m"),
    ],
)
def test_wrong_usage(args: str, says: str) -> None:
    done = deploy("--model", "m", *args.split(), "--dry-run")
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_a_free_port_is_chosen() -> None:
    first, second = (deploy("--model", "m", "--devices", "0", "--dry-run").stdout for _ in range(2))
    assert first.split("--publish ")[1].split()[0] != second.split("--publish ")[1].split()[0]


def test_models_get_as_few_gpus_as_suffice(host: SimulatedGpus) -> None:
    """Each has 140 GiB: cuda:1 has 120 of them free, the others more."""
    host.use_memory(1, 20 * GIB)
    host.use_memory(2, 1 * GIB)
    assert gpus.select("a/m-7b", one=False) == ("0",)
    assert gpus.select("a/m-70b", one=False) == ("0", "3")
    assert gpus.select("a/m-180B-chat", one=False) == ("0", "1", "2", "3")
    assert gpus.select("a/no-size", one=True) == ("0",)
    host.lose(0)
    assert gpus.select("a/m-7b", one=False) == ("3",)
    with pytest.raises(Failure, match=r"m-70b needs about 156 GiB; free are: cuda:3 140 GiB, "):
        gpus.select("a/m-70b", one=True)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("opt-1.3b", 1.3), ("a/SmolLM2-135M-Instruct", 0.135), ("x/Mixtral-8x7B-v0.1", 56), ("Qwen3-30B-A3B", 30),
     ("a/Llama-3.1-8B-4bit", 8), ("all-MiniLM-L6-v2", 0), ("gpt2", 0)],
)  # fmt: skip
def test_estimates_by_the_name(model: str, billions: float) -> None:
    assert gpus.estimate_bytes(model) == round(billions * 2.4e9)


def test_auto_select_without_the_extra_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_extras.MODULES, "worker", ("no_such_module",))
    done = deploy("--model", "m", "--dry-run")
    assert "--auto-select: not installed: no_such_module; run `pip install 'multigpu[worker]'`" in done.stderr

"""`mgpuctl models plan` and `multigpu.plan`, with a model of random weights and a simulated driver."""

import json
from pathlib import Path

import multigpu
import pytest
from click.testing import CliRunner, Result
from multigpu import _extras
from multigpu.cli import cli
from multigpu.cli.models.plan import ranges

from tests.fakes.gpus import SimulatedGpus

pytest.importorskip("torch", reason="the extra `worker` is not installed")
from tests.worker.generate.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "tiny"
    save_tiny_llama(folder)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["models", "plan", *map(str, arguments)])


def test_a_plan_says_what_is_on_each_device(folder: Path) -> None:
    done = run(folder, "--devices", "600MiB, 700MiB", "--strategy", "balanced")
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM, 2 layers" in done.stdout
    first, second = (line for line in done.stdout.splitlines() if line.split()[1:2] in (["600MiB"], ["700MiB"]))
    assert "model.embed_tokens" in first
    assert "model.norm" in second
    assert "Fits on" in done.stdout
    assert "- 2 devices work one after the other" in done.stdout


@pytest.mark.slow
def test_its_json_is_the_plan_of_python_and_its_map_can_be_checked(folder: Path, tmp_path: Path) -> None:
    given = run(folder, "--devices", "1GiB,1GiB", "--strategy", "balanced", "--cache-tokens", 64, "--json")
    values = json.loads(given.stdout)
    plan = multigpu.plan(folder, devices=["1GiB", "1GiB"], strategy="balanced", cache_tokens=64)
    assert values == json.loads(json.dumps(plan.as_dict()))
    (tmp_path / "map.json").write_text(json.dumps(values["device_map"]))
    again = run(folder, "--devices", "1GiB,1GiB", "--map", tmp_path / "map.json", "--cache-tokens", 64, "--json")
    assert json.loads(again.stdout)["devices"] == values["devices"]
    (tmp_path / "map.json").write_text('{"model": 0}')
    wrong = run(folder, "--devices", "1GiB,1GiB", "--map", tmp_path / "map.json")
    assert (wrong.exit_code, wrong.stderr) == (1, "mgpuctl: the device map does not place lm_head\n")


@pytest.mark.slow
def test_the_default_is_the_gpus_of_this_host(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SimulatedGpus(tmp_path / "gpus", n=2).env().items():
        monkeypatch.setenv(name, value)
    plan = multigpu.plan(folder, max_memory={1: "20GiB"})
    assert [device.name for device in plan.devices] == ["cuda:0", "cuda:1"]
    assert plan.devices[1].limit_bytes == 20 << 30
    assert plan.devices[0].limit_bytes > 100 << 30
    assert [device.name for device in multigpu.plan(folder, devices=["cuda:1"]).devices] == ["cuda:1"]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        pytest.param(["--devices", "510MiB"], 1, "is 0.47 GiB: raise max_memory", marks=pytest.mark.slow),
        pytest.param(["--devices", "1GiB", "--pipeline", "2"], 1, "2 stages of 1 rank(s)", marks=pytest.mark.slow),
        ([], 2, "say for which devices to plan: --devices 24GiB,24GiB, or cpu"),
        (["--devices", "ten"], 1, "there is no ten here"),
        (["--devices", "1GB"], 2, "'1GB' is neither a device nor a size"),
        (["--devices", "cpu,1GiB"], 2, "cpu is planned for alone"),
        (["--devices", "1GiB", "--max-memory", "1=1GiB"], 2, "max_memory has '1': there are 1 devices"),
        (["--devices", "1GiB", "--max-memory", "gpu=1GiB"], 2, "'gpu=1GiB' is not of the form"),
        (["--devices", "1GiB", "--map", "none.json"], 2, "none.json can't be read"),
        (["--devices=-80GiB"], 2, "'-80GiB' is neither a device nor a size"),
        (["--devices", "1GiB", "--max-memory", "0=2GiB"], 2, "1GiB has 1,073,741,824"),
        (["--devices", "1GiB", "--max-memory", "0=500MiB,0=600MiB"], 2, "0 has two limits"),
        (["--devices", "1GiB", "--pipeline", "2", "--strategy", "balanced"], 2, "a strategy makes a device map"),
    ],
)
def test_what_cannot_be_planned_is_an_error(folder: Path, arguments: list[str], code: int, error: str) -> None:
    done = run(folder, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert error in done.stderr


@pytest.mark.slow
def test_ranks_have_stages_and_no_device_map(folder: Path) -> None:
    plan = multigpu.plan(folder, devices=[1 << 30, "1GiB"], pipeline=2)
    assert not plan.device_map
    assert plan.stages["model.embed_tokens"] == 0
    assert plan.stages["lm_head"] == 1


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    assert "there is no" in run(tmp_path / "none", "--devices", "1GiB").stderr
    assert "is no model" in run(tmp_path, "--devices", "1GiB").stderr


def test_python_gets_the_same_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no strategy 'best'; there are auto, balanced"):
        multigpu.plan(folder, devices=["1GiB"], strategy="best")
    with pytest.raises(ValueError, match="tensor_parallel is 0: it is a number from 1 up"):
        multigpu.plan(folder, devices=["1GiB"], tensor_parallel=0)
    with pytest.raises(ValueError, match="devices is a list"):
        multigpu.plan(folder, devices="24GiB")
    with pytest.raises(ValueError, match="and model a path"):
        multigpu.plan("", devices=["1GiB"])
    with pytest.raises(ValueError, match="'1x' is not a size"):
        multigpu.plan(folder, devices=["1GiB"], max_memory={0: "1x"})
    monkeypatch.setitem(_extras.MODULES, "worker", ("not_installed",))
    with pytest.raises(multigpu.PlanError, match=r"multigpu\[worker\]"):
        multigpu.plan(folder, devices=["1GiB"])


def test_consecutive_layers_are_shown_as_one() -> None:
    modules = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.3", "h.4", "norm"]
    assert ranges(modules) == ["model.embed_tokens", "model.layers.0-1", "model.layers.3", "h.4", "norm"]
    assert ranges([]) == []

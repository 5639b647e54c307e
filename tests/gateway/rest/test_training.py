"""The training routes of an earlier system: jobs that fine-tune, before a real fleet."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu import AdminClient

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.worker.generate.tiny_llama import save_tiny_llama

pytest.importorskip("transformers", reason="the extra `finetune` is not installed")
pytest.importorskip("peft", reason="the extra `finetune` is not installed")
pytestmark = pytest.mark.slow
TEXTS = ["the cat sat on the mat"] * 20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    (folder / "train").mkdir()
    save_tiny_llama(folder / "models" / "gpt2")
    flags = ["--train-dir", str(folder / "train"), "--model-repository", str(folder / "models")]
    with Fleet(folder, workers=2, worker_flags=flags) as running:
        running.wait_for_workers()
        yield running


def body_with(**changes: Any) -> dict[str, Any]:
    """The body in the guide of the earlier system, with a smaller model."""
    return {
        "model_name": "gpt2",
        "dataset_config": {"texts": TEXTS, "max_length": 64},
        "training_config": {"epochs": 1, "learning_rate": 5e-5, "batch_size_per_gpu": 2},
        "user_id": 123,
    } | changes


def post(gateway: GatewayProcess, path: str, body: Any, status: int) -> Any:
    response, answer = gateway.call("POST", path, body)
    assert response.status == status, answer
    return answer


@pytest.mark.parametrize(
    ("kind", "world_size", "strategy", "chosen"),
    [("dataparallel", 1, "dp", "dp"), ("distributed", 2, "ddp", "ddp"), ("auto", 2, "auto", "ddp")],
)
def test_a_model_is_trained(gateway: GatewayProcess, kind: str, world_size: int, strategy: str, chosen: str) -> None:
    started = post(gateway, f"/multigpu/training/{kind}", body_with(training_type=kind), 202)
    assert re.fullmatch(r"gpt2-123-[0-9a-f]{8}", started["job"])
    assert (started["training_type"], started["world_size"], started["strategy"]) == (kind, world_size, strategy)
    until(lambda: gateway.call("GET", f"/v1/tasks/{started['task_id']}?wait=30")[1]["state"] == "SETTLED", 240)
    job = gateway.call("GET", "/multigpu/training/history?limit=1")[1]["jobs"][0]
    assert (job["job"], job["status"], job["error"]) == (started["job"], "SUCCEEDED", "")
    assert job["model"].startswith("gpt2-tuned:")
    assert job["settings"]["batch"] == 2 * world_size
    assert job["settings"]["learning_rate"] == 5e-5
    assert "texts" not in job["settings"]
    assert job["curve"][0]["perplexity"] > job["curve"][-1]["perplexity"]
    assert job["gpu_hours"] > 0
    assert job["trained"]["strategy"] == chosen
    assert job["trained"]["strategy_reason"]
    assert job["trained"]["learning_rate"] == 5e-5
    assert job["world_size"] == world_size
    assert job["recommendations"]


def test_settings_are_checked_and_completed(gateway: GatewayProcess) -> None:
    answer = post(gateway, "/multigpu/training/config", {"batch_size_per_gpu": 4, "mixed_precision": False}, 200)
    config = answer["training_config"]
    assert (config["batch_size_per_gpu"], config["mixed_precision"], config["epochs"]) == (4, False, 3.0)
    assert post(gateway, "/multigpu/training/config", config, 200) == answer


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model_name": ""}, "model_name"),
        ({"dataset_config": {"texts": []}}, "dataset_config.texts"),
        ({"dataset_config": {"texts": [1]}}, "dataset_config.texts"),
        ({"training_config": {"epochs": 0}}, "training_config.epochs"),
        ({"training_config": {"gpu_ids": [0]}}, "gpu_ids"),
        ({"training_config": {"backend": "mpi"}}, "training_config.backend"),
        ({"training_type": "auto"}, "training_type"),
        ({"world_size": 2}, "training_config"),  # DataParallel is one process
        ({"more": 1}, ""),
    ],
)
def test_a_wrong_body_is_rejected(gateway: GatewayProcess, changes: dict[str, Any], param: str) -> None:
    answer = post(gateway, "/multigpu/training/dataparallel", body_with(**changes), 400)
    assert param in answer["error"]["message"], answer


def test_a_model_that_is_not_there_is_a_failed_job(gateway: GatewayProcess) -> None:
    started = post(gateway, "/multigpu/training/auto", body_with(model_name="missing"), 202)
    until(lambda: gateway.call("GET", f"/v1/tasks/{started['task_id']}?wait=30")[1]["state"] == "SETTLED", 60)
    job = gateway.call("GET", "/multigpu/training/history")[1]["jobs"][0]
    assert job["status"] == "FAILED"
    assert "has no model 'missing'" in job["error"]


def test_gpus_are_managed(gateway: GatewayProcess, fleet: Fleet) -> None:
    with fleet.client() as client, AdminClient(fleet.address) as admin:
        client.generate("the", model="gpt2", max_tokens=1)
        (loaded,) = [index for index, each in enumerate(admin.list_workers()) if each.resident_models]
        answer = post(gateway, "/multigpu/resources/manage", {"action": "cleanup", "gpu_ids": [loaded]}, 200)
        assert answer["gpus"] == [{"gpu_id": loaded, "worker_id": f"w{loaded}", "unloaded_models": ["gpt2"]}]
        until(lambda: not any(each.resident_models for each in admin.list_workers()), 30)
        post(gateway, "/multigpu/resources/manage", {"action": "cordon", "gpu_ids": [1]}, 200)
        assert [each.cordoned for each in admin.list_workers()] == [False, True]
        post(gateway, "/multigpu/resources/manage", {"action": "uncordon"}, 200)
        assert not any(each.cordoned for each in admin.list_workers())
    for wrong in (
        {"action": "explode"},
        {},
        {"action": "cordon", "gpu_ids": [2]},
        {"action": "cordon", "gpu_ids": [-1]},
    ):
        post(gateway, "/multigpu/resources/manage", wrong, 400)

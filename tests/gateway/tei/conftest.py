"""A fleet with real weights to embed, and random ones to embed without normalisation, to rank and to classify."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="Hugging Face's client is not installed")

from tests.fleet import Fleet
from tests.gateway.openai_api.conftest import judge as judge  # noqa: PLC0414  a fixture
from tests.worker.embed.tiny_models import bert
from tests.worker.rerank.test_rerank import cross_encoder


@pytest.fixture(scope="session")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of texts with three classes, of random weights."""
    folder = tmp_path_factory.mktemp("sorter")
    cross_encoder(folder, labels=3)
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to embed whose configuration has no normalisation, of random weights."""
    return bert(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def fleet(judge: Path, sorter: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(judge, repository / "acme" / "ranker" / "1")
    models = f"judge={judge},sorter={sorter},plain={plain}"
    flags = ["--threads", "1", "--models", models, "--model-repository", str(repository)]
    with Fleet(tmp_path_factory.mktemp("fleet"), worker_flags=flags) as running:
        yield running
        assert not running.faults()


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of engines set HF_HUB_OFFLINE, which Hugging Face's client reads when it is imported, for its calls too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

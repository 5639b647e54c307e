"""A small model folder for the tests of embedding."""

from pathlib import Path

import pytest


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A plain Hugging Face folder of a small BERT."""
    from tests.worker.embed import tiny_models  # needs torch, which may not be installed

    return tiny_models.bert(tmp_path / "plain")

"""Every text of cuda_error_texts.toml has the class that the file gives it."""

import tomllib
from pathlib import Path

import pytest
from multigpu_worker.engines.common.cuda_errors import (
    caused_elsewhere,
    context_is_lost,
    device_is_occupied,
    hardware_failed,
)

CORPUS = tomllib.loads(Path(__file__).with_name("cuda_error_texts.toml").read_text(encoding="utf-8"))
# The answers of (context_is_lost, hardware_failed, caused_elsewhere, device_is_occupied).
CLASSES = {
    "survives": (False, False, False, False),
    "occupied": (False, False, False, True),
    "lost": (True, False, False, False),
    "elsewhere": (True, False, True, False),
    "hardware": (True, True, False, False),
}


@pytest.mark.parametrize(("expected", "text"), [(name, text) for name, texts in CORPUS.items() for text in texts])
def test_the_class_of_each_error_text(expected: str, text: str) -> None:
    answers = (context_is_lost(text), hardware_failed(text), caused_elsewhere(text), device_is_occupied(text))
    assert answers == CLASSES[expected]


def test_every_class_has_texts() -> None:
    assert CORPUS.keys() == CLASSES.keys()
    assert all(CORPUS.values())

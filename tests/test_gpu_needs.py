"""benchmarks/gpu.sh says what is missing before it begins, by requirements that the packages themselves name."""

import importlib.metadata

import pytest

from benchmarks.gpu.needs import missing

REQUIRES = [
    "click>=8.1",
    "numpy>=1.26",
    "protobuf<8,>=7.36.2",
    "torch>=2.6; extra == 'worker'",
    "pycuda; extra == 'gpu'",
]
THERE = {"click": "8.1", "numpy": "1.9.5", "protobuf": "7.36.10", "torch": "2.11.0+cu130"}


def test_missing_and_old_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in THERE:
            raise importlib.metadata.PackageNotFoundError(name)
        return THERE[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIRES)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert missing() == ["numpy>=1.26: 1.9.5 is installed", "sentence-transformers: not installed"]


def test_without_multigpu_that_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    (line,) = missing()
    assert line.startswith("multigpu: not installed")

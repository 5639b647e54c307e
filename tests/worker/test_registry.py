"""User-defined engines: error messages name the defect for the engine's author."""

import sys
from pathlib import Path

import pytest
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.registry import build_model_engine
from multigpu_worker.repository.model import ModelFolderError, ModelSpec


@pytest.mark.parametrize(
    ("code", "engine", "words"),
    [
        ("", "nowhere_at_all:Mine", r"No module named 'nowhere_at_all'; put nowhere_at_all\.py into /m, or install it"),
        ("import nix_da\n", "broken_engine:Mine", r"No module named 'nix_da' \(.*broken_engine\.py, line 1\)"),
        ("one = 1\nnone = one / 0\n", "broken_engine:Mine", r"division by zero \(.*broken_engine\.py, line 2\)"),
        ("class Yours: pass\n", "broken_engine:Mine", r"has no attribute 'Mine'"),
        ("class Mine\n", "broken_engine:Mine", r"SyntaxError: .*broken_engine\.py, line 1"),
    ],
)
def test_users_class_that_cannot_be_imported_is_reported_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, engine: str, words: str
) -> None:
    (tmp_path / "broken_engine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_engine", raising=False)
    spec = ModelSpec(name="m", folder=Path("/m"), kind="infer", engine=engine, source="python")
    with pytest.raises(ModelFolderError, match=f"the engine '{engine}' fails: .*{words}"):
        build_model_engine(spec, EngineSettings(device="cpu", slots=1, threads=1, models={"m": spec}))

"""Models that the generate engine runs, and models that it rejects at load."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

import torch
import transformers
from multigpu_worker.engines.generate import weights as under_test
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.repository.folders import ModelFolderError

from tests.worker.generate.generating import Plain, ask, run_all, settings_of
from tests.worker.generate.test_generate import check, folder
from tests.worker.generate.tiny_llama import CHAT_TEMPLATE, save_tiny_llama

__all__ = ["folder"]


def test_sliding_window_is_respected(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, sliding_window=20)
    engine = GenerateEngine(settings_of(tmp_path))
    engine.load()
    plain = Plain.load(tmp_path)
    prompts = ["abc " * 25, "Hello"]
    recorders = run_all(engine, [ask(prompt, max_tokens=50) for prompt in prompts])
    for prompt, recorder in zip(prompts, recorders, strict=True):
        check(recorder, plain, plain.greedy(prompt, 50))
    engine.close()


def test_unsupported_models_are_rejected_at_load(folder: Path, tmp_path: Path) -> None:
    # Mamba has a recurrent state in place of keys and values.
    state = tmp_path / "mamba"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(state)
    config = transformers.MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(state)
    for settings, words in (
        (settings_of(state), "mamba"),
        (settings_of(tmp_path / "nothing"), "is missing|is no folder"),
        (settings_of(folder, parameters={"colour": "red"}), r"parameters\.colour"),
        (settings_of(folder, parameters={"context": "0"}), "context is 0"),
        (settings_of(folder, precision="int8"), "int8"),
    ):
        with pytest.raises(ModelFolderError, match=words):
            GenerateEngine(settings).load()
    with pytest.raises(MemoryError, match="cache_bytes"):
        GenerateEngine(settings_of(folder, parameters={"cache_bytes": "100"})).load()


def test_half_precision_and_a_configured_context(folder: Path) -> None:
    engine = GenerateEngine(settings_of(folder, precision="bf16", parameters={"context": "64"}))
    assert engine.load()["precision"] == "bf16"
    short, long = run_all(engine, [ask("Hello", max_tokens=20), ask("Hello", max_tokens=60)])
    assert len(short.result.token_ids) == 20
    assert long.outcome is not None and "context is 64 tokens" in long.outcome[1]
    engine.close()


def test_folders_of_other_settings_share_no_dequantised_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the chat template beside a GGUF file. A Hugging Face folder stands in for the content."""
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    monkeypatch.setattr(under_test, "_from_gguf", lambda spec, dtype: under_test._from_folder(spec.folder, dtype))
    save_tiny_llama(tmp_path / "one")
    (tmp_path / "one/m.gguf").write_bytes(b"GGUF")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two/chat_template.jinja").write_text("another")
    templates = []
    for name in ("one", "two"):
        settings = settings_of(tmp_path / name, artifacts=str(tmp_path / "kept"), source="gguf", file="m.gguf")
        spec = next(iter(settings.models.values()))
        templates.append(under_test.read_weights(spec, settings.artifacts, 1 << 30, torch.float32)[1].chat_template)
    assert templates == [CHAT_TEMPLATE, "another"]

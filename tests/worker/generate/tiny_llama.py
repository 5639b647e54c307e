"""A Llama of random weights, small enough to generate hundreds of tokens a second, with a tokenizer of single bytes.

Its answers are noise, but they are the model's own: what plain transformers makes of it is the truth to compare with.
Bytes as tokens make characters that are not whole an everyday thing.
"""

from pathlib import Path
from typing import Any

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if messages[0]['content'] == 'reject' %}{{ raise_exception('I reject') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_llama(
    folder: Path,
    *,
    context: int = 512,
    sliding_window: int | None = None,
    endless: bool = False,
    head_size: int = 8,
    layers: int = 2,
) -> None:
    """Write the model as a Hugging Face folder. A sliding window makes it a Mistral. Endless: it has no end token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    kind: Any = transformers.PreTrainedTokenizerFast
    tokenizer = kind(
        tokenizer_object=backend,
        eos_token=None if endless else EOS,
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": context}
    shape |= {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    shape |= {"pad_token_id": 0, "initializer_range": 0.3, "head_dim": head_size}
    torch.manual_seed(1)
    model: transformers.PreTrainedModel
    if sliding_window is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        config = transformers.MistralConfig(**shape, sliding_window=sliding_window)
        model = transformers.MistralForCausalLM(config)
    model.save_pretrained(folder)

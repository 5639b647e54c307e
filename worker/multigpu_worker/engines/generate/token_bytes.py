"""The bytes of single tokens.

A token may be a part of a character, so its text alone is not enough: tokenizers of bytes write each byte as a
character of their own alphabet, others have tokens such as <0xE9>.
"""

import json
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# How tokens of SentencePiece write a space.
SPACE = "\u2581"


class TokenBytes:
    """What each token of a tokenizer adds to the text. Special tokens add nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._added = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
        decoders = _decoders(tokenizer)
        alphabet: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
        self._byte_of = {character: byte for byte, character in alphabet.items()}
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._spaces = any(SPACE in decoder for decoder in decoders.values())
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """The bytes of a token. Empty for special tokens, and for ids without a token."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        if token in self._special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_level and all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        if self._byte_fallback and (found := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        if self._spaces:
            return str(piece).replace(SPACE, " ").encode()
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text.encode()


def _decoders(tokenizer: Any) -> dict[str, str]:
    """The decoder's steps as JSON, by type. Empty for a tokenizer that is not of the tokenizers library."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return {}
    # Its state for pickle: to_str() would write the whole vocabulary.
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"]: json.dumps(step, ensure_ascii=False) for step in steps}

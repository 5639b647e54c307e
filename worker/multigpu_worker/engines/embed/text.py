"""From texts to the inputs of an embedding model, the same for every back end: prompt, tokens, limit, padding.

A folder's tokenizer is loaded by transformers, whose import brings torch with it. A back end that does without torch
keeps what came of that once: `save` writes the tokenizer, with its limit and all that was set on it, in the form of the
tokenizers library, and `read` needs no more than that. So importing this module is cheap, and `read` stays so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multigpu_worker.models.folders import ModelFolderError, read_object

# Longest text in tokens where neither the tokenizer nor the model names a limit.
TOKENS_PER_TEXT_MAX = 32_768
TOKENIZER_FILE = "tokenizer.json"
RULES_FILE = "text.json"

Inputs = dict[str, npt.NDArray[np.int64]]


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Tokenised texts: for each input of the model (input_ids and perhaps token_type_ids), the numbers of each text."""

    columns: dict[str, list[list[int]]]

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.columns["input_ids"]), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """What makes a model's inputs of texts. May be used in one thread while the model runs in another."""

    # tokenizers.Tokenizer, set to cut at the limit; or a tokenizer of transformers that is written in Python.
    tokenizer: Any
    is_fast: bool
    tokens_per_text_max: int
    # Put before every text, as the folder's own configuration asks.
    prompt: str
    # Inputs of the model besides the attention mask, and what they are padded with.
    inputs: dict[str, int]

    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Tokens of each text, with special tokens, cut at tokens_per_text_max: exactly AutoTokenizer's."""
        if self.prompt:
            texts = [self.prompt + text for text in texts]
        if not self.is_fast:
            encoded = self.tokenizer(list(texts), truncation=True, max_length=self.tokens_per_text_max, padding=False)
            return Tokens(columns={name: encoded[name] for name in self.inputs})
        # What AutoTokenizer calls, less what it does for offsets and for callers that want them. Not under the GIL.
        encodings = self.tokenizer.encode_batch_fast(texts)
        columns = {"input_ids": [encoding.ids for encoding in encodings]}
        if "token_type_ids" in self.inputs:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        return Tokens(columns=columns)

    def pad(self, tokens: Tokens, rows: Sequence[int]) -> Inputs:
        """The model's inputs for the texts `rows`: int64 [rows, longest], with the attention mask.

        The padding is always on the right, even where the tokenizer would put it on the left (for the sake of
        generating on from the end): so a text's positions, and its vector, don't depend on what it is padded against.
        """
        ids = tokens.columns["input_ids"]
        lengths = np.fromiter((len(ids[row]) for row in rows), dtype=np.int64, count=len(rows))
        within = np.arange(lengths.max()) < lengths[:, None]
        arrays = {}
        for name, filler in self.inputs.items():
            arrays[name] = np.full(within.shape, filler)
            column = tokens.columns[name]
            arrays[name][within] = np.fromiter(chain.from_iterable(column[row] for row in rows), dtype=np.int64)
        return arrays | {"attention_mask": within.astype(np.int64)}

    def save(self, folder: Path) -> None:
        """Write what `read` needs. Raises ModelFolderError for a tokenizer that is written in Python."""
        if not self.is_fast:
            raise ModelFolderError(
                "this model's tokenizer is written in Python and has no tokenizer.json: run it with engine torch"
            )
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        rules = {"tokens_per_text_max": self.tokens_per_text_max, "prompt": self.prompt, "inputs": self.inputs}
        (folder / RULES_FILE).write_text(json.dumps(rules), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "TextInput":
        """What `save` wrote. Without torch and transformers."""
        from tokenizers import Tokenizer  # noqa: PLC0415  (the agent imports engines' neighbours, and has no use for it)

        rules = read_object(folder / RULES_FILE)
        return cls(tokenizer=Tokenizer.from_file(str(folder / TOKENIZER_FILE)), is_fast=True, **rules)


def load_tokenizer(folder: Path, root: Path, config: Any) -> tuple[Any, int]:
    """The tokenizer of transformers in `folder`, set to cut at the limit, and the limit in tokens.

    `root` is the model's folder, `config` the transformer's configuration. Imports transformers, and torch with it.
    """
    from multigpu_worker.engines.common.offline import transformers  # noqa: PLC0415  (takes seconds)

    settings = transformer_settings(folder)
    limit = settings.get("max_seq_length")
    options = {} if limit is None else {"model_max_length": limit}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **options
    )
    positions = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, TOKENS_PER_TEXT_MAX]
    if limit is None and positions is not None and positions > 0:
        limits.append(positions)
    tokens_per_text_max = int(min(limits))
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.enable_truncation(tokens_per_text_max, direction=tokenizer.truncation_side)
        if settings.get("do_lower_case"):
            _lower_case(backend)
    elif settings.get("do_lower_case"):
        raise ModelFolderError(f"{root} asks for do_lower_case, and its tokenizer has no tokenizer.json for that")
    return tokenizer, tokens_per_text_max


def _lower_case(backend: Any) -> None:
    """Lower case before all else, as sentence-transformers does; twice does no harm."""
    from tokenizers import normalizers  # noqa: PLC0415 (rarely needed)

    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


def transformer_settings(folder: Path) -> dict[str, Any]:
    """What sentence-transformers adds: the length to cut at, lower case. The file was once named after the model."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = read_object(path)
        task = settings.get("transformer_task", "feature-extraction")
        if task != "feature-extraction":
            raise ModelFolderError(f"{path} has transformer_task {task!r}: only feature-extraction is supported")
        return settings
    return {}


def default_prompt(folder: Path) -> str:
    """What the model in `folder` puts before every text; empty for most."""
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return ""
    config = read_object(path)
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    try:
        return str(config["prompts"][name])
    except (KeyError, TypeError) as error:
        raise ModelFolderError(f"{path} has default_prompt_name {name!r} and no such prompt: add it") from error

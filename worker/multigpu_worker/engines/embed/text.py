"""From texts to the inputs of a text model, the same for every back end: prompt, tokens, limit, padding.

transformers loads a folder's tokenizer and imports torch. For back ends without torch, `save` writes the tokenizer and
its limit in the form of the tokenizers library, and `read` needs only that. Importing this module is cheap.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.repository.folders import ModelFolderError, read_object

if TYPE_CHECKING:
    from tokenizers import Encoding

# Tokens of the longest text, if neither the tokenizer nor the model names a limit.
TOKENS_PER_TEXT_MAX = 32_768
# A text is cut at this many characters per token of the limit: the tokenizer truncates only what it has processed.
CHARACTERS_PER_TOKEN_MAX = 64
TOKENIZER_FILE = "tokenizer.json"
RULES_FILE = "text.json"
# The task of a transformer that gives token vectors.
FEATURES = "feature-extraction"

Inputs = dict[str, npt.NDArray[np.int64]]
# A text, or the ids of its tokens without special tokens.
Text = str | list[int]


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Tokenised texts: by input of the model (input_ids and perhaps token_type_ids), the numbers of each text."""

    columns: dict[str, list[list[int]]]

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.columns["input_ids"]), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """Makes a model's inputs from texts. One thread may use it while another runs the model."""

    # tokenizers.Tokenizer, set to truncate at the limit; or a tokenizer of transformers written in Python.
    tokenizer: Any
    is_fast: bool
    tokens_per_text_max: int
    # Put before every text, as the model's configuration asks.
    prompt: str
    # Inputs of the model besides the attention mask, with their padding values.
    inputs: dict[str, int]

    def tokenise(self, texts: Sequence[Text]) -> Tokens:
        """The tokens that AutoTokenizer gives, with special tokens, truncated at tokens_per_text_max.

        Token ids must have passed check_ids. They give the tokens of the text that has these ids.
        """
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) == len(texts):
            return self._of_strings(strings)
        of_ids = self._of_ids([text for text in texts if not isinstance(text, str)])
        if not strings:
            return of_ids
        of_strings = self._of_strings(strings)
        columns = {}
        for name in self.inputs:
            strings_left, ids_left = iter(of_strings.columns[name]), iter(of_ids.columns[name])
            columns[name] = [next(strings_left if isinstance(text, str) else ids_left) for text in texts]
        return Tokens(columns=columns)

    def check_ids(self, texts: Sequence[list[int]]) -> None:
        """Raises BadInputError if the vocabulary lacks one of these token ids, or the model has a prompt."""
        if self.prompt and texts:
            raise BadInputError(
                f"the model puts the prompt {self.prompt!r} before every text, and tokens of a text alone may differ "
                "from its tokens after a prompt: send texts, not tokens"
            )
        self._check_vocabulary(texts)

    def _check_vocabulary(self, texts: Sequence[list[int]]) -> None:
        for row, ids in enumerate(texts):
            if not self._vocabulary.issuperset(ids):
                place, unknown = next((i, number) for i, number in enumerate(ids) if number not in self._vocabulary)
                raise BadInputError(
                    f"tokens[{row}].ids[{place}] is {unknown}, and the model's vocabulary of {len(self._vocabulary)} "
                    "tokens has no such id: send ids of the model's own tokenizer, or texts"
                )

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        """The ids of all tokens."""
        return frozenset(self.tokenizer.get_vocab().values())

    @cached_property
    def _by_id(self) -> Any:
        """A tokenizer with the same truncation and special tokens, for which a token's text is its id in decimal.

        The tokenizers library adds special tokens only to what it has tokenised itself.
        """
        from tokenizers import Tokenizer, models  # noqa: PLC0415  (the agent imports this module and does not need it)

        by_id = Tokenizer(models.WordLevel({str(number): number for number in self._vocabulary}))
        if self.tokenizer.post_processor is not None:
            by_id.post_processor = self.tokenizer.post_processor
        by_id.enable_truncation(**self.tokenizer.truncation)
        return by_id

    def encode(self, text: str, *, special_tokens: bool) -> "Encoding":
        """The tokens of a text after the prompt, with places in it, not truncated. BadInputError: the tokenizer is
        written in Python.
        """
        if not self.is_fast:
            raise BadInputError("this model's tokenizer is written in Python, which has no places of tokens in a text")
        found: Encoding = self._untruncated.encode(self.prompt + text, add_special_tokens=special_tokens)
        return found

    def decode(self, texts: Sequence[list[int]], *, special_tokens: bool) -> list[str]:
        """The text of each list of token ids. BadInputError: the vocabulary lacks an id."""
        self._check_vocabulary(texts)
        return [self.tokenizer.decode(ids, skip_special_tokens=not special_tokens) for ids in texts]

    @cached_property
    def _untruncated(self) -> Any:
        """A copy of the tokenizer: another thread may use `tokenizer`, and its truncation is a setting."""
        from tokenizers import Tokenizer  # noqa: PLC0415  (the agent imports this module and does not need it)

        untruncated = Tokenizer.from_str(self.tokenizer.to_str())
        untruncated.no_truncation()
        return untruncated

    def _of_ids(self, texts: Sequence[list[int]]) -> Tokens:
        if not self.is_fast:
            options = {"truncation": True, "max_length": self.tokens_per_text_max, "padding": False}
            rows = [self.tokenizer.prepare_for_model(ids, **options) for ids in texts]
            return Tokens(columns={name: [row[name] for row in rows] for name in self.inputs})
        count, left = self.tokens_per_text_max, self.tokenizer.truncation["direction"] == "left"
        texts = [ids[-count:] if left else ids[:count] for ids in texts]
        return self._encoded(self._by_id, [list(map(str, ids)) for ids in texts])

    def _of_strings(self, texts: Sequence[str]) -> Tokens:
        if self.prompt:
            texts = [self.prompt + text for text in texts]
        texts = self._cut(texts)
        if not self.is_fast:
            encoded = self.tokenizer(list(texts), truncation=True, max_length=self.tokens_per_text_max, padding=False)
            return Tokens(columns={name: encoded[name] for name in self.inputs})
        return self._encoded(self.tokenizer, texts)

    def tokenise_pairs(self, query: str, documents: Sequence[str]) -> Tokens:
        """The tokens that AutoTokenizer gives for pairs of the query and each document, the longer part truncated."""
        (query,), documents = self._cut([query]), self._cut(documents)
        if self.is_fast:
            return self._encoded(self.tokenizer, [(query, document) for document in documents])
        options = {"truncation": "longest_first", "max_length": self.tokens_per_text_max, "padding": False}
        encoded = self.tokenizer([query] * len(documents), documents, **options)
        return Tokens(columns={name: encoded[name] for name in self.inputs})

    def _cut(self, texts: Sequence[str]) -> list[str]:
        """The texts without characters that the tokenizer would process and then drop."""
        characters = CHARACTERS_PER_TOKEN_MAX * self.tokens_per_text_max
        side = self.tokenizer.truncation["direction"] if self.is_fast else self.tokenizer.truncation_side
        return [text[-characters:] if side == "left" else text[:characters] for text in texts]

    def _encoded(self, tokenizer: Any, texts: Sequence[Any]) -> Tokens:
        """Tokens of texts, of pairs of texts, or of lists of words for _by_id, by the tokenizers library."""
        # Releases the GIL, and skips what AutoTokenizer does for offsets.
        encodings = tokenizer.encode_batch_fast(texts, is_pretokenized=tokenizer is not self.tokenizer)
        columns = {"input_ids": [encoding.ids for encoding in encodings]}
        if "token_type_ids" in self.inputs:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        return Tokens(columns=columns)

    def pad(self, tokens: Tokens, rows: Sequence[int]) -> Inputs:
        """The model's inputs for the texts `rows`: int64 [rows, longest], with the attention mask.

        Padding is always on the right, also if the tokenizer pads on the left (for generation): so a text's positions,
        and its vector, do not depend on the other texts.
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
        """Write the files for `read`. Raises ModelFolderError for a tokenizer that is written in Python."""
        if not self.is_fast:
            raise ModelFolderError(
                "this model's tokenizer is written in Python and has no tokenizer.json: run it with engine torch"
            )
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        rules = {"tokens_per_text_max": self.tokens_per_text_max, "prompt": self.prompt, "inputs": self.inputs}
        (folder / RULES_FILE).write_text(json.dumps(rules), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "TextInput":
        """Read the files of `save`, without torch and transformers."""
        from tokenizers import Tokenizer  # noqa: PLC0415  (the agent imports this module and does not need it)

        rules = read_object(folder / RULES_FILE)
        return cls(tokenizer=Tokenizer.from_file(str(folder / TOKENIZER_FILE)), is_fast=True, **rules)


def load_text_input(
    folder: Path, root: Path, config: Any, *, prompt: str, uses_token_type_ids: bool, task: str = FEATURES
) -> tuple[TextInput, int | None]:
    """The tokenizer in `folder`, which truncates at the model's limit, and the id of its padding token.

    `root`: the model's folder. `config`: the transformer's configuration. `uses_token_type_ids`: it has that
    input. `task`: the transformer's task in sentence-transformers' settings.
    """
    from multigpu_worker.engines.common.pretrained import LOCAL, transformers  # noqa: PLC0415  (takes seconds)

    settings = transformer_settings(folder, task)
    limit = settings.get("max_seq_length")
    options = LOCAL if limit is None else LOCAL | {"model_max_length": limit}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
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
    fillers = {"input_ids": tokenizer.pad_token_id or 0}
    if uses_token_type_ids and "token_type_ids" in tokenizer.model_input_names:
        fillers["token_type_ids"] = tokenizer.pad_token_type_id
    text = TextInput(
        tokenizer=tokenizer.backend_tokenizer if tokenizer.is_fast else tokenizer,
        is_fast=tokenizer.is_fast,
        tokens_per_text_max=tokens_per_text_max,
        prompt=prompt,
        inputs=fillers,
    )
    return text, tokenizer.pad_token_id


def _lower_case(backend: Any) -> None:
    """Convert to lower case first, as sentence-transformers does."""
    from tokenizers import normalizers  # noqa: PLC0415 (rarely needed)

    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


def transformer_settings(folder: Path, wanted: str = FEATURES) -> dict[str, Any]:
    """sentence-transformers' settings of the transformer. The file was once named after the architecture."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = read_object(path)
        task = settings.get("transformer_task", wanted)
        if task != wanted:
            raise ModelFolderError(f"{path} has transformer_task {task!r}: only {wanted} is supported")
        return settings
    return {}


def default_prompt(folder: Path) -> str:
    """The text that the model puts before every text; usually empty."""
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

"""The protocol of back ends that compute vectors for the embed engine, what they are given, and how they are loaded."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.backends import load_variant
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.common.versions import version_of
from multigpu_worker.engines.embed.text import Inputs, TextInput, Tokens
from multigpu_worker.repository.files import file_hash
from multigpu_worker.repository.model import ModelSpec

BACKENDS = {
    "torch": "multigpu_worker.engines.embed.torch_backend",
    "onnx": "multigpu_worker.engines.embed.onnx_backend",
    "tensorrt": "multigpu_worker.engines.embed.tensorrt_backend",
}

Vectors = npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Texts of similar length that go through the model together."""

    inputs: Inputs
    # For each text, its place among all texts of the batch, and the index of its item.
    places: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    # The model computes the padding too.
    pads: bool = True

    @property
    def tokens(self) -> int:
        """The number of tokens that the model computes."""
        return self.inputs["input_ids"].size if self.pads else int(self.inputs["attention_mask"].sum())

    def select(self, rows: "slice | npt.NDArray[np.bool_]") -> "MicroBatch":
        """Some of the texts, without padding that only the others needed."""
        used = self.inputs["attention_mask"][rows].any(axis=0)
        inputs = {name: array[rows][:, used] for name, array in self.inputs.items()}
        return MicroBatch(inputs=inputs, places=self.places[rows], owners=self.owners[rows], pads=self.pads)

    def halves(self) -> "tuple[MicroBatch, MicroBatch]":
        middle = len(self.places) // 2
        return self.select(slice(middle)), self.select(slice(middle, None))


class EmbedBackend(Protocol):
    """A loaded model. One thread may use `text` while another runs `embed`."""

    @property
    def text(self) -> TextInput: ...

    @property
    def dimension(self) -> int:
        """Components of a vector."""

    @property
    def identity(self) -> str:
        """A hash of everything that affects a vector, except the model's files and the text.

        It may change while the model serves. Vectors of a batch that was prepared before a change are not cached.
        """

    @property
    def pads(self) -> bool:
        """Whether the forward pass computes padding. If so, `tokens_max` counts padding too."""

    # Tokens in one forward pass. The engine lowers it when memory runs out.
    tokens_max: int

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension] of padded inputs, int64 [rows, width].

        MemoryError: host or device memory is full.
        """


@runtime_checkable
class AheadBackend(EmbedBackend, Protocol):
    """A back end that can start a micro-batch while the previous one runs on the device."""

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs, and return a function that waits for the vectors. Both may raise MemoryError."""


@runtime_checkable
class TokenBackend(EmbedBackend, Protocol):
    """A back end that can also compute the vectors of tokens."""

    def embed_tokens(self, inputs: Inputs) -> Vectors:
        """The transformer's vectors [rows, width, components] of padded inputs. Raises MemoryError."""


def cut(model: EmbedBackend, tokens: Tokens, owners: npt.NDArray[np.int64]) -> list[MicroBatch]:
    """Micro-batches of texts, longest first, so that a shortage of memory shows at once."""
    lengths = tokens.lengths()
    order = np.argsort(-lengths, kind="stable")
    totals = np.cumsum(lengths[order])
    micro_batches = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        if model.pads:
            stop = start + model.tokens_max // max(1, longest)
        else:
            stop = int(np.searchsorted(totals, totals[start] - longest + model.tokens_max, side="right"))
        places = order[start : max(stop, start + 1)]
        inputs = model.text.pad(tokens, places.tolist())
        micro_batches.append(MicroBatch(inputs=inputs, places=places, owners=owners[places], pads=model.pads))
        start += len(places)
    return micro_batches


def load_backend(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> tuple[EmbedBackend, dict[str, str]]:
    """Load a model, and return it with its facts. For the facts and the errors see common/backends.py."""
    backend: EmbedBackend
    backend, facts = load_variant(BACKENDS, spec, settings, variant)
    facts.setdefault("text", f"cut after {backend.text.tokens_per_text_max} tokens")
    return backend, facts


def identity_of(*parts: str, packages: tuple[str, ...], sources: tuple[str, ...]) -> str:
    """A back end's identity: the hash of `parts`, of package versions, and of the given source files of engines/."""
    here = Path(__file__).parents[1]
    lines = [*parts, *(f"{name} {version_of(name)}" for name in ("multigpu", "tokenizers", *packages))]
    lines += [file_hash(here / name) for name in ("embed/engine.py", "embed/backend.py", "embed/text.py", *sources)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

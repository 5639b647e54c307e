"""A classifier on torch: a Hugging Face folder of a model for sequence or image classification.

Texts and pictures differ in preprocessing and in the number that goes through at once. Probabilities are a softmax over
the classes, or a sigmoid of each logit for independent classes (`problem_type` "multi_label_classification", or a
single class).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from multigpu.v1 import classify_pb2
from torch import Tensor, nn

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common import torch_runtime
from multigpu_worker.engines.common.limits import Limit
from multigpu_worker.engines.common.placed import placement
from multigpu_worker.engines.common.pretrained import LOCAL, load_weights, loading, transformers
from multigpu_worker.engines.embed.text import TextInput, Tokens, load_text_input
from multigpu_worker.repository.folders import ModelFolderError, read_object
from multigpu_worker.repository.model import ModelSpec

# Padded tokens or pictures in one forward pass: enough for full speed, and short between two beats.
CPU_TOKENS_PER_THREAD, CUDA_TOKENS = 512, 16_384
CPU_PICTURES_PER_THREAD, CUDA_PICTURES = 8, 64
TEXT_SUFFIX, IMAGE_SUFFIX = "ForSequenceClassification", "ForImageClassification"


class Front(Protocol):
    """Makes a model's inputs from payloads. One thread may call `features` while another calls `collate`."""

    def features(self, payload: classify_pb2.ClassifyPayload) -> Any:
        """Preprocess one payload. Raises BadInputError."""

    def size(self, features: Any) -> int:
        """Its share of the model's budget."""

    def collate(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """The model's inputs for several payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    input: TextInput

    def features(self, payload: classify_pb2.ClassifyPayload) -> Tokens:
        return self.input.tokenise([classify_input.text(payload)])

    def size(self, features: Tokens) -> int:
        return int(features.lengths()[0])

    def collate(self, features: Sequence[Tokens]) -> dict[str, Tensor]:
        columns = {name: [tokens.columns[name][0] for tokens in features] for name in features[0].columns}
        arrays = self.input.pad(Tokens(columns=columns), range(len(features)))
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    processor: Any
    dtype: torch.dtype

    def features(self, payload: classify_pb2.ClassifyPayload) -> Tensor:
        pixels: Tensor = self.processor(classify_input.picture(payload), return_tensors="pt")["pixel_values"][0]
        return pixels

    def size(self, features: Tensor) -> int:
        del features
        return 1

    def collate(self, features: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack(list(features)).to(self.dtype)}


@dataclass(slots=True, kw_only=True)
class Classifier:
    front: Front
    model: nn.Module
    device: torch.device
    names: tuple[str, ...]
    sigmoid: bool
    tf32: bool
    threads: int
    # Sum of sizes, with padding, in one forward pass. The engine adapts it by `limit`.
    budget: int
    limit: Limit = field(default_factory=Limit)

    @torch.inference_mode()
    def probabilities(self, features: Sequence[Any]) -> npt.NDArray[np.float32]:
        """The probabilities of all classes, [n, classes]. Raises MemoryError, on any device."""
        torch_runtime.bind(self.threads, tf32=self.tf32)
        with torch_runtime.memory_errors():
            inputs = {name: tensor.to(self.device) for name, tensor in self.front.collate(features).items()}
            logits: Tensor = self.model(**inputs).logits.float()
            scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
            array: npt.NDArray[np.float32] = scores.cpu().numpy()
        return array


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> Classifier:
    """Load a model. Raises ModelFolderError, MemoryError; ImportError if a package is missing."""
    family = _family(spec)
    with loading(spec.folder, f"AutoModel{family}"):
        return _load(spec, settings, precision, family)


def _family(spec: ModelSpec) -> str:
    architectures = read_object(spec.folder / "config.json").get("architectures") or []
    for family in (TEXT_SUFFIX, IMAGE_SUFFIX):
        if any(str(name).endswith(family) for name in architectures):
            return family
    raise ModelFolderError(
        f"{spec.folder} holds {', '.join(map(str, architectures)) or 'no known architecture'}: the kind classify takes "
        f"models …{TEXT_SUFFIX} and …{IMAGE_SUFFIX}, or an engine of your own in model.toml"
    )


def _load(spec: ModelSpec, settings: EngineSettings, precision: str, family: str) -> Classifier:
    dtype = torch_runtime.dtype_of(precision)
    config = transformers.AutoConfig.from_pretrained(spec.folder, **LOCAL)
    kind = getattr(transformers, f"AutoModel{family}")
    placed = placement(spec, settings, precision)
    model = load_weights(kind, spec.folder, pickled=bool(spec.allow_pickle), config=config, dtype=dtype, **placed)
    device = torch.device(settings.device)
    on_cpu = device.type == "cpu"
    threads = settings.threads or torch.get_num_threads()
    if family == TEXT_SUFFIX:
        front: Front = _texts(spec, config, model)
        budget = CPU_TOKENS_PER_THREAD * threads if on_cpu else CUDA_TOKENS
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(spec.folder, **LOCAL)  # type: ignore[no-untyped-call]
        front = Pictures(processor=processor, dtype=dtype)
        budget = CPU_PICTURES_PER_THREAD * threads if on_cpu else CUDA_PICTURES
    return Classifier(
        front=front,
        model=model.eval() if placed else model.eval().to(device),
        device=device,
        names=tuple(str(config.id2label.get(i, "")) for i in range(config.num_labels)),
        sigmoid=config.num_labels == 1 or getattr(config, "problem_type", None) == "multi_label_classification",
        tf32=precision == "tf32",
        threads=settings.threads,
        budget=budget,
    )


def _texts(spec: ModelSpec, config: Any, model: Any) -> Texts:
    takes_types = getattr(config, "type_vocab_size", 0) > 0
    text_input, pad_token_id = load_text_input(
        spec.folder, spec.folder, config, prompt="", uses_token_type_ids=takes_types
    )
    if config.pad_token_id is None:
        # Models that classify by the last token find it by the padding.
        model.config.pad_token_id = pad_token_id
    return Texts(input=text_input)

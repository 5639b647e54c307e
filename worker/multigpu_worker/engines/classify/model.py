"""One classifier in memory: a Hugging Face folder of a model for sequence or image classification, run by torch.

Texts and pictures differ in what is made of them before the model sees them, and in how much of it goes through at
once; after that both are logits. Probabilities are a softmax over the classes, or where a model was trained to give
each class a yes or no of its own (`problem_type` "multi_label_classification", or a single class) a sigmoid of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from multigpu.repository.model import ModelSpec
from multigpu.v1 import classify_pb2
from torch import Tensor, nn

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common import torch_runtime
from multigpu_worker.engines.common.memory import Limit
from multigpu_worker.engines.common.offline import transformers
from multigpu_worker.engines.embed.text import TextInput, Tokens, load_tokenizer
from multigpu_worker.models.folders import ModelFolderError, read_object

# Padded tokens, or pictures, that go through a model at once: enough to fill it, and not long between two beats.
CPU_TOKENS_PER_THREAD, CUDA_TOKENS = 512, 16_384
CPU_PICTURES_PER_THREAD, CUDA_PICTURES = 8, 64
TEXT_SUFFIX, IMAGE_SUFFIX = "ForSequenceClassification", "ForImageClassification"


class Front(Protocol):
    """From payloads to a model's inputs. `features` may be used in one thread while `collate` is in another."""

    def features(self, payload: classify_pb2.ClassifyPayload) -> Any:
        """What the model is to see of one payload. Raises BadInputError."""

    def size(self, features: Any) -> int:
        """How much of the model's budget it takes."""

    def collate(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """The model's inputs for several."""


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
    # Sum of sizes, with padding, that goes through at once. The engine lowers it when memory runs out, by `limit`.
    budget: int
    limit: Limit = field(default_factory=Limit)

    @torch.inference_mode()
    def probabilities(self, features: Sequence[Any]) -> npt.NDArray[np.float32]:
        """Of each class for each, [n, classes]. Raises MemoryError, on any device, if memory runs out."""
        torch_runtime.bind(self.threads, tf32=self.tf32)
        with torch_runtime.memory_errors():
            inputs = {name: tensor.to(self.device) for name, tensor in self.front.collate(features).items()}
            logits: Tensor = self.model(**inputs).logits.float()
            scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
            array: npt.NDArray[np.float32] = scores.cpu().numpy()
        return array


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> Classifier:
    """Load a model. Raises ModelFolderError, with the cause and the remedy; MemoryError."""
    family = _family(spec)
    try:
        with torch_runtime.memory_errors():
            return _load(spec, settings, precision, family)
    except (ModelFolderError, MemoryError, ImportError):
        raise
    except Exception as error:
        raise ModelFolderError(
            f"{spec.folder} can't be loaded: {type(error).__name__}: {error}. Try it with "
            f"transformers.AutoModel{family}.from_pretrained, and copy the model folder again if that fails too"
        ) from error


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
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(spec.folder, **options)
    # Pickles are rejected, unless they are allowed by name, before this: by who looked at the folder.
    safe = not spec.allow_pickle
    model, report = getattr(transformers, f"AutoModel{family}").from_pretrained(
        spec.folder, config=config, dtype=dtype, use_safetensors=safe, output_loading_info=True, **options
    )
    # transformers would fill them with random numbers and go on.
    wrong = [str(key) for key in [*sorted(report["missing_keys"]), *report["mismatched_keys"]]]
    if wrong:
        names = ", ".join(wrong[:3])
        raise ModelFolderError(
            f"{spec.folder} has weights that don't fit its config.json ({names} …): copy the model folder again"
        )
    device = torch.device(settings.device)
    on_cpu = device.type == "cpu"
    threads = settings.threads or torch.get_num_threads()
    if family == TEXT_SUFFIX:
        front: Front = _texts(spec, config, model)
        budget = CPU_TOKENS_PER_THREAD * threads if on_cpu else CUDA_TOKENS
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(spec.folder, **options)  # type: ignore[no-untyped-call]
        front = Pictures(processor=processor, dtype=dtype)
        budget = CPU_PICTURES_PER_THREAD * threads if on_cpu else CUDA_PICTURES
    return Classifier(
        front=front,
        model=model.eval().to(device),
        device=device,
        names=tuple(str(config.id2label.get(i, "")) for i in range(config.num_labels)),
        sigmoid=config.num_labels == 1 or getattr(config, "problem_type", None) == "multi_label_classification",
        tf32=precision == "tf32",
        threads=settings.threads,
        budget=budget,
    )


def _texts(spec: ModelSpec, config: Any, model: Any) -> Texts:
    tokenizer, limit = load_tokenizer(spec.folder, spec.folder, config)
    fillers = {"input_ids": tokenizer.pad_token_id or 0}
    if "token_type_ids" in tokenizer.model_input_names and getattr(config, "type_vocab_size", 0) > 0:
        fillers["token_type_ids"] = tokenizer.pad_token_type_id
    if config.pad_token_id is None:
        # Models that read their answer off the last token look for the padding to find it.
        model.config.pad_token_id = tokenizer.pad_token_id
    text_input = TextInput(
        tokenizer=tokenizer.backend_tokenizer if tokenizer.is_fast else tokenizer,
        is_fast=tokenizer.is_fast,
        tokens_per_text_max=limit,
        prompt="",
        inputs=fillers,
    )
    return Texts(input=text_input)

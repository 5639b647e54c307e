"""A cross-encoder on torch: a Hugging Face folder of a model for sequence classification with one label.

The model reads the query and a document as one pair, so it computes each pair anew; its logit is the score.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import torch_runtime
from multigpu_worker.engines.common.limits import Limit
from multigpu_worker.engines.common.placed import placement
from multigpu_worker.engines.common.pretrained import LOCAL, load_weights, loading, transformers
from multigpu_worker.engines.embed.text import TextInput, Tokens, load_text_input
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

# Padded tokens in one forward pass: enough for full speed, and short between two beats.
CPU_TOKENS_PER_THREAD, CUDA_TOKENS = 512, 16_384


@dataclass(slots=True, kw_only=True)
class Reranker:
    """One thread may use `text` while another calls `logits`."""

    text: TextInput
    model: nn.Module
    device: torch.device
    tf32: bool
    threads: int
    # Padded tokens in one forward pass. The engine adapts it by `limit`.
    budget: int
    limit: Limit = field(default_factory=Limit)

    @torch.inference_mode()
    def logits(self, tokens: Tokens, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits [rows] of tokenised pairs. Raises MemoryError, on any device."""
        torch_runtime.bind(self.threads, tf32=self.tf32)
        with torch_runtime.memory_errors():
            arrays = self.text.pad(tokens, rows)
            inputs = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
            found: Tensor = self.model(**inputs).logits.float()[:, 0]
            array: npt.NDArray[np.float32] = found.cpu().numpy()
        return array


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> Reranker:
    """Load a model. Raises ModelFolderError, MemoryError; ImportError if a package is missing."""
    with loading(spec.folder, "AutoModelForSequenceClassification"):
        config = transformers.AutoConfig.from_pretrained(spec.folder, **LOCAL)
        if config.num_labels != 1:
            raise ModelFolderError(
                f"{spec.folder} has {config.num_labels} labels in its config.json: the kind rerank takes models with "
                'one label; for the classes of a text, say kind = "classify" in model.toml'
            )
        kind = transformers.AutoModelForSequenceClassification
        dtype = torch_runtime.dtype_of(precision)
        placed = placement(spec, settings, precision)
        model = load_weights(kind, spec.folder, pickled=bool(spec.allow_pickle), config=config, dtype=dtype, **placed)
        text, pad_token_id = load_text_input(
            spec.folder,
            spec.folder,
            config,
            prompt="",
            uses_token_type_ids=getattr(config, "type_vocab_size", 0) > 0,
            task="sequence-classification",
        )
        if config.pad_token_id is None:
            # Models that classify by the last token find it by the padding.
            model.config.pad_token_id = pad_token_id
        device = torch.device(settings.device)
        threads = settings.threads or torch.get_num_threads()
        return Reranker(
            text=text,
            model=model.eval() if placed else model.eval().to(device),
            device=device,
            tf32=precision == "tf32",
            threads=settings.threads,
            budget=CPU_TOKENS_PER_THREAD * threads if device.type == "cpu" else CUDA_TOKENS,
        )

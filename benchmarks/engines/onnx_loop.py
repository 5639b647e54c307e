"""The best plain embedding loop that we know on a CPU: ONNX Runtime alone, with its default options, MiniLM at fp32.

It has an export of its own. Texts are sorted by length, and a batch holds texts of one length only, so nothing is
padded. The best size of a batch depends on the processor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_MAX = 256


def export(model: Path, path: Path) -> None:
    """Write transformer, mean pooling and normalisation of the model in a folder to the file `path`."""
    import torch
    from transformers import AutoModel

    class MeanPooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = AutoModel.from_pretrained(model, attn_implementation="sdpa")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            tokens = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(tokens.dtype)
            return torch.nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1))

    # Two tensors: the graph would take one for both inputs.
    ids, mask = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
    axes = {0: torch.export.Dim("batch", min=1, max=512), 1: torch.export.Dim("tokens", min=2, max=512)}
    torch.onnx.export(
        MeanPooled().eval(),
        (ids, mask),
        str(path),
        dynamo=True,
        input_names=["ids", "mask"],
        output_names=["vectors"],
        dynamic_shapes={"ids": axes, "mask": axes},
        external_data=False,
        verbose=False,
    )


def load(model: Path, path: Path, threads: int, batch: int) -> Callable[[list[str]], Any]:
    """A function from texts to vectors [texts, dimension]: the graph `path`, the tokenizer of the folder `model`."""
    import onnxruntime
    from transformers import AutoTokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tokenizer = AutoTokenizer.from_pretrained(model)

    def embed(texts: list[str]) -> Any:
        ids = tokenizer(texts, truncation=True, max_length=TOKENS_MAX)["input_ids"]
        order = sorted(range(len(texts)), key=lambda place: -len(ids[place]))
        vectors = np.empty((len(texts), 384), np.float32)
        first = 0
        while first < len(order):
            last = first + 1
            while last < min(len(order), first + batch) and len(ids[order[last]]) == len(ids[order[first]]):
                last += 1
            places = order[first:last]
            rows = np.array([ids[place] for place in places], np.int64)
            vectors[places] = session.run(None, {"ids": rows, "mask": np.ones_like(rows)})[0]
            first = last
        return vectors

    return embed

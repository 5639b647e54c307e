"""The steps after the transformer, as the model's folder configures them: pooling, dense layers, normalisation.

They compute what sentence-transformers computes, in float32 at any precision of the transformer. An option that is not
supported is an error: a vector that is only nearly right is worse than none.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from multigpu_worker.repository.folders import ModelFolderError, ModelLayout, read_object

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# The flags of the older configuration format, in the order of the concatenated vectors.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Makes one vector of a text's token vectors: the concatenation of one vector per mode."""

    modes: tuple[str, ...]

    def __call__(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Vectors [rows, width * modes] of tokens [rows, length, width] where the mask [rows, length] is 1."""
        vectors = [self._pool(mode, tokens, mask) for mode in self.modes]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)

    @staticmethod
    def _pool(mode: str, tokens: Tensor, mask: Tensor) -> Tensor:
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        if mode == "cls":
            return tokens[rows, mask.argmax(dim=1)]
        if mode == "lasttoken":
            return tokens[rows, mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)]
        if mode == "max":
            return tokens.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)
        # The other modes are weighted sums. The weights of "weightedmean" are positions, counted from 1.
        weights = (mask.cumsum(dim=1) * mask if mode == "weightedmean" else mask).to(tokens.dtype)
        total = (tokens * weights.unsqueeze(-1)).sum(dim=1)
        size = weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
        return total / (size.sqrt() if mode == "mean_sqrt_len_tokens" else size)


class Normalize(nn.Module):
    """Scales vectors to unit length."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, p=2, dim=-1)


class Dense(nn.Module):
    """A linear layer and an activation, perhaps with a residual connection."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = read_object(folder / "config.json")
        inputs, outputs = int(config["in_features"]), int(config["out_features"])
        for key in ("module_input_name", "module_output_name"):
            if config.get(key, "sentence_embedding") not in {"sentence_embedding", None}:
                raise ModelFolderError(f"{folder} has {key} {config[key]!r}: only sentence_embedding is supported")
        self.linear = nn.Linear(inputs, outputs, bias=bool(config.get("bias", True)))
        self.activation = _activation(folder, config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        self.use_residual = bool(config.get("use_residual", False))
        if self.use_residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)
        self.load_state_dict(load_file(folder / "model.safetensors"))
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.linear(x))
        if not self.use_residual:
            return y
        return y + (self.residual(x) if hasattr(self, "residual") else x)


def _activation(folder: Path, name: str) -> nn.Module:
    """The activation that a Dense step's configuration names. Only names of torch.nn: nothing is imported."""
    package, _, last = name.rpartition(".")
    kind = getattr(nn, last, None)
    if not package.startswith("torch.nn") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelFolderError(f"{folder} has activation_function {name!r}: only those of torch.nn are supported")
    activation: nn.Module = kind()
    return activation


def build_steps(layout: ModelLayout, prompt: str) -> tuple[Pooling, nn.Sequential]:
    """The pooling and the steps after it, in float32. `prompt`: the text that the model puts before every text."""
    if layout.steps is None:
        return Pooling(("mean",)), nn.Sequential()
    if [kind for kind, _ in layout.steps].count("Pooling") != 1 or layout.steps[0][0] != "Pooling":
        raise ModelFolderError(
            f"{layout.transformer} must have one Pooling right after its Transformer in modules.json"
        )
    steps = [Dense(path) if kind == "Dense" else Normalize() for kind, path in layout.steps[1:]]
    return _read_pooling(layout.steps[0][1] / "config.json", prompt), nn.Sequential(*steps).eval()


def _read_pooling(path: Path, prompt: str) -> Pooling:
    config = read_object(path)
    named = config.get("pooling_mode", [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)] or "mean")
    modes = (named,) if isinstance(named, str) else tuple(named)
    unknown = [key for key in config if key.startswith("pooling_mode_") and key not in POOLING_FLAGS and config[key]]
    unknown += [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        raise ModelFolderError(f"{path} asks for pooling {unknown[0]!r}: supported are {', '.join(POOLING_MODES)}")
    if prompt and not config.get("include_prompt", True):
        raise ModelFolderError(f"{path} leaves the prompt out of the pooling: that is not supported")
    return Pooling(modes)

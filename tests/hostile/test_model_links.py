"""Links in model folders: what leaves the repository is rejected, whatever reads it later; links inside it work."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.targets.repository import EMPTY, GOOD, Worker, gguf, language_model, put, put_good

SENTENCES = language_model() | {
    "modules.json": b'[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": b"{}",
    "tokenizer.json": b"{}",
}
VERSIONS = {f"{version}/{name}": content for version in (1, 2) for name, content in language_model().items()}
FILES: dict[str, tuple[dict[str, bytes], str]] = {
    "chat template": (language_model(), "additional_chat_templates/x.jinja"),
    "pooling": (SENTENCES, "1_Pooling/config.json"),
    "tokenizer": (SENTENCES, "tokenizer.json"),
    "vocabulary": (language_model(), "merges.bpe"),
    "settings": (language_model(), "model.toml"),
    "settings of versions": (VERSIONS, "model.toml"),
    "chat template of a GGUF file": ({"m.gguf": gguf()}, "chat_template.jinja"),
    "external data": ({"model.onnx": b""}, "weights.data"),
    "hidden external data": ({"model.onnx": b""}, ".weights"),
    "weights": ({"config.json": language_model()["config.json"]}, "model.safetensors"),
    "gate": (language_model() | {"model.toml": b"[gate]\nheld_out = 'x/held_out.jsonl'"}, "x/held_out.jsonl"),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the repository, with a file that can be read as anything."""
    put(tmp_path / "outside", {"secret": b"", "additional_chat_templates/x.jinja": b"secret"})
    (tmp_path / "outside/weights").write_bytes(EMPTY)
    return tmp_path / "outside"


def rejected(worker: Worker, root: Path) -> str:
    """The error of the folder "bad". The other folder is served."""
    put_good(root)
    names, errors = worker.report(root)
    assert GOOD in names
    assert "bad" not in names
    return errors["bad"]


@pytest.mark.parametrize(("files", "link"), FILES.values(), ids=FILES.keys())
def test_a_link_out_of_the_repository_hides_its_folder(
    tmp_path: Path, worker: Worker, outside: Path, files: dict[str, bytes], link: str
) -> None:
    root = tmp_path / "models"
    put(root / "bad", files)
    at = root / "bad" / link
    at.unlink(missing_ok=True)
    at.parent.mkdir(exist_ok=True)
    at.symlink_to(outside / ("weights" if link.endswith(".safetensors") else "secret"))
    assert f"{at} is a link out of the repository" in rejected(worker, root)


def folder_outside(root: Path, outside: Path) -> None:
    (root / "bad/additional_chat_templates").symlink_to(outside / "additional_chat_templates")


def folder_inside_with_a_link_out(root: Path, outside: Path) -> None:
    put(root / "other", {"x/notes": b""})
    (root / "other/x/x.jinja").symlink_to(outside / "secret")
    (root / "bad/additional_chat_templates").symlink_to("../other/x")


@pytest.mark.parametrize("harm", [folder_outside, folder_inside_with_a_link_out])
def test_a_linked_folder_hides_the_folder_of_its_model(
    tmp_path: Path, worker: Worker, outside: Path, harm: Callable[[Path, Path], None]
) -> None:
    root = tmp_path / "models"
    put(root / "bad", language_model())
    harm(root, outside)
    assert "is a link" in rejected(worker, root)


def test_a_link_in_one_version_hides_only_that_version(tmp_path: Path, worker: Worker, outside: Path) -> None:
    root = tmp_path / "models"
    put(root / "bad", VERSIONS)
    (root / "bad/2/x.jinja").symlink_to(outside / "secret")
    names, errors = worker.report(root)
    assert {"bad", "bad:1"} <= names
    assert "is a link out of the repository" in errors["bad:2"]


def test_links_inside_the_repository_are_followed(tmp_path: Path, worker: Worker) -> None:
    put(tmp_path / "one", language_model() | {"additional_chat_templates/x.jinja": b""})
    put(tmp_path / "two", {"config.json": language_model()["config.json"], "additional_chat_templates/y": b""})
    (tmp_path / "two/model.safetensors").symlink_to("../one/model.safetensors")
    (tmp_path / "two/additional_chat_templates/x.jinja").symlink_to("../../one/additional_chat_templates/x.jinja")
    names, errors = worker.report(tmp_path)
    assert {"one", "two"} <= names, errors


@pytest.mark.parametrize(
    ("model", "part"), [(language_model(), ""), (language_model(), "0_Transformer/"), ({"m.gguf": gguf()}, "")]
)
def test_a_tokenizer_outside_the_folder_hides_it(
    tmp_path: Path, worker: Worker, model: dict[str, bytes], part: str
) -> None:
    """transformers opens the path, with which it would look for the tokenizer of its version."""
    root = tmp_path / "models"
    settings = json.dumps({"fast_tokenizer_files": ["tokenizer.1.0.json/../../../secret"]}).encode()
    files = model | {"tokenizer_config.json": settings, "tokenizer.1.0.json/x": b""}
    put(root / "bad", {part + name: content for name, content in files.items()})
    if part:
        put(root / "bad", {"modules.json": b'[{"type": "a.Transformer", "path": "0_Transformer"}]'})
    assert "tokenizer_config.json has a path in fast_tokenizer_files" in rejected(worker, root)


def test_a_tokenizer_in_the_folder_is_served(tmp_path: Path, worker: Worker) -> None:
    settings = {"fast_tokenizer_files": ["tokenizer.1.0.json", "tokenizer.json"], "chat_template": "a/b"}
    put(tmp_path / "one", language_model() | {"tokenizer_config.json": json.dumps(settings).encode()})
    assert "one" in worker.report(tmp_path)[0]

"""`mgpuctl models verify`: hashes are recorded and compared, and the rest of a model.toml stays as it is."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from multigpu.cli.models.verify import verify
from multigpu.repository.hashes import with_hashes
from multigpu.repository.model import ModelFolderError
from multigpu.repository.scan import scan

TOML = """# What serves the search page.
precision = "fp16"   # half is enough

[hashes]  # old ones
"gone" = "{sha}"

[batch]
tasks_max = 8  # as measured
""".format(sha="00" * 32)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(verify, [str(argument) for argument in arguments])


def put(root: Path) -> None:
    for folder in ("a", "acme/b/1", "acme/b/2"):
        (root / folder).mkdir(parents=True)
        (root / folder / "model.gguf").write_text(folder)


def test_recorded_then_compared(tmp_path: Path) -> None:
    put(tmp_path)
    (tmp_path / "a/model.toml").write_text(TOML)
    bare = run(tmp_path / "acme")
    assert bare.exit_code == 1
    assert "b:1: no hashes are recorded" in bare.stderr
    written = run(tmp_path, "--write")
    assert written.exit_code == 0, written.output
    text = (tmp_path / "a/model.toml").read_text()
    assert text.startswith(
        '# What serves the search page.\nprecision = "fp16"   # half is enough\n\n[hashes]\n"model.gguf" = '
    )
    assert "gone" not in text
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["model.gguf", "model.toml"]
    assert run(tmp_path).exit_code == 0
    assert list(scan(tmp_path).models["acme/b:2"].hashes) == ["model.gguf"]

    (tmp_path / "acme/b/1/model.gguf").write_text("exchanged")
    found = run(tmp_path, "--json")
    assert found.exit_code == 1
    verdicts = {verdict["model"]: verdict for verdict in json.loads(found.stdout)}
    assert {name: verdict["status"] for name, verdict in verdicts.items()} == {
        "a": "ok",
        "acme/b:1": "differs",
        "acme/b:2": "ok",
    }
    assert verdicts["acme/b:1"]["problems"][0]["file"] == "model.gguf"
    assert len(verdicts["a"]["digest"]) == 64


def test_a_broken_version_keeps_what_was_recorded_of_it(tmp_path: Path) -> None:
    put(tmp_path)
    assert run(tmp_path / "acme/b", "--write").exit_code == 0
    before = (tmp_path / "acme/b/model.toml").read_text()
    (tmp_path / "acme/b/1/model.gguf").unlink()
    again = run(tmp_path / "acme/b", "--write")
    assert again.exit_code == 1
    assert "b:1" in again.stderr
    assert (tmp_path / "acme/b/model.toml").read_text() == before


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    assert "there is no model" in run(tmp_path).stderr
    put(tmp_path)
    (tmp_path / "a/model.toml").write_text("precison = 'fp16'")
    (tmp_path / "notes").mkdir()
    found = run(tmp_path, "--json")
    assert found.exit_code == 1
    statuses = {verdict["model"]: verdict["status"] for verdict in json.loads(found.stdout)}
    assert statuses == {"a": "broken", "notes": "broken", "acme/b:1": "not recorded", "acme/b:2": "not recorded"}
    assert run(tmp_path / "nowhere").exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        'hashes = { "a" = "b" }',
        'labels = { a = """\n[hashes]\n""" }',
        '[hashes]\n"a" = """\n[x]\n"""',
    ],
)
def test_a_file_that_is_too_clever_is_left_alone(text: str) -> None:
    with pytest.raises(ModelFolderError, match=r"as a section .hashes. of its own"):
        with_hashes(text, {"a": "00"}, "model.toml")


def test_names_with_quotes() -> None:
    assert with_hashes("", {'a "b" \\': "00"}, "x") == '[hashes]\n"a \\"b\\" \\\\" = "00"\n'

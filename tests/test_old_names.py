"""Old variables: the tables of docs/configuration.md list exactly those that the deploy script and the workers read."""

import re
import subprocess
from pathlib import Path

import pytest
from multigpu.config.config import ConfigError, Loaded, WorkerConfig, load
from multigpu.config.old_names import WORKER_NAMES, worker_values

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = {"MGPU_VENV", "CUDA_VISIBLE_DEVICES", "BASH_SOURCE", "PYTHON", "WORKER_NAMES"}
READ_BY_WORKERS = {name for name, *_ in WORKER_NAMES}


def rows(heading: str, end: str) -> list[str]:
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    part = page.partition(heading)[2].partition(end)[0]
    return re.findall(r"^\| `([A-Z_0-9]+)` \|", part, re.MULTILINE)


def test_the_table_lists_what_the_script_reads() -> None:
    listed = rows("<!-- old names:", "<!-- end of old names -->")
    script = (ROOT / "tools/deploy/machine.sh").read_text("utf-8")
    read = set(re.findall(r"\$\{([A-Z][A-Z_0-9]+)", script)) | set(re.findall(r"\(truth ([A-Z][A-Z_0-9]+)", script))
    assert set(listed) == read - HIDDEN
    assert len(listed) == len(set(listed)) == 15


def test_the_table_lists_what_workers_read_and_the_script_passes_on() -> None:
    assert rows("<!-- workers' old names:", "<!-- end of workers' old names -->") == [name for name, *_ in WORKER_NAMES]
    read: set[str] = set()

    class Environment(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            read.add(name)
            return default

    worker_values(Environment())
    assert read == READ_BY_WORKERS
    script = (ROOT / "tools/deploy/machine.sh").read_text("utf-8")
    passed_on = script.partition("WORKER_NAMES=(")[2].partition(")")[0].split()
    assert passed_on == [name for name, *_ in WORKER_NAMES]
    assert len(READ_BY_WORKERS) == 13


def pass_on(env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    code = (
        'fail() { echo "$*" >&2; exit 1; }; . tools/deploy/machine.sh; library_env=; pass_on; printf %s "$library_env"'
    )
    command = ["bash", "-euc", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)


def test_the_script_passes_on_what_is_set() -> None:
    done = pass_on({"EMBEDDING_MODEL": "a model", "USE_TENSORRT": "true", "TENSORRT_CACHE_DIR": "", "OTHER": "x"})
    assert (done.returncode, done.stdout) == (0, "EMBEDDING_MODEL=a model\nUSE_TENSORRT=true\n"), done.stderr
    for value in ('a"b', "a'b", "a\\b", "a\nMGPU_TOKEN=b"):
        done = pass_on({"EMBEDDING_MODEL": value})
        assert done.returncode == 1
        assert "EMBEDDING_MODEL has a quote" in done.stderr


@pytest.fixture(autouse=True)
def _no_config_of_this_hosts_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def loaded(env: dict[str, str]) -> Loaded[WorkerConfig]:
    return load(WorkerConfig, env=env)


def changed(env: dict[str, str]) -> dict[str, object]:
    found = loaded(env)
    return {name: getattr(found.config, name) for name, source in found.sources.items() if source != "default"}


@pytest.mark.parametrize(
    ("env", "values"),
    [
        (
            {"EMBEDDING_MODEL": "sentence-transformers/all-MiniLM-L6-v2"},
            {"default_model": "sentence-transformers/all-MiniLM-L6-v2"},
        ),
        (
            {"EMBEDDING_BATCH_SIZE": "64", "USE_TENSORRT": "true", "TENSORRT_PRECISION": "int8"},
            {"batch_tasks_max": 64, "engine": "tensorrt", "precision": "int8"},
        ),
        ({"EMBEDDING_MODEL": "/srv/m/"}, {"default_model": "m", "models": ("m=/srv/m",)}),
        ({"EMBEDDING_MODEL": ""}, {}),
        ({"EMBEDDING_CACHE_ENABLED": "false", "EMBEDDING_CACHE_SIZE": "5"}, {"embedding_cache_entries": 0}),
        ({"EMBEDDING_CACHE_ENABLED": "true"}, {"embedding_cache_entries": 10_000}),
        (
            {"EMBEDDING_CACHE_PERSISTENCE": "/var/cache/v"},
            {"embedding_cache_entries": 10_000, "embedding_cache_file": "/var/cache/v"},
        ),
        ({"EMBEDDING_CACHE_TTL": "60"}, {"embedding_cache_entries": 10_000, "embedding_cache_ttl_s": 60.0}),
        ({"TENSORRT_CACHE_DIR": "/var/cache/t"}, {"artifacts_dir": "/var/cache/t"}),
        ({"USE_TENSORRT": "0"}, {"engine": "auto"}),
        ({"ENABLE_TENSOR_CORES": "false"}, {"precision": "fp32"}),
        ({"ENABLE_TENSOR_CORES": "true", "ENABLE_DYNAMIC_BATCHING": "TRUE"}, {}),
        (
            {"ENABLE_TENSOR_CORES": "no", "USE_TENSORRT": "yes", "TENSORRT_PRECISION": "auto"},
            {"engine": "tensorrt", "precision": "fp32"},
        ),
    ],
)
def test_settings_from_old_variables(env: dict[str, str], values: dict[str, object]) -> None:
    assert changed(env) == values
    assert loaded(env).remarks == ()


def test_new_names_take_precedence() -> None:
    env = {"EMBEDDING_BATCH_SIZE": "64", "EMBEDDING_CACHE_SIZE": "9", "MGPU_WORKER_EMBEDDING_CACHE_ENTRIES": "3"}
    found = load(WorkerConfig, env=env, flags={"batch_tasks_max": 7})
    assert (found.config.batch_tasks_max, found.config.embedding_cache_entries) == (7, 3)
    assert loaded(env).sources["batch_tasks_max"] == "EMBEDDING_BATCH_SIZE"


@pytest.mark.parametrize(
    ("env", "remark"),
    [
        ({"TENSORRT_PRECISION": "fp16"}, "TENSORRT_PRECISION has no effect without USE_TENSORRT=true"),
        ({"TENSORRT_INT8_CALIBRATION": "true"}, "[gate] in a model.toml"),
        ({"TENSORRT_INT8_CALIBRATION_CACHE": "/x"}, "calibrations are kept in artifacts_dir"),
        ({"ENABLE_DYNAMIC_BATCHING": "false"}, "set batch_tasks_max to 1"),
    ],
)
def test_a_variable_without_effect_gives_a_remark(env: dict[str, str], remark: str) -> None:
    assert changed(env) == {}
    (line,) = loaded(env).remarks
    assert remark in line


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"USE_TENSORRT": "maybe"}, "USE_TENSORRT: 'maybe' is not a yes or no"),
        ({"EMBEDDING_BATCH_SIZE": "many"}, "EMBEDDING_BATCH_SIZE: 'many' is not a whole number"),
        ({"EMBEDDING_BATCH_SIZE": "0"}, "EMBEDDING_BATCH_SIZE: 0 is too small"),
        ({"USE_TENSORRT": "true", "TENSORRT_PRECISION": "fp4"}, "TENSORRT_PRECISION: 'fp4' is none of"),
        (
            {"USE_TENSORRT": "true", "TENSORRT_PRECISION": "fp16", "ENABLE_TENSOR_CORES": "false"},
            "ENABLE_TENSOR_CORES=false and TENSORRT_PRECISION=fp16 contradict each other",
        ),
    ],
)
def test_contradictions_and_wrong_values_are_rejected(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(env)

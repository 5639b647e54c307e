"""The YAML of an energy benchmark: the earlier system's files as they are, and what is said of wrong ones."""

from pathlib import Path
from typing import Any

import pytest
from multigpu.errors import ConfigError
from multigpu_worker.energy.config import (
    BackendConfig,
    BenchmarkConfig,
    GenerateConfig,
    load,
    memory_bytes,
    unsupported,
)

SCENARIO = """
dataset_name: AIEnergyScore/text_generation
text_column_name: text
num_samples: {samples}
truncation: true
reasoning: false
input_shapes: {{batch_size: 1}}
generate_kwargs: {{max_new_tokens: {most}, min_new_tokens: {least}{more}}}
"""
REST = """
metrics: {type: codecarbon, enabled: true, project_name: p, output_dir: ./e, country_iso_code: USA, region: null}
reporter: {type: csv, output_file: ./results/r.csv}
output_dir: ./out
"""


def scenario(samples: int, most: int, least: int, more: str = "") -> str:
    text = SCENARIO.format(samples=samples, most=most, least=least, more=more)
    return "scenario:" + text.replace("\n", "\n  ") + "\n"


def backend(text: str) -> str:
    return f"backend: {{{text}}}\n"


VLLM = "type: vllm, device: cuda, device_ids: [0], model: openai/gpt-oss-120b, task: text-generation"
VLLM_URL = f'{VLLM}, endpoint: "http://localhost:8000/v1"'
TORCH = "type: pytorch, device: cuda, torch_dtype: auto, device_map: auto"
LLAMA = f"{TORCH}, model: meta-llama/Llama-2-70b-hf, device_ids: [0, 1, 2, 3]"
# The keys of each file in configs/ of the earlier system.
FILES = {
    "backend/pytorch": "type: pytorch\ndevice: cuda\ndevice_ids: [0]\nmodel: m\ntask: text-generation\n"
    "torch_dtype: auto\ndevice_map: auto\n",
    "backend/vllm": 'type: vllm\ndevice: cuda\ndevice_ids: [0]\nmodel: m\nendpoint: "http://localhost:8000/v1"\n'
    "task: text-generation\ngpu_memory_utilization: 0.9\n",
    "scenario/energy_star": SCENARIO.format(samples=1000, most=100, least=50, more=""),
    "gpt_oss_120b": "name: poc\n" + backend(VLLM_URL) + scenario(10, 100, 50) + REST,
    "pytorch_multigpu": "name: multi\n"
    + backend(LLAMA)
    + scenario(50, 200, 50, ", temperature: 0.7, top_p: 0.9, top_k: 50")
    + REST,
    "pytorch_test": "name: test\n"
    + backend(f"{TORCH}, model: microsoft/phi-2, device_ids: [0]")
    + scenario(3, 50, 10)
    + REST.replace("enabled: true", "enabled: false").replace(", region: null", ""),
    "pytorch_validation": "name: validation\n"
    + backend(f"{TORCH}, model: openai/gpt-oss-20b, device_ids: [0], task: text-generation")
    + scenario(1000, 10, 10)
    + REST,
}
MULTI_GPU = """
backend:
  type: pytorch
  device_ids: [0, 1, 2, 3]
  device_map: auto
  max_memory:
    0: "20GB"
    1: "20GB"
    2: "20GB"
    3: "20GB"
"""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def file(text: str) -> Path:
        (tmp_path / "config.yaml").write_text(text)
        return tmp_path / "config.yaml"

    return file


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_earlier_system_is_read(file: Any, name: str) -> None:
    config = load(file(FILES[name]))
    assert config.backend.type == ("pytorch" if "pytorch" in name else "vllm")
    assert config.backend.device_ids == ((0, 1, 2, 3) if "multi" in name else (0,))
    assert config.scenario.num_samples == {
        "scenario/energy_star": 1000,
        "pytorch_multigpu": 50,
        "pytorch_test": 3,
        "pytorch_validation": 1000,
    }.get(name, 10)
    if "/" not in name:
        assert (config.metrics.region, config.reporter.output_file) == ("", "./results/r.csv")
        assert config.metrics.enabled is (name != "pytorch_test")


def test_the_example_of_many_gpus(file: Any) -> None:
    backend = load(file(MULTI_GPU)).backend
    assert (
        load(file(MULTI_GPU.replace('"20GB"', "20000000000"))).backend.memory_limits_bytes()
        == backend.memory_limits_bytes()
    )
    assert (backend.device_map, backend.memory_limits_bytes()) == ("auto", dict.fromkeys(range(4), 20 * 10**9))


def test_what_is_left_out_has_its_default(file: Any) -> None:
    assert load(file("")) == BenchmarkConfig()
    assert BenchmarkConfig().scenario.generate_kwargs == GenerateConfig(max_new_tokens=100, min_new_tokens=50)
    # The default of a section's part goes as a whole, as in the earlier system.
    generate = load(file("scenario: {generate_kwargs: {max_new_tokens: 20}}")).scenario.generate_kwargs
    assert (generate.max_new_tokens, generate.min_new_tokens) == (20, 0)


def test_environment_variables(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
backend: {endpoint: "${AN_ENDPOINT:-http://localhost:8000/v1}", model: "a/${A_MODEL:-b}"}
scenario: {num_samples: "${SAMPLES:-100}"}
reporter: {output_file: "${oc.env:A_FILE,./r.csv}"}
"""
    config = load(file(text))
    assert (config.backend.endpoint, config.backend.model) == ("http://localhost:8000/v1", "a/b")
    assert (config.scenario.num_samples, config.reporter.output_file) == (100, "./r.csv")
    monkeypatch.setenv("SAMPLES", "7")
    monkeypatch.setenv("A_FILE", "/tmp/x.csv")
    config = load(file(text))
    assert (config.scenario.num_samples, config.reporter.output_file) == (7, "/tmp/x.csv")
    with pytest.raises(ConfigError, match="variable NO_SUCH is not set"):
        load(file('name: "${NO_SUCH}"'))


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("backend.endpoint", "null", ("", {})),
        ("backend.max_memory", "{0: 20000000000}", ("http://localhost:8000/v1", {0: 20 * 10**9})),
        ("backend.max_memory.0", "20000000000", ("http://localhost:8000/v1", {0: 20 * 10**9})),
        ("backend", "{type: pytorch, endpoint: null, max_memory: {0: 20000000000}}", ("", {0: 20 * 10**9})),
    ],
)
def test_a_value_for_one_run_is_read_as_in_the_file(file: Any, key: str, value: str, found: Any) -> None:
    backend = load(file("backend: {type: pytorch}"), {key: value}).backend
    assert (backend.endpoint, backend.memory_limits_bytes()) == found


def test_an_environment_variable_or_its_default_may_be_empty(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_VALUE", raising=False)
    text = 'backend: {type: pytorch, endpoint: "${A_VALUE:-}", max_memory: "${A_VALUE:-}", model: "${A_VALUE:-}"}'
    backend = load(file(text)).backend
    assert (backend.endpoint, backend.max_memory, backend.model) == ("", {}, "")
    monkeypatch.setenv("A_VALUE", "")
    assert load(file('name: "${A_VALUE}"')).name == ""
    assert load(file('name: "${A_VALUE:-x}"')).name == "x"


@pytest.mark.parametrize("value", ["org/m #1", "a: b", "{", "1.5", "007", "null", "yes"])
def test_an_environment_variable_is_the_text_of_a_key_with_text(
    file: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("A_VALUE", value)
    config = load(file('name: "${A_VALUE}"\nbackend: {model: "${A_VALUE}"}'))
    assert (config.name, config.backend.model) == (value, value)


def test_an_environment_variable_may_be_a_list_a_number_or_a_bool(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDS", "[0, 1]")
    monkeypatch.setenv("SHARE", "0.5")
    monkeypatch.setenv("CACHE", "false")
    text = 'backend: {device_ids: "${IDS}", gpu_memory_utilization: "${SHARE}", use_cache: "${CACHE}"}'
    backend = load(file(text)).backend
    assert (backend.device_ids, backend.gpu_memory_utilization, backend.use_cache) == ((0, 1), 0.5, False)
    monkeypatch.setenv("SHARE", "{")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: '\{' is not a number"):
        load(file(text))


@pytest.mark.parametrize("text", ["backend: &a {x: *a}", "a: " + "[" * 10_000])
def test_a_file_without_end_is_refused(file: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml: a value contains itself, or is nested too deep"):
        load(file(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backnd: {type: vllm}", "unknown key: backnd; did you mean backend"),
        ("backend: {devic_map: auto}", "backend: unknown key: devic_map; did you mean device_map"),
        (
            "scenario: {generate_kwargs: {max_tokens: 3}}",
            "generate_kwargs: unknown key: max_tokens; did you mean",
        ),
        ("backend: {type: tgi}", "backend: type: 'tgi' is none of pytorch, vllm"),
        ("backend: {device_map: balancd}", "device_map: 'balancd' is none of auto, .*did you mean 'balanced'"),
        ("backend: {device_ids: [0, 0]}", "device_ids: '0,0': write at least one GPU, each once"),
        ("backend: {device_ids: []}", "at least one GPU"),
        ("backend: {device_ids: 0}", "device_ids: 0 is not a list"),
        ("backend: {max_memory: {0: much}}", "max_memory: '0=much': 'much' is not an amount of memory: write bytes"),
        ("backend: {max_memory: {gpu0: 1GB}}", "'gpu0' is not a number of device_ids"),
        ("backend: {device_ids: [1], max_memory: {0: 1GB}}", r"max_memory: 0 is none of device_ids: \[1\]"),
        ("backend: {endpoint: null}", "endpoint: '' is not allowed with type vllm"),
        ("backend: {endpoint: localhost}", "endpoint: 'localhost': not a URL"),
        ("backend: {model: null}", "model: None is not a string"),
        ("backend: null", "backend: None is not a table"),
        ("scenario: {num_samples: 0}", "num_samples: 0 is too small: at least 1"),
        ("scenario: {num_samples: many}", "num_samples: 'many' is not a whole number"),
        (
            "scenario: {generate_kwargs: {max_new_tokens: 5, min_new_tokens: 6}}",
            "min_new_tokens: 6 is too large",
        ),
        ("scenario: {generate_kwargs: {top_p: 0}}", "top_p: '0': write a number above 0"),
        ("metrics: {type: watts}", "metrics: type: 'watts' is none of codecarbon"),
        ("reporter: {type: json}", "reporter: type: 'json' is none of csv"),
        ("- a", "not a mapping"),
        ("a: [", "line 1, column"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(file: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"config.yaml: .*{message}") as caught:
        load(file(text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(Path("none.yaml"))


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("20GB", 20 * 10**9), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("4096", 4096)]
)
def test_amounts_of_memory(text: str, size_bytes: int) -> None:
    assert memory_bytes(text) == size_bytes
    assert BackendConfig(max_memory={"1": text, "cpu": "1GB"}).memory_limits_bytes() == {1: size_bytes}


def test_keys_that_are_not_followed_are_listed(file: Any) -> None:
    off = "metrics: {enabled: false}\n"
    assert unsupported(load(file(off + backend(LLAMA)))) == {}
    assert [*unsupported(load(file(MULTI_GPU)))] == []
    assert [*unsupported(load(file("metrics: {country_iso_code: USA}")))] == ["metrics.country_iso_code"]
    text = off + backend("load_in_8bit: true, trust_remote_code: true, load_in_4bit: false")
    text += "scenario: {reasoning: true, reasoning_params: {reasoning_effort: high, thinking_budget: 1000}}"
    found = unsupported(load(file(text)))
    assert [*found] == [
        "backend.load_in_8bit",
        "backend.trust_remote_code",
        "scenario.reasoning",
        "scenario.reasoning_params",
    ]
    assert all(found.values())

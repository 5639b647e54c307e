"""The configuration of an energy benchmark: a YAML file with the keys of ai_energy_benchmarks, whose files are read as
they are.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from multigpu.config.fields import fields_of, read_table, setting
from multigpu.errors import ConfigError

NO_EMISSIONS = "energy is measured, and no emissions are computed from it"
# Keys that are not followed if they differ from their default.
NOT_FOLLOWED = {
    "backend.load_in_8bit": "weights are loaded as torch_dtype says",
    "backend.load_in_4bit": "weights are loaded as torch_dtype says",
    "backend.trust_remote_code": "code in a model's folder is never run",
    "backend.use_cache": "generation always uses the cache of keys and values",
    "backend.gpu_memory_utilization": "it is a setting of the vLLM server, which is started elsewhere",
    "scenario.reasoning": "prompts are not changed for reasoning models",
    "scenario.reasoning_params": "prompts are not changed for reasoning models",
    "metrics.country_iso_code": NO_EMISSIONS,
    "metrics.region": NO_EMISSIONS,
}

_SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)")
# ${NAME}, ${NAME:-default}, ${oc.env:NAME} or ${oc.env:NAME,default}: an environment variable.
_VARIABLE = re.compile(r"\$\{(?:oc\.env:)?(\w+)(?:(?::-|,)([^{}]*))?\}")
# What null means for the keys that may be null.
_NULLS: dict[str, Any] = {"endpoint": "", "region": "", "max_memory": {}, "reasoning_params": {}}


def memory_bytes(text: str) -> int:
    """The bytes of a memory limit such as "20GB" (10^9), "20GiB" (2^30) or "20000000000". Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory: write bytes, or a number with MB, GB, MiB or GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _check_device_ids(value: tuple[int, ...]) -> None:
    if not value or min(value) < 0 or len({*value}) < len(value):
        raise ValueError("write at least one GPU, each once, counted from 0 as nvidia-smi does")


def _check_max_memory(value: dict[str, str]) -> None:
    for key, size in value.items():
        if not key.isdecimal() and key != "cpu":
            raise ValueError(f"{key!r} is not a number of device_ids, nor cpu")
        memory_bytes(size)


def _check_endpoint(value: str) -> None:
    if value and not re.match(r"https?://[^/\s]", value):
        raise ValueError("not a URL: write http://HOST:PORT/v1")


def _check_share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError("write a number above 0 and up to 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What computes."""

    type: str = setting("vllm", "pytorch loads the model here; vllm asks a server.", choices=("pytorch", "vllm"))
    model: str = setting("openai/gpt-oss-120b", "Name or folder of the model.")
    task: str = setting("text-generation", choices=("text-generation",))
    device: str = setting("cuda", choices=("cuda", "cpu"))
    device_ids: tuple[int, ...] = setting((0,), "The GPUs, as nvidia-smi counts them.", check=_check_device_ids)
    device_map: str = setting("auto", choices=("auto", "balanced", "balanced_low_0", "sequential"))
    max_memory: dict[str, str] = setting(dict, "Most memory, by number of device_ids.", check=_check_max_memory)
    torch_dtype: str = setting("auto", choices=("auto", "float16", "bfloat16", "float32"))
    load_in_8bit: bool = setting(False)
    load_in_4bit: bool = setting(False)
    trust_remote_code: bool = setting(False)
    use_cache: bool = setting(True)
    pad_token_id: int = setting(-1, "-1: the tokenizer's.", minimum=-1)
    endpoint: str = setting("http://localhost:8000/v1", "The server's URL, of vllm.", check=_check_endpoint)
    gpu_memory_utilization: float = setting(0.9, "The share of memory that a vLLM server takes.", check=_check_share)

    def memory_limits_bytes(self) -> dict[int, int]:
        """max_memory of the GPUs, by index."""
        return {int(key): memory_bytes(size) for key, size in self.max_memory.items() if key != "cpu"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputShapes:
    batch_size: int = setting(1, "Prompts at a time.", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """How tokens are generated. The defaults are what the earlier system used, whatever the file said."""

    max_new_tokens: int = setting(100, minimum=1)
    min_new_tokens: int = setting(0, minimum=0)
    temperature: float = setting(0.7, "0: always the most probable token.", minimum=0)
    top_p: float = setting(0.9, check=_check_share)
    top_k: int = setting(50, "0: all.", minimum=0)
    do_sample: bool = setting(True, "False: as temperature 0.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParams:
    reasoning_effort: str = setting("", choices=("low", "medium", "high"))
    reasoning: bool = setting(False)
    enable_thinking: bool = setting(False)
    disable_thinking: bool = setting(False)
    thinking_budget: int = setting(0, "In tokens.", minimum=1)
    cot_depth: int = setting(0, minimum=1)
    use_prompt_based_reasoning: bool = setting(False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioConfig:
    """The prompts."""

    dataset_name: str = setting("AIEnergyScore/text_generation", "A dataset of Hugging Face.")
    text_column_name: str = setting("text", "The column of the prompts.")
    num_samples: int = setting(10, "So many prompts from the start.", minimum=1)
    truncation: bool = setting(True, "Cut prompts that are longer than the model allows.")
    reasoning: bool = setting(False)
    reasoning_params: ReasoningParams = setting(ReasoningParams())
    input_shapes: InputShapes = setting(InputShapes())
    generate_kwargs: GenerateConfig = setting(GenerateConfig(min_new_tokens=50))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """What is measured."""

    type: str = setting("codecarbon", choices=("codecarbon",))
    enabled: bool = setting(True)
    project_name: str = setting("ai_energy_benchmarks")
    output_dir: str = setting("./emissions")
    country_iso_code: str = setting("")
    region: str = setting("")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReporterConfig:
    """Where the results go."""

    type: str = setting("csv", choices=("csv",))
    output_file: str = setting("./results/benchmark_results.csv")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """A whole file."""

    name: str = setting("benchmark")
    backend: BackendConfig = setting(BackendConfig())
    scenario: ScenarioConfig = setting(ScenarioConfig())
    metrics: MetricsConfig = setting(MetricsConfig())
    reporter: ReporterConfig = setting(ReporterConfig())
    output_dir: str = setting("./benchmark_output")


# The keys whose values are text: an environment variable may look like something else.
_TEXTS = {
    key
    for cls in (BenchmarkConfig, BackendConfig, ScenarioConfig, MetricsConfig, ReporterConfig, ReasoningParams)
    for key, field in fields_of(cls).items()
    if isinstance(field.default, str)
}
SECTIONS = {"backend": BackendConfig, "scenario": ScenarioConfig, "metrics": MetricsConfig, "reporter": ReporterConfig}


def load(path: Path, overrides: Mapping[str, str] = MappingProxyType({})) -> BenchmarkConfig:
    """Reads a file. A file with the keys of one section alone is that section; what is left out has its default.
    `overrides`: values as in YAML, by key, such as "backend.device".

    Raises ConfigError: it can't be read, a key is unknown, or a value is not allowed.
    """
    try:
        table = _sections(yaml.safe_load(path.read_text("utf-8")))
        for key, value in overrides.items():
            path_in_table = key.split(".")
            _put(table, path_in_table, _plain_at(path_in_table, yaml.safe_load(value)))
        config = BenchmarkConfig(**read_table(BenchmarkConfig, table))
        _check_together(config)
    except (OSError, UnicodeError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: {reason}") from error
    except RecursionError:
        raise ConfigError(f"{path}: a value contains itself, or is nested too deep") from None
    return config


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a value in a table of tables. Raises ValueError: the path leads through what is no table."""
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{'.'.join(path)}: {name} has no keys")  # noqa: TRY004  as for all that is wrong
    table[path[-1]] = value


def _sections(content: Any) -> dict[str, Any]:
    """The sections of a file. Raises ValueError: they are none."""
    table = _plain(content or {})
    if not isinstance(table, dict):
        raise ValueError("the file is not a mapping of keys to values")  # noqa: TRY004  as for all that is wrong
    if table.keys() <= fields_of(BenchmarkConfig).keys():
        return table
    fitting = (name for name, section in SECTIONS.items() if table.keys() <= fields_of(section).keys())
    return next(({name: table} for name in fitting), table)


def unsupported(config: BenchmarkConfig) -> dict[str, str]:
    """The keys with a value that multigpu accepts and does not follow, and why not."""
    of_keys = {key: attrgetter(key) for key in NOT_FOLLOWED}
    return {key: NOT_FOLLOWED[key] for key, value in of_keys.items() if value(config) != value(BenchmarkConfig())}


def _check_together(config: BenchmarkConfig) -> None:
    """Raises ValueError for values that don't fit one another."""
    backend, generate = config.backend, config.scenario.generate_kwargs
    if backend.type == "vllm" and not backend.endpoint:
        raise ValueError("backend: endpoint: '' is not allowed with type vllm: write http://HOST:PORT/v1")
    if others := backend.memory_limits_bytes().keys() - {*backend.device_ids}:
        raise ValueError(f"backend: max_memory: {min(others)} is none of device_ids: {[*backend.device_ids]}")
    if generate.min_new_tokens > generate.max_new_tokens:
        allowed = f"at most max_new_tokens: {generate.max_new_tokens}"
        raise ValueError(
            f"scenario: generate_kwargs: min_new_tokens: {generate.min_new_tokens} is too large: {allowed}"
        )


def _plain(value: Any, name: str = "") -> Any:
    """A value of YAML with variables put in, keys as text, and nulls as empty values."""
    if value is None:
        return _NULLS.get(name)
    if isinstance(value, str):
        return _with_variables(value, name)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {str(key): _plain(each, str(key)) for key, each in value.items()}
    return {key: str(each) for key, each in plain.items()} if name == "max_memory" else plain


def _plain_at(path: list[str], value: Any) -> Any:
    """As _plain, of the value at the end of a path of keys: it depends on them."""
    for name in reversed(path):
        value = {name: value}
    value = _plain(value)
    for name in path:
        value = value[name]
    return value


def _with_variables(text: str, name: str) -> Any:
    """The text with the values of environment variables. For a key that is no text, a variable alone is as in YAML."""

    def put(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if not value and match[2] is not None:
            value = match[2]
        if value is None:
            raise ValueError(f"{match[0]}: the environment variable {match[1]} is not set, and has no default")
        return value

    found = _VARIABLE.sub(put, text)
    if not found:
        return _NULLS.get(name, "")
    if name in _TEXTS or not _VARIABLE.fullmatch(text):
        return found
    try:
        value = yaml.safe_load(found)
    except yaml.YAMLError:
        return found
    return found if value is None else value

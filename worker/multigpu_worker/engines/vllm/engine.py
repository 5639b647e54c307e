"""The engine `vllm`: vLLM runs a language model of kind "generate", in a server of its own (server.py).

The rest of a task is as in the engine `torch` (generate/engine.py): only the scheduler is another one.
"""

import json
import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multigpu.config.values import from_text

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.generate.text_engine import TextEngine
from multigpu_worker.repository.files import read_json
from multigpu_worker.repository.model import VLLM, ModelFolderError, ModelSpec
from multigpu_worker.repository.scan import ADAPTER_FILE

if TYPE_CHECKING:
    from multigpu_worker.engines.generate.token_bytes import TokenBytes

# That vLLM has room for.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PARAMETERS = ("arguments", "cache_bytes", "context")
# For keys and values on a CPU, where vLLM would take most of the host's memory.
CPU_CACHE_BYTES = 512 << 20
# Arguments of vLLM that are set here, or let it run code of the model's folder.
OURS = (
    "--model", "--served-model-name", "--uds", "--host", "--port", "--api-key", "--dtype", "--generation-config",
    "--max-num-seqs", "--max-model-len", "--kv-cache-memory-bytes", "--trust-remote-code", "--tokenizer",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--enable-lora", "--lora-modules",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class VllmModel:
    """What the engine knows of its model. See TextModel."""

    tokenizer: Any
    eos_ids: frozenset[int]
    vocabulary: int
    token_bytes: "TokenBytes"
    context: int = 0

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def matcher(self, json_schema: str) -> None:
        """The server limits the tokens."""


class VllmEngine(TextEngine):
    """Generates text with one model on vLLM."""

    def load(self) -> dict[str, str]:
        """Starts vLLM, and waits until it has loaded the model."""
        from multigpu_worker.engines.vllm.server import VllmServer  # noqa: PLC0415 (with the libraries)
        from multigpu_worker.engines.vllm.streams import Streams  # noqa: PLC0415 (as above)

        settings = self._settings
        arguments, environment = arguments_of(self._spec, settings), environment_of(settings)
        self._server = VllmServer(settings.vllm_python, arguments, environment, _died)
        model = self._model = _read_model(self._spec)  # meanwhile
        facts = self._server.wait_ready()
        model.context = int(facts.pop("context"))
        self._runner = Streams(self._server, self._spec.name, model.eos_ids, settings.slots)
        return {"engine": VLLM, "precision": self._spec.precision, "context": f"{model.context} tokens", **facts}

    def close(self) -> None:
        super().close()
        self._server.close()


def arguments_of(spec: ModelSpec, settings: EngineSettings) -> list[str]:
    """The arguments of vLLM's server, but for those of its socket. Raises ModelFolderError."""
    if unknown := sorted(set(spec.parameters) - set(PARAMETERS)):
        raise ModelFolderError(f"model.toml has parameters.{unknown[0]}: vllm knows {', '.join(PARAMETERS)}")
    if spec.precision not in DTYPES:
        raise ModelFolderError(
            f"vllm takes precision {', '.join(DTYPES)}, not {spec.precision}: weights that are stored quantised are "
            "served so with auto"
        )
    cache_bytes = CPU_CACHE_BYTES if settings.device == "cpu" else 0
    try:
        own = shlex.split(spec.parameters.get("arguments", ""))
        if "cache_bytes" in spec.parameters:
            cache_bytes = int(from_text(spec.parameters["cache_bytes"], int, "cache_bytes"))
        context = int(spec.parameters.get("context", "0"))
    except ValueError as error:
        raise ModelFolderError(f"model.toml's parameters: {error}") from error
    if context < 0:
        raise ModelFolderError(f"parameters.context is {context}: it must be at least 1")
    if taken := [each for each in own if each.partition("=")[0] in OURS]:
        raise ModelFolderError(f"parameters.arguments has {taken[0]}, which may not be set there")
    arguments = ["--model", str(spec.folder), "--served-model-name", spec.name, "--generation-config", "vllm"]
    arguments += ["--structured-outputs-config.backend", "guidance"]  # as our own engine
    arguments += ["--dtype", DTYPES[spec.precision], "--max-num-seqs", str(settings.slots)]
    arguments += ["--tensor-parallel-size", str(spec.tensor_parallel)] if spec.tensor_parallel > 1 else []
    arguments += ["--pipeline-parallel-size", str(spec.pipeline)] if spec.pipeline > 1 else []
    arguments += ["--max-model-len", str(context)] if context else []
    arguments += ["--kv-cache-memory-bytes", str(cache_bytes)] if cache_bytes else []
    return arguments + _adapters(spec, settings) + own


def _adapters(spec: ModelSpec, settings: EngineSettings) -> list[str]:
    """Raises ModelFolderError."""
    if not spec.adapters:
        return []
    modules, ranks = [], [LORA_RANKS[0]]
    for name, where in spec.adapters.items():
        config = read_json(spec.folder / where / ADAPTER_FILE)
        rank = config.get("r") if isinstance(config, dict) else None
        if not isinstance(rank, int) or not 0 < rank <= LORA_RANKS[-1]:
            raise ModelFolderError(
                f"{spec.folder / where / ADAPTER_FILE} has r = {rank!r}, and vLLM takes 1 to {LORA_RANKS[-1]}"
            )
        ranks.append(next(each for each in LORA_RANKS if each >= rank))
        modules.append(json.dumps({"name": name, "path": str(spec.folder / where)}))
    # On a CPU, vLLM 0.32 gives tasks without an adapter that of the last place if they run with others: it stays empty.
    places = len(modules) + (settings.device == "cpu")
    limits = ["--max-lora-rank", str(max(ranks)), "--max-loras", str(places)]
    return ["--enable-lora", *limits, "--lora-modules", *modules]


def environment_of(settings: EngineSettings) -> dict[str, str]:
    """Variables of vLLM's server."""
    found = {}
    if settings.artifacts:  # for what it compiles; a service may not write in its home
        found["VLLM_CACHE_ROOT"] = f"{settings.artifacts}/vllm"
    if settings.device == "cpu":
        # Else it binds itself to some cores, the same ones for each worker of the host.
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        found["OMP_NUM_THREADS"] = str(settings.threads or len(os.sched_getaffinity(0)))
    return found


def _read_model(spec: ModelSpec) -> VllmModel:
    """Raises ModelFolderError."""
    from multigpu_worker.engines.common.pretrained import LOCAL, loading, transformers  # noqa: PLC0415 (as above)
    from multigpu_worker.engines.generate.token_bytes import TokenBytes  # noqa: PLC0415 (as above)

    with loading(spec.folder, "AutoTokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.folder, **LOCAL)
        config = transformers.AutoConfig.from_pretrained(spec.folder, **LOCAL)
        ids = None
        if (spec.folder / "generation_config.json").is_file():
            ids = transformers.GenerationConfig.from_pretrained(spec.folder, **LOCAL).eos_token_id
        if ids is None:
            ids = tokenizer.eos_token_id
        return VllmModel(
            tokenizer=tokenizer,
            eos_ids=frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids),
            vocabulary=int(config.get_text_config().vocab_size),
            token_bytes=TokenBytes(tokenizer),
        )


def _died(output: str) -> None:
    """Ends the engine process, since vLLM has ended by itself."""
    sys.stderr.write(f"vLLM has ended; its last lines:\n{output}\n")
    sys.stderr.flush()
    os._exit(1)

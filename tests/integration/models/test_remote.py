"""The engine `remote`: a fleet whose worker sends its tasks to the gateway of another fleet, which has the models. The
answers are those that the other fleet gives itself.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multigpu
import numpy as np
import pytest
from multigpu.v1 import embed_pb2, generate_pb2, rerank_pb2

from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess
from tests.worker.embed.tiny_models import bert
from tests.worker.generate.tiny_llama import save_tiny_llama
from tests.worker.infer.test_infer_onnx import scaled_sum
from tests.worker.rerank.test_rerank import cross_encoder

pytestmark = pytest.mark.slow

TEXTS = ["one", "two words", "and three words"]
# name, kind, API, and the name there
MODELS = (
    ("vectors", "embed", "openai", "plain"),
    ("vectors-tei", "embed", "tei", "plain"),
    ("writer", "generate", "openai", "tiny"),
    ("judge-tei", "rerank", "tei", "judge"),
    ("judge-openai", "rerank", "openai", "judge"),
    ("scaler", "infer", "kserve", "scale"),
)


@dataclass
class Both:
    origin: Fleet
    remote: Fleet
    gateway: GatewayProcess


def save_remote(folder: Path, kind: str, url: str, **remote: Any) -> Path:
    """A model folder with a model.toml alone."""
    folder.mkdir(parents=True)
    lines = [f'kind = "{kind}"', 'engine = "remote"', "concurrency = 4", "[remote]", f'url = "{url}"']
    lines += [f"{key} = {json.dumps(value)}" for key, value in remote.items()]
    (folder / "model.toml").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("both")
    there = {name: folder / name for name in ("tiny", "judge", "scale", "plain")}
    for path in there.values():
        path.mkdir()
    save_tiny_llama(there["tiny"], context=2048, endless=True)
    cross_encoder(there["judge"])
    scaled_sum(there["scale"])
    bert(there["plain"])
    flags = ["--threads", "1", "--models", ",".join(f"{name}={path}" for name, path in there.items())]
    with Fleet(folder / "origin", worker_flags=flags) as origin, GatewayProcess(folder, origin.address) as gateway:
        for name, kind, api, model in MODELS:
            url = f"{gateway.url}/tei/{model}" if api == "tei" else f"{gateway.url}/v1"
            save_remote(folder / "repository" / name, kind, url, api=api, model=model)
        flags = ["--model-repository", str(folder / "repository")]
        with Fleet(folder / "remote", worker_flags=flags) as remote:
            yield Both(origin, remote, gateway)
            assert not remote.faults()


def test_vectors_are_those_of_the_server(both: Both) -> None:
    with both.origin.client() as origin, both.remote.client() as remote:
        wanted = origin.embed(TEXTS, model="plain")
        assert np.allclose(remote.embed(TEXTS, model="vectors"), wanted, atol=1e-6)
        # text-embeddings-inference scales vectors to length 1.
        scaled = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
        assert np.allclose(remote.embed(TEXTS, model="vectors-tei"), scaled, atol=1e-6)
        payload = embed_pb2.EmbedPayload(texts=TEXTS, count_tokens=True).SerializeToString()
        results = [
            embed_pb2.EmbedResult.FromString(client.run("embed", payload, model=model))
            for client, model in ((origin, "plain"), (remote, "vectors"))
        ]
        assert results[0].tokens == results[1].tokens > 0
        with pytest.raises(multigpu.TaskFailed, match="does not tell the number of tokens"):
            remote.run("embed", payload, model="vectors-tei")


@pytest.mark.parametrize("model", ["plain", "vectors"])
def test_tasks_with_parameters_fail(both: Both, model: str) -> None:
    fleet = both.origin if model == "plain" else both.remote
    with (
        fleet.client() as client,
        pytest.raises(multigpu.TaskError, match="name the precision in the model's model") as error,
    ):
        client.embed(TEXTS, model=model, parameters={"precision": "fp32"})
    assert (error.value.outcome.error_type, error.value.attempts) == ("BadInput", 1)


def test_text_is_that_of_the_server_and_comes_in_parts(both: Both) -> None:
    payload = generate_pb2.GeneratePayload(prompt="Once", max_tokens=200).SerializeToString()
    with both.origin.client() as origin, both.remote.client() as remote:
        wanted = generate_pb2.GenerateResult.FromString(origin.run("generate", payload, model="tiny"))
        outcome = remote.submit("generate", payload, model="writer").outcome()
        found = generate_pb2.GenerateResult.FromString(outcome.result)
        assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)
        assert (found.prompt_tokens, found.completion_tokens) == (wanted.prompt_tokens, len(wanted.token_ids))
        chunks = [generate_pb2.GenerateChunk.FromString(part).text for part in outcome.partials]
        assert len(chunks) > 3
        assert "".join(chunks) == wanted.text
        said = [{"role": "user", "content": "Hello"}]
        assert remote.generate(said, model="writer", max_tokens=20) == origin.generate(
            said, model="tiny", max_tokens=20
        )
        seeded: Any = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
        assert remote.generate("A", model="writer", **seeded) == origin.generate("A", model="tiny", **seeded)
        with pytest.raises(multigpu.TaskFailed, match="no log probabilities"):
            asked = generate_pb2.GeneratePayload(prompt="A", logprobs=1)
            remote.run("generate", asked.SerializeToString(), model="writer")


def test_scores_are_those_of_the_server(both: Both) -> None:
    payload = rerank_pb2.RerankPayload(query="cats", documents=TEXTS).SerializeToString()
    with both.origin.client() as origin, both.remote.client() as remote:
        scores = [
            rerank_pb2.RerankResult.FromString(client.run("rerank", payload, model=model)).scores
            for client, model in ((origin, "judge"), (remote, "judge-tei"), (remote, "judge-openai"))
        ]
        assert np.allclose(scores[1], scores[0], atol=1e-6)
        assert np.allclose(scores[2], scores[0], atol=1e-6)


def test_tensors_are_those_of_the_server(both: Both) -> None:
    inputs: dict[str, Any] = {
        "x": np.array([[1, 2, 3], [4, 5, 6]], np.float32),
        "counts": np.array([[2], [3]], np.int64),
    }
    with both.origin.client() as origin, both.remote.client() as remote:
        wanted = origin.infer(inputs, model="scale")
        found = remote.infer(inputs, model="scaler")
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in wanted.items()
        }
        with pytest.raises(multigpu.TaskFailed, match="the model has no input 'y'"):
            remote.infer({"y": np.zeros(1, np.float32)}, model="scaler")


def test_usage_of_a_remote_model_reaches_clients_of_openai(both: Both, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, both.remote.address) as gateway:
        _, answer = gateway.call("POST", "/v1/completions", {"model": "writer", "prompt": "Once", "max_tokens": 12})
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens"] > 0


def test_models_that_the_server_does_not_have_are_named(both: Both, tmp_path: Path) -> None:
    wrong = save_remote(tmp_path / "wrong", "embed", both.gateway.url, model="absent")
    with (
        Fleet(tmp_path, workers=1, worker_flags=["--models", f"wrong={wrong}"]) as fleet,
        fleet.client() as client,
        pytest.raises(multigpu.TaskFailed, match=r"has no model 'absent' \(it has "),
    ):
        client.run("embed", ["x"], model="wrong", attempts_max=1)

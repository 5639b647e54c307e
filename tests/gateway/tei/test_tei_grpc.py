"""The gRPC API of text-embeddings-inference: what HTTP gives, streams in order, callers that leave or pause."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import multigpu
import numpy as np
import pytest
from multigpu_gateway.tei import tei_pb2 as pb

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.tei.test_tei import MODEL, TEXTS

RESPONSES: dict[str, Any] = {
    "Info/Info": pb.InfoResponse, "Embed/Embed": pb.EmbedResponse, "Embed/EmbedAll": pb.EmbedAllResponse,
    "Embed/EmbedSparse": pb.EmbedResponse, "Predict/Predict": pb.PredictResponse,
    "Predict/PredictPair": pb.PredictResponse, "Rerank/Rerank": pb.RerankResponse,
    "Tokenize/Tokenize": pb.EncodeResponse, "Tokenize/Decode": pb.DecodeResponse,
}  # fmt: skip
LONG = "GPUs are fast. " * 200
NUMBER = re.compile(r"-?\d[\d.e-]*")


def method(channel: grpc.Channel, name: str) -> Any:
    """The stub of a method; "SERVICE/METHOD", with Stream behind it for the stream."""
    single = name.removesuffix("Stream")
    kind = "unary_unary" if single == name else "stream_unary" if name == "Rerank/RerankStream" else "stream_stream"
    read = RESPONSES[single].FromString
    return getattr(channel, kind)(f"/tei.v1.{name}", lambda message: message.SerializeToString(), read)


def metadata(model: str, **others: str) -> list[tuple[str, str]]:
    return [("x-multigpu-model", model), *((f"x-multigpu-{name}", value) for name, value in others.items())]


@pytest.fixture(scope="module")
def channel(gateway: GatewayProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(gateway.grpc) as found:
        yield found


def both(channel: grpc.Channel, name: str, requests: list[Any], model: str) -> list[Any]:
    """The answers to calls of their own; the stream of the same requests has the same."""
    answers = [method(channel, name)(each, metadata=metadata(model)) for each in requests]
    streamed = list(method(channel, f"{name}Stream")(iter(requests), metadata=metadata(model)))
    for each in (*answers, *streamed):
        if "metadata" in each.DESCRIPTOR.fields_by_name:
            assert each.metadata.total_time_ns
            each.metadata.total_time_ns = 0
    assert len(streamed) == len(answers)
    for one, other in zip(streamed, answers, strict=True):  # tasks that run together differ in the last digits
        assert NUMBER.sub("", str(one)) == NUMBER.sub("", str(other))
        found, wanted = ([float(text) for text in NUMBER.findall(str(each))] for each in (one, other))
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    return answers


def http(gateway: GatewayProcess, path: str, body: Any) -> Any:
    response, found = gateway.call("POST", path, body)
    assert response.status == 200, found
    return found


def test_vectors_are_those_of_http(gateway: GatewayProcess, channel: grpc.Channel) -> None:
    response, wanted = gateway.call("POST", f"/tei/{MODEL}/embed", {"inputs": TEXTS})
    answers = both(channel, "Embed/Embed", [pb.EmbedRequest(inputs=each) for each in TEXTS], MODEL)
    np.testing.assert_allclose([each.embeddings for each in answers], wanted, atol=1e-6)
    assert [each.metadata.compute_chars for each in answers] == [len(each) for each in TEXTS]
    tokens = sum(each.metadata.compute_tokens for each in answers)
    assert str(tokens) == response.getheader("x-compute-tokens")
    assert 'route="/tei.v1.Embed/Embed",status="OK"' in gateway.call("GET", "/metrics")[1]


def test_options_of_embed_are_those_of_http(gateway: GatewayProcess, channel: grpc.Channel) -> None:
    options: list[dict[str, Any]] = [{"normalize": False}, {"normalize": True, "dimensions": 5}, {"truncate": True}, {}]
    for given in options:
        (wanted,) = http(gateway, "/tei/plain/embed", {"inputs": TEXTS[0], **given})
        request = pb.EmbedRequest(inputs=TEXTS[0], **given)
        answer = method(channel, "Embed/Embed")(request, metadata=metadata("plain"))
        np.testing.assert_allclose(answer.embeddings, wanted, atol=1e-6)


def test_tokens_are_those_of_http(gateway: GatewayProcess, channel: grpc.Channel) -> None:
    answers = both(channel, "Embed/EmbedAll", [pb.EmbedAllRequest(inputs=each) for each in TEXTS], MODEL)
    for each, vectors in zip(answers, http(gateway, f"/tei/{MODEL}/embed_all", {"inputs": TEXTS}), strict=True):
        np.testing.assert_allclose([row.embeddings for row in each.token_embeddings], vectors, atol=1e-6)
    for special in (True, False):
        tokens = http(gateway, f"/tei/{MODEL}/tokenize", {"inputs": TEXTS, "add_special_tokens": special})
        encode = [pb.EncodeRequest(inputs=each, add_special_tokens=special) for each in TEXTS]
        assert both(channel, "Tokenize/Tokenize", encode, MODEL) == [pb.EncodeResponse(tokens=row) for row in tokens]
        ids = [[each["id"] for each in row] for row in tokens]
        texts = http(gateway, f"/tei/{MODEL}/decode", {"ids": ids, "skip_special_tokens": special})
        decode = [pb.DecodeRequest(ids=each, skip_special_tokens=special) for each in ids]
        assert both(channel, "Tokenize/Decode", decode, MODEL) == [pb.DecodeResponse(text=each) for each in texts]


def test_predictions_are_those_of_http(gateway: GatewayProcess, channel: grpc.Channel) -> None:
    wanted = http(gateway, "/tei/sorter/predict", {"inputs": [[each] for each in TEXTS]})
    for name, requests in (
        ("Predict/Predict", [pb.PredictRequest(inputs=each) for each in TEXTS]),
        ("Predict/PredictPair", [pb.PredictPairRequest(inputs=[each]) for each in TEXTS]),
    ):
        for answer, row in zip(both(channel, name, requests, "sorter"), wanted, strict=True):
            assert [each.label for each in answer.predictions] == [each["label"] for each in row]
            scores = [each["score"] for each in row]
            assert [each.score for each in answer.predictions] == pytest.approx(scores, abs=1e-6)


@pytest.mark.parametrize("given", [{}, {"raw_scores": True, "return_text": True}])
def test_ranks_are_those_of_http(gateway: GatewayProcess, channel: grpc.Channel, given: Any) -> None:
    wanted = http(gateway, "/tei/judge/rerank", {"query": "What is fast?", "texts": TEXTS, **given})
    request = pb.RerankRequest(query="What is fast?", texts=TEXTS, **given)
    one = method(channel, "Rerank/Rerank")(request, metadata=metadata("judge"))
    each = (pb.RerankStreamRequest(query="What is fast?", text=text, **given) for text in TEXTS)
    streamed = method(channel, "Rerank/RerankStream")(each, metadata=metadata("judge"))
    for answer in (one, streamed):
        assert [(rank.index, rank.text) for rank in answer.ranks] == [
            (row["index"], row.get("text", "")) for row in wanted
        ]
        assert [rank.score for rank in answer.ranks] == pytest.approx([row["score"] for row in wanted], abs=1e-5)
        assert all(rank.HasField("text") == ("return_text" in given) for rank in answer.ranks)
        assert answer.metadata.compute_chars == 13 * len(TEXTS) + sum(map(len, TEXTS))


def test_info_is_that_of_http(gateway: GatewayProcess, channel: grpc.Channel) -> None:
    names = ("model_sha", "model_dtype", "version")
    types = {MODEL: pb.MODEL_TYPE_EMBEDDING, "judge": pb.MODEL_TYPE_RERANKER, "sorter": pb.MODEL_TYPE_CLASSIFIER}
    for model, model_type in types.items():
        info = method(channel, "Info/Info")(pb.InfoRequest(), metadata=metadata(model))
        wanted = gateway.call("GET", f"/tei/{model}/info")[1]
        assert (info.model_id, info.model_type, info.max_client_batch_size) == (model, model_type, 10_000)
        assert [getattr(info, name) for name in names] == [wanted[name] or "" for name in names]


def failure(call: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """How a call ends, whose first answer is an error."""
    with pytest.raises(grpc.RpcError) as caught:
        found = call(*args, **options)
        next(found)
    error: Any = caught.value
    return error.code().name, error.details()


LEFT, INVALID = pb.TRUNCATION_DIRECTION_LEFT, "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("name", "model", "request_", "code", "says"),
    [
        ("Embed/Embed", MODEL, pb.EmbedRequest(), INVALID, "`inputs` cannot be empty"),
        ("Embed/Embed", MODEL, pb.EmbedRequest(inputs="x", normalize=False), INVALID, "normalize is false"),
        ("Embed/Embed", MODEL, pb.EmbedRequest(inputs="x", dimensions=999), INVALID, "dimensions is 999"),
        ("Embed/Embed", MODEL, pb.EmbedRequest(inputs="x", prompt_name="q"), INVALID, "prompt_name is not"),
        ("Embed/EmbedAll", MODEL, pb.EmbedAllRequest(inputs="x", truncation_direction=LEFT), INVALID, "only Right"),
        ("Embed/EmbedAll", "nobody", pb.EmbedAllRequest(inputs="x"), "NOT_FOUND", "no worker has model 'nobody'"),
        ("Embed/Embed", "judge", pb.EmbedRequest(inputs="x"), "FAILED_PRECONDITION", "serves rerank, not embed"),
        ("Embed/EmbedSparse", MODEL, pb.EmbedSparseRequest(inputs="x"), "UNIMPLEMENTED", "sparse vectors"),
        ("Predict/Predict", "sorter", pb.PredictRequest(inputs="x", raw_scores=True), INVALID, "raw_scores"),
        ("Predict/PredictPair", "sorter", pb.PredictPairRequest(inputs="ab"), INVALID, "send pairs to /rerank"),
        ("Predict/PredictPair", "sorter", pb.PredictPairRequest(), INVALID, "`inputs` cannot be empty"),
        ("Rerank/Rerank", "judge", pb.RerankRequest(query="q"), INVALID, "`texts` cannot be empty"),
        ("Tokenize/Tokenize", MODEL, pb.EncodeRequest(inputs="x", prompt_name="q"), INVALID, "prompt_name"),
        ("Tokenize/Decode", MODEL, pb.DecodeRequest(), INVALID, "`ids` cannot be empty"),
        ("Tokenize/Decode", MODEL, pb.DecodeRequest(ids=[99_999]), INVALID, "is 99999"),
        ("Info/Info", "nobody", pb.InfoRequest(), "NOT_FOUND", "there is no model 'nobody'"),
    ],
)  # fmt: skip
def test_errors_are_statuses(channel: grpc.Channel, name: str, model: str, request_: Any, code: str, says: str) -> None:
    ends = [failure(method(channel, name), request_, metadata=metadata(model))]
    if name not in ("Info/Info", "Rerank/Rerank"):
        ends.append(failure(method(channel, f"{name}Stream"), iter([request_]), metadata=metadata(model)))
    for found in ends:
        assert (found[0], says in found[1]) == (code, True), found


def test_errors_of_the_stream_to_rerank(channel: grpc.Channel) -> None:
    stream = method(channel, "Rerank/RerankStream")
    one, other = (pb.RerankStreamRequest(query=each, text="x") for each in "ab")
    for requests, says in (
        ([], "`texts` cannot be empty"),
        ([one, other], "query is to be the same"),
        ([one] * 10_001, "batch size 10001"),
    ):
        code, text = failure(stream, iter(requests), metadata=metadata("judge"))
        assert (code, says in text) == ("INVALID_ARGUMENT", True), text


def test_a_stream_answers_in_order(gateway: GatewayProcess, channel: grpc.Channel) -> None:
    texts = [f"{LONG if number % 7 == 0 else ''}number {number}" for number in range(200)]
    requests = (pb.EmbedRequest(inputs=each) for each in texts)
    answers = list(method(channel, "Embed/EmbedStream")(requests, metadata=metadata(MODEL)))
    wanted = http(gateway, f"/tei/{MODEL}/embed", {"inputs": texts})
    np.testing.assert_allclose([each.embeddings for each in answers], wanted, atol=1e-5)


def test_an_error_ends_its_stream_after_the_answers_before_it(channel: grpc.Channel) -> None:
    done = threading.Event()

    def requests() -> Iterator[Any]:
        yield from (pb.EmbedRequest(inputs=each) for each in (*TEXTS, "", *TEXTS))
        done.wait(60)

    answers = method(channel, "Embed/EmbedStream")(requests(), metadata=metadata(MODEL))
    assert all(next(answers).embeddings for _ in TEXTS)
    assert failure(lambda: answers) == (INVALID, "`inputs` cannot be empty")
    done.set()


def test_a_reader_that_pauses_is_waited_for(channel: grpc.Channel, fleet: Fleet) -> None:
    count, sent = 120, 0
    text = LONG * 10

    def requests() -> Iterator[Any]:
        nonlocal sent
        for _ in range(count):
            sent += 1
            yield pb.EmbedAllRequest(inputs=text)

    # The vectors of a text have 390 KB.
    answers = method(channel, "Embed/EmbedAllStream")(requests(), metadata=metadata(MODEL))
    with fleet.client() as own:
        until(lambda: sent > 64 and not own.count().queued + own.count().leased, 50)
    assert sent < count, sent
    assert method(channel, "Info/Info")(pb.InfoRequest(), metadata=metadata(MODEL)).model_id == MODEL
    assert [len(each.token_embeddings) for each in answers] == [256] * count


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_a_call_that_ends_cancels_its_tasks(channel: grpc.Channel, fleet: Fleet, leave: str) -> None:
    with multigpu.AdminClient(fleet.address) as admin, fleet.client() as own:
        admin.pause_queue("left")
        until(lambda: not own.count().queued, 20)
        options: Any = {"metadata": metadata(MODEL, queue="left"), "timeout": None if leave == "cancel" else 3}
        request = pb.EmbedRequest(inputs="x")
        calls = [
            method(channel, "Embed/Embed").future(request, **options),
            method(channel, "Embed/EmbedStream")(iter([request] * 80), **options),
        ]
        # No more than 64 of the stream.
        until(lambda: own.count().queued == 1 + 64, 20)
        if leave == "cancel":
            for each in calls:
                each.cancel()
        until(lambda: not own.count().queued, 10)
        ends = {"cancel": grpc.StatusCode.CANCELLED, "deadline": grpc.StatusCode.DEADLINE_EXCEEDED}
        assert [each.code() for each in calls] == [ends[leave]] * 2


def test_a_full_queue_is_resource_exhausted(channel: grpc.Channel, fleet: Fleet) -> None:
    with multigpu.AdminClient(fleet.address) as admin, fleet.client() as own:
        admin.pause_queue("small")
        admin.set_queue_limits("small", tasks_max=1)
        handle = own.submit("echo", b"", queue="small")
        options = {"metadata": metadata(MODEL, queue="small")}
        assert (
            failure(method(channel, "Embed/Embed"), pb.EmbedRequest(inputs="x"), **options)[0] == "RESOURCE_EXHAUSTED"
        )
        handle.cancel()

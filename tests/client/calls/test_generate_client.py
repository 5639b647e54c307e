"""Client.generate and AsyncClient.generate: pieces of text, the whole at the end, and nothing left behind."""

import asyncio
import re
from typing import Any

import multigpu
import pytest
from multigpu.v1 import generate_pb2, task_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task
from tests.waiting import until_async

PIECES = ["Once", "", " upon", " a tïme"]


def chunk(at: int) -> bytes:
    return generate_pb2.GenerateChunk(text=PIECES[at], token_ids=[at, at + 10]).SerializeToString()


CHUNKS = [chunk(at) for at in range(len(PIECES))]
RESULT = generate_pb2.GenerateResult(
    text="".join(PIECES),
    token_ids=[0, 10, 1, 11, 2, 12, 3, 13],
    finish_reason=generate_pb2.FINISH_REASON_LENGTH,
    prompt_tokens=5,
)


def tell(spec: Spec, task: Task) -> Reply:
    return task_pb2.Outcome(
        state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=RESULT.SerializeToString(), worker_id="w0", attempts=1
    )


def script(master: ScriptedMaster, prompt: str = "Tell", chunks: list[bytes] = CHUNKS, **fields: Any) -> None:
    payload = generate_pb2.GeneratePayload(prompt=prompt, **fields).SerializeToString()
    master.partials[payload] = chunks


async def test_generate_yields_pieces_and_has_a_result() -> None:
    async with ScriptedMaster(tell) as master, multigpu.AsyncClient(master.address) as client:
        script(master, max_tokens=8, temperature=0.5, stop=["\n"], seed=0)
        generation = client.generate(
            "Tell", model="my-model", stream=True, max_tokens=8, temperature=0.5, stop=["\n"], seed=0, priority=1,
            request_id="mine",
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="not ended"):
            print(generation.result)
        assert [piece async for piece in generation] == ["Once", " upon", " a tïme"]
        result = generation.result
        assert (result.text, result.finish_reason, result.worker_id) == ("Once upon a tïme", "length", "w0")
        assert result.token_ids == tuple(RESULT.token_ids) and result.prompt_tokens == 5
        (spec,), (task,) = master.specs, master.inputs
        assert (spec.kind, spec.model, spec.priority, task.request_id) == ("generate", "my-model", 1, "mine")


async def test_the_synchronous_client_returns_the_same() -> None:
    async with ScriptedMaster(tell) as master:
        script(master)
        script(master, "", messages=[{"role": "user", "content": "Tell"}])

        def read() -> None:
            with multigpu.Client(master.address) as client:
                generation = client.generate("Tell", stream=True)
                assert list(generation) == ["Once", " upon", " a tïme"]
                assert generation.result.text == "Once upon a tïme"
                assert list(generation) == []
                assert client.generate([{"role": "user", "content": "Tell"}]) == "Once upon a tïme"

        await asyncio.to_thread(read)


async def test_closing_or_dropping_a_generation_cancels_its_task() -> None:
    def run_for_ever(spec: Spec, task: Task) -> Reply:
        return None

    async with ScriptedMaster(run_for_ever) as master:
        script(master)

        def let_go() -> None:
            with multigpu.Client(master.address) as client:
                generation = client.generate("Tell", stream=True, request_id="dropped")
                assert next(generation) == "Once"
                del generation
                closed = client.generate("Tell", stream=True, request_id="closed")
                assert next(closed) == "Once"
                closed.close()

        await asyncio.to_thread(let_go)
        async with multigpu.AsyncClient(master.address) as client:
            generation = client.generate("Tell", stream=True, request_id="closed too")
            assert await anext(generation) == "Once"
            await generation.aclose()
        async with asyncio.timeout(120):
            while set(master.cancelled) != {"dropped", "closed", "closed too"}:
                await asyncio.sleep(0.01)


async def test_pieces_that_differ_from_the_result_are_an_error() -> None:
    async with ScriptedMaster(tell) as master, multigpu.AsyncClient(master.address) as client:
        for chunks in (CHUNKS[:3], [*CHUNKS, CHUNKS[1]], [CHUNKS[0], *CHUNKS], [b"\xff"]):
            script(master, chunks=chunks)
            with pytest.raises(multigpu.TransportError, match="another protocol"):
                async for _ in client.generate("Tell", stream=True):
                    pass


async def test_wrong_prompts_and_options_are_not_sent() -> None:
    client = multigpu.AsyncClient("127.0.0.1:1")
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("", {}, multigpu.InvalidTaskError, "empty"),
        ([], {}, multigpu.InvalidTaskError, "empty"),
        (["hello"], {}, TypeError, "role"),
        ([{"role": "user", "text": "x"}], {}, multigpu.InvalidTaskError, "text"),
        ("\ud800", {}, multigpu.InvalidTaskError, "generate can't take this"),
        ("a", {"stop": "\n"}, TypeError, r"\[stop\]"),
        ("a", {"max_tokens": -1}, multigpu.InvalidTaskError, "generate can't take this"),
        ("a", {"seed": 1 << 64}, multigpu.InvalidTaskError, "generate can't take this"),
    ]
    for prompt, options, error, text in wrong:
        with pytest.raises(error, match=text):
            client.generate(prompt, stream=True, **options)
    with pytest.raises(TypeError, match="temprature"):
        await client.generate("a", temprature=1)  # type: ignore[call-overload]
    await client.close()


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("generate", "max_tokens", "max_tokens is an option of the client's method generate: give it there"),
        ("generate", "max_token", "did you mean 'max_tokens' of the client's method generate?"),
        ("classify", "topk", "did you mean 'top_k' of the client's method classify?"),
        ("echo", "return_exception", "did you mean 'return_exceptions' of a map?"),
        ("echo", "run_timeout", "did you mean 'run_timeout_s'?"),
        ("generate", "xyz", "max_tokens"),
        ("echo", "retries", "an option of the handler: `@multigpu.handler(retries=…)`"),
        ("echo", "factor", "Arguments of a handler go into handler.run(client, …), or multigpu.Arguments(…)"),
    ],
)
async def test_an_unknown_option_gets_a_hint_at_those_of_its_kind(kind: str, name: str, hint: str) -> None:
    options: dict[str, Any] = {name: 1}
    async with multigpu.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=re.escape(hint)):
            await client.run(kind, b"", **options)


async def test_leaving_the_block_of_a_stream_cancels_its_task() -> None:
    async with ScriptedMaster(lambda _, __: None) as master, multigpu.AsyncClient(master.address) as client:
        script(master)
        async with client.generate("Tell", stream=True, request_id="left") as stream:
            assert await anext(stream) == "Once"
        await until_async(lambda: "left" in master.cancelled)

        def read() -> None:
            with multigpu.Client(master.address) as other, other.generate("Tell", stream=True, request_id="too") as it:
                next(it)

        await asyncio.to_thread(read)
        await until_async(lambda: "too" in master.cancelled)

"""Parts of the generate engine by themselves: text from tokens, the choice of tokens, blocks, payloads."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

import torch
from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON
from multigpu_worker.engines.embed.text import CHARACTERS_PER_TOKEN_MAX
from multigpu_worker.engines.generate import cache as generate_cache
from multigpu_worker.engines.generate.cache import BlockPool, CacheShape, PagedCache, Piece, make_step, prompt_attention
from multigpu_worker.engines.generate.json_schema import Masks
from multigpu_worker.engines.generate.payload import decode, encode, read_request
from multigpu_worker.engines.generate.sample import Choice, Sampling, draw, penalised, sample_tokens, uniform
from multigpu_worker.engines.generate.text import TextStream
from torch.overrides import TorchFunctionMode


@pytest.mark.parametrize("masked", [True, False])
def test_copied_heads_equal_grouped_heads(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """On CUDA a mask and grouped heads together would be computed by the kernel that writes out all scores."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = (torch.arange(5).unsqueeze(1) + 4 >= torch.arange(9)).expand(2, 1, 5, 9) if masked else None
    grouped = prompt_attention(queries, keys, values, mask, 0.3, copied=False)
    kernel: Any = torch.nn.functional.scaled_dot_product_attention
    asked: list[bool] = []

    def spy(*tensors: torch.Tensor, enable_gqa: bool, **others: Any) -> torch.Tensor:
        asked.append(enable_gqa)
        found: torch.Tensor = kernel(*tensors, enable_gqa=enable_gqa, **others)
        return found

    monkeypatch.setattr(generate_cache, "scaled_dot_product_attention", spy)
    copied = prompt_attention(queries, keys, values, mask, 0.3, copied=True)
    assert asked == [False]
    torch.testing.assert_close(copied, grouped, rtol=0, atol=1e-6)
    assert (grouped[:, 0] - grouped[:, 3]).abs().max() > 0.1, "the comparison could not fail"


def decode_bytes(ids: list[int]) -> str:
    """Tokens that are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def pieces_of(data: bytes, stop: list[str] | None = None, every: int = 1) -> tuple[list[str], TextStream]:
    """What is handed out of a text that comes byte by byte, and the stream at its end."""
    stream = TextStream(decode_bytes, list(b"prompt: "), stop or [])
    pieces = []
    for at, byte in enumerate(data, 1):
        stream.add(byte)
        if stream.stopped:
            break
        if at % every == 0:
            pieces.append(stream.take(ended=False))
    stream.finish()
    pieces.append(stream.take(ended=True))
    return pieces, stream


TEXT = "Straße, naïve café, Ελληνικά, 日本語, 👩‍👩‍👧‍👦 and \U0001f9ff. The end; the END."


def test_characters_are_sent_whole_and_broken_or_incomplete_ones_as_the_decoder_writes_them() -> None:
    pieces, stream = pieces_of(TEXT.encode())
    assert "".join(pieces) == stream.text == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    # And as soon as they are.
    assert sum(map(bool, pieces)) == len(TEXT)
    for data in (b"a\xffb", b"\xc3", b"ok \xe6\x97", b"\x80\x80\x80x", "é".encode() + b"\xc3(" + "é".encode()):
        pieces, stream = pieces_of(data)
        assert "".join(pieces) == stream.text
        assert stream.text.replace("\ufffd", "") == decode_bytes(list(data)).replace("\ufffd", "")
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode_bytes(ids)

    stream = TextStream(decode, [], [])
    pieces = list[str]()
    for _ in range(1000):
        stream.add(0xFF)
        pieces.append(stream.take(ended=False))
    assert len("".join(pieces)) > 950
    # Each token costs the same, however many came before.
    assert max(decoded) < 50
    for byte in "日本".encode():
        stream.add(byte)
    stream.finish()
    pieces.append(stream.take(ended=True))
    assert "".join(pieces) == stream.text
    assert stream.text.endswith("本")


@pytest.mark.parametrize("every", [1, 3, 7])
def test_text_ends_before_the_first_stop_string(every: int) -> None:
    for stop in (["the"], ["END", "the E"], ["日本"], ["\U0001f9ff."], ["naïve café", "naïve coffee"], [";"]):
        pieces, stream = pieces_of(TEXT.encode(), stop, every)
        expected = TEXT[: min(at for word in stop if (at := TEXT.find(word)) >= 0)]
        assert "".join(pieces) == stream.text == expected
        assert stream.stopped


def test_only_a_possible_stop_string_is_held_back_and_random_ones_match_a_reference_search() -> None:
    stream = TextStream(decode_bytes, [], ["abcd", "cx"])
    given = []
    for byte in b"zabcabxab":
        stream.add(byte)
        given.append(stream.take(ended=False))
    assert given == ["z", "", "", "", "abc", "", "abx", "", ""]
    stream.finish()
    assert stream.take(ended=True) == "ab"
    assert not stream.stopped
    rng = random.Random(5)
    for _ in range(500):
        data = bytes(rng.choice(b"ab\xc3\xa9") for _ in range(rng.randint(1, 30)))
        words = ["".join(rng.choice("abé") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        pieces, stream = pieces_of(data, words, rng.randint(1, 4))
        assert "".join(pieces) == stream.text
        assert not any(word in stream.text for word in words)
        whole = pieces_of(data)[1].text
        assert whole.startswith(stream.text)
        assert stream.stopped == any(word in whole for word in words)


def test_uniform_is_even_and_deterministic() -> None:
    # Fixed for good: answers of yesterday must come again tomorrow.
    assert uniform(1, 2) == 0.6434025071674214
    numbers = [uniform(seed, position) for seed in (0, 7, 2**64 - 1) for position in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    # 1,200 expected in each; five standard deviations are 164.
    assert all(abs(tenths[tenth] - 1200) < 164 for tenth in range(10)), tenths


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.5, 0, 0.6), (0.9, 8, 0.8)]
)
def test_sampling_frequencies_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(3)
    logits = torch.randn(20) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0].tolist()
    count = 4000
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    drawn = Counter(int(draw(logits, sampling, position)) for position in range(count))
    for token, share in enumerate(expected):
        if share == 0:
            assert drawn[token] == 0
        else:
            assert abs(drawn[token] - count * share) <= 5 * (count * share * (1 - share)) ** 0.5 + 1


def test_extreme_settings_draw_a_likely_token() -> None:
    logits = torch.tensor([1.0, 30.0, 2.0, float("-inf"), 29.5])
    for temperature in (1e-45, 1e-30, 1e-5):
        assert {int(draw(logits, Sampling(temperature=temperature, seed=1), at)) for at in range(50)} == {1}
    assert {int(draw(logits, Sampling(temperature=2.0, top_p=1e-38, seed=1), at)) for at in range(50)} == {1}
    assert {int(draw(logits, Sampling(temperature=2.0, top_k=2**32 - 1, seed=1), at)) for at in range(200)} >= {1, 4}
    assert draw(torch.full((5,), 1e38), Sampling(temperature=2.0, seed=3), 0) in range(5)
    lowest = torch.finfo(torch.float32).min
    assert draw(torch.tensor([lowest, 0.0]), Sampling(temperature=1e-45, seed=3), 0) == 1


def test_penalty_equals_transformers_rows_use_their_own_settings_and_nan_is_detected() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(30)
    history = [3, 7, 7, 29]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([history]), logits[None].clone())[0]
    assert torch.equal(penalised(logits, torch.tensor(sorted(set(history))), 1.3), expected)
    logits = torch.zeros(4, 10)
    logits[0, 4] = 1
    logits[1, :] = float("nan")
    logits[2, :9] = float("-inf")
    logits[3, 2] = float("nan")
    samplings = [Sampling(), Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0)]
    assert sample_tokens(logits, samplings, [[1], [1], [1], [1]]) == [Choice(4), None, Choice(9), None]


class HostReads(TorchFunctionMode):
    """Counts what makes the host wait for the device."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__", "__getitem__")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        # An index that is a number on the device is read, too.
        if name in self.NAMES and (name != "__getitem__" or (isinstance(args[1], torch.Tensor) and not args[1].ndim)):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def test_sampling_waits_for_the_device_once() -> None:
    torch.manual_seed(5)
    samplings = [
        Sampling(temperature=1.0, top_p=0.7, top_k=9, repetition_penalty=1.2, seed=seed) for seed in range(6)
    ] + [Sampling(), Sampling(repetition_penalty=1.1)]
    logits = torch.randn(len(samplings), 40)
    histories = [[row, row + 1, 3] for row in range(len(samplings))]
    for reporting in ({}, {1: 0, 3: 4, 6: 50}):
        for row, count in reporting.items():
            samplings[row] = replace(samplings[row], logprobs=count)
        masks = [
            Masks([0], torch.tensor([[0x0F0F, 0xFF]], dtype=torch.int32)) if row in (2, 3) else None for row in range(8)
        ]
        alone = [
            sample_tokens(logits[row : row + 1].clone(), [samplings[row]], [histories[row]], masks[row])[0]
            for row in range(8)
        ]
        both = Masks([2, 3], torch.tensor([[0x0F0F, 0xFF]] * 2, dtype=torch.int32))
        with HostReads() as mode:
            together = sample_tokens(logits.clone(), samplings, histories, both)
        assert mode.reads == ["tolist"]
        assert together == alone
        found = {row: len(each.logprobs) for row, each in enumerate(together) if each is not None and each.logprobs}
        # The token itself, and at most as many as there are.
        assert found == {row: 1 + min(count, 40) for row, count in reporting.items()}


def test_blocks_are_taken_once_and_a_step_has_places_masks_and_positions() -> None:
    pool = BlockPool(8)
    first, second = pool.take(3), pool.take(5)
    assert sorted(first + second) == list(range(8))
    assert not pool.can_take(1)
    pool.give_back(first)
    pool.blocks_max = 7
    assert pool.can_take(2) and not pool.can_take(3)
    assert set(pool.take(2)) <= set(first)
    shape = CacheShape(layers={0: torch.device("cpu")}, heads=1, head_size=2, dtype=torch.float32)
    cache = PagedCache(shape, 8)
    pieces = [
        Piece(token_ids=[10], start=17, blocks=[3, 1]),
        Piece(token_ids=[20, 21, 22], start=15, blocks=[2, 0]),
        Piece(token_ids=[30], start=0, blocks=[7]),
    ]
    token_ids, positions, step = make_step(cache, pieces, torch.device("cpu"))
    assert token_ids.tolist() == [[10, 20, 21, 22, 30]]
    assert positions.tolist() == [[17, 15, 16, 17, 0]]
    assert step.places.tolist() == [17, 47, 0, 1, 112]
    singles, piece = step.groups
    assert singles.rows.tolist() == [0, 4] and piece.rows.tolist() == [1, 2, 3]
    assert singles.places[1].tolist() == [112] * 18
    assert singles.mask is not None and singles.mask[:, 0, 0].sum(-1).tolist() == [18, 1]
    assert piece.mask is not None and piece.mask[0, 0].sum(-1).tolist() == [16, 17, 18]
    # For a layer on another device, copied there once.
    elsewhere = step.on(torch.device("meta"))
    assert step.on(torch.device("cpu")) is step and step.on(torch.device("meta")) is elsewhere
    assert {elsewhere.places.device.type, elsewhere.groups[0].distance.device.type} == {"meta"}
    # A window of two tokens: each sees itself and the one before.
    windowed = step.masks(2)[1]
    assert windowed is not None and windowed[0, 0].sum(-1).tolist() == [2, 2, 2]


def test_the_cache_of_a_layer_is_on_its_device() -> None:
    cpu, other = torch.device("cpu"), torch.device("meta")
    shape = CacheShape(layers={0: cpu, 1: other, 2: other}, heads=2, head_size=4, dtype=torch.float32)
    assert (shape.token_bytes, shape.token_bytes_of) == (192, {cpu: 64, other: 128})
    cache = PagedCache(shape, 3)
    assert [cache.keys[layer].device for layer in range(3)] == [cpu, other, other]


class Words:
    """A tokenizer of words, which knows nothing of chats."""

    chat_template: str | None = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of prompt, messages and prompt_ids"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "exactly one of"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of"),
        ({"prompt_ids": [1] * 10}, "has 10 tokens, and the model's context is 10 tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs is 21: it must be 0 to 20"),
        ({"prompt": "a", "json_schema": "{"}, "json_schema is no JSON"),
        ({"prompt": "a", "json_schema": "[" * 100_000}, "json_schema is no JSON"),
        ({"prompt": "a", "json_schema": "[]"}, "json_schema is no schema"),
        ({"prompt": "a", "json_schema": " " * 262_145}, "json_schema has 262145 bytes"),
        ({"prompt": " "}, "no tokens"),
        ({"prompt": "a b c", "max_tokens": 8}, "shorten the prompt or lower max_tokens"),
        ({"prompt": "a " * 10}, "context is 10 tokens"),
        ({"prompt": "a", "max_tokens": 2**32 - 2}, "4294967294 to generate"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "temperature": 2.5}, "temperature is 2.5"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5"),
        ({"prompt": "a", "repetition_penalty": -2}, "repetition_penalty is -2"),
        ({"prompt": "a", "stop": [""]}, "0 bytes"),
        ({"prompt": "a", "stop": ["é" * 129]}, "258 bytes"),
        ({"prompt": "a", "stop": ["x"] * 17}, "at most 16"),
        ({"messages": [{"role": "robot", "content": "b"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": "b"}]}, "no chat template"),
    ],
)
def test_invalid_payload_is_rejected(fields: dict[str, object], words: str) -> None:
    payload = pb.GeneratePayload(**fields).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=words):
        read_request(payload, "", Words(), 10, 1)


class Chat(Words):
    chat_template = "{{ messages[0].content }}"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return messages[0]["content"]


def test_characters_beyond_the_context_are_not_tokenised() -> None:
    """The tokenizer drops blanks, so without the limit each of these prompts is one token."""
    characters = CHARACTERS_PER_TOKEN_MAX * 10
    for fits, text in ((True, "a".ljust(characters)), (False, "a".ljust(characters + 1))):
        messages = [pb.ChatMessage(role="user", content=text)]
        for message in (pb.GeneratePayload(prompt=text), pb.GeneratePayload(messages=messages)):
            payload = message.SerializeToString()
            if fits:
                assert read_request(payload, "", Chat(), 10, 1).prompt_ids == [1]
            else:
                with pytest.raises(BadInputError, match=r"has 641 characters, and .* 10 tokens.*shorten the prompt"):
                    read_request(payload, "", Chat(), 10, 1)


def test_omitted_fields_get_defaults_and_messages_round_trip_in_both_forms() -> None:
    request = read_request(pb.GeneratePayload(prompt="a bb").SerializeToString(), "", Words(), 10, 1)
    assert request.prompt_ids == [1, 2] and request.max_tokens == 8 and not request.seed_drawn
    drawn = read_request(b'{"prompt": "a", "temperature": 1}', JSON, Words(), 10, 1)
    assert drawn.seed_drawn
    again, other = (
        read_request(b'{"prompt": "a", "temperature": 1}', JSON, Words(), 10, task_id) for task_id in (1, 2)
    )
    assert again.sampling.seed == drawn.sampling.seed != other.sampling.seed
    own = read_request(b'{"prompt": "a", "temperature": 1, "seed": 0}', JSON, Words(), 10, 99)
    assert own.sampling.seed == 0 and not own.seed_drawn
    chunk = pb.GenerateChunk(text="é\n", token_ids=[1, 2], seed=2**64 - 1)
    for content_type in ("", JSON):
        assert decode(pb.GenerateChunk, encode(chunk, content_type), content_type) == chunk
    for data, content_type in ((b"\xff", ""), (b"{", JSON), (b"\xff", JSON), (b'{"no": 1}', JSON), (b"", "text/plain")):
        with pytest.raises(BadInputError):
            decode(pb.GeneratePayload, data, content_type)

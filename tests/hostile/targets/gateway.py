"""The gateway's routes, with a real master and no worker behind: wrong values everywhere, damaged JSON and forms, wrong
headers.
"""

import asyncio
import json
from random import Random
from typing import Any
from urllib.parse import urlencode

from multigpu.config.config import GatewayConfig
from multigpu_gateway.app import ROUTES, Gateway

from tests.hostile.targets.base import Crash, Target
from tests.hostile.targets.inputs import DOUBLES, WORDS, Maker
from tests.hostile.targets.master import LocalMaster

PATIENCE_S, HANG_UP_S = 10.0, 0.05
METHODS = ["GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "\u00e9"]
# A field of each body, with a value that is right.
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
FIELDS: dict[str, Any] = {
    "model": "m", "input": ["a", "b"], "prompt": "a", "messages": [{"role": "user", "content": "a"}], "query": "a",
    "documents": ["a", {"text": "b"}], "stream": True, "n": 2, "seed": 7, "stop": ["a"], "max_tokens": 3, "logprobs": 1,
    "temperature": 0.5, "top_p": 0.5, "dimensions": 3, "encoding_format": "float", "top_n": 1, "tools": [],
    "stream_options": {"include_usage": True}, "response_format": SCHEMA, "logit_bias": {"1": 1},
    "input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h", "metadata": {"a": "b"},
    "inputs": "a", "texts": ["a"], "kind": "echo", "payload": [1], "tasks": [{"kind": "echo", "payload": 1}],
}  # fmt: skip
VALUES: list[Any] = [None, True, -1, 0, 2**31, 2**64, 10**400, "", [], {}, [[]], [None], {"a": {}}, "x" * 1000]
VALUES += WORDS[:25]
BROKEN = [b"", b"[" * 50_000, b'{"a":' * 5_000, b"nul", b"\xff", b'"\\ud800"', b"1e999"]
ACTIONS = [
    "cancel",
    "submit",
    "requeue",
    "delete",
    "pause",
    "resume",
    "load",
    "unload",
    "cordon",
    "drain",
    "forget",
    "x",
]
PAGE_FIELDS: dict[str, list[str]] = {
    "action": ACTIONS, "task_id": ["1", "-1", "9" * 30, "x", ""], "state": ["queued", "failed", "x", ""],
    "since": ["1h", "-1h", "x"], "next": ["/", "//x", "\r\n"], "payload": ["1", "{", "[" * 50_000],
    **dict.fromkeys(("queue", "kind", "model", "worker", "worker_id", "token", "reason"), WORDS[:25]),
}  # fmt: skip
HEADERS = ["authorization", "content-type", "content-length", "idempotency-key", "last-event-id"]
HEADERS += ["x-multigpu-queue", "x-multigpu-priority", "x-multigpu-durable", "x-multigpu-model"]
# KServe's, which are not in the table.
INFER = "/v2/models/m/infer"
PATHS = ["/", *sorted(ROUTES), INFER, INFER, INFER, "/v2", "/v2/models/m/config", "/v2/models/m/versions/1/infer"]
PATHS += ["/v2/models/stats", "/v2/repository/index", "/v2/repository/models/m/load", "/v2/health/ready"]
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0], "parameters": {}}
TENSOR_VALUES: list[Any] = [
    "FP32",
    "INT64",
    "BYTES",
    "BF16",
    "BOOL",
    [2**63, 2**63],
    [-1],
    [0],
    [1] * 5,
    ["a"],
    [True],
    [1e400],
]
TENSOR_VALUES += [{"binary_data_size": size} for size in (0, 8, -1, 2**64, "x")] + [{"binary_data": True}]
FORM = "multipart/form-data; boundary=b"
HEADER_VALUES = ["Bearer x", "Bearer", FORM, FORM * 50, "application/json", "0", "9" * 30, "-1", "true", "9"]
HEADER_VALUES += ["\u00e9\u00ff", "x" * 5000, "\0", "Bearer \t"]
QUERIES = [
    "",
    "page=x&confirm=1",
    "state=x",
    "queue=%ff&from=-1&live=off&done=x&n=%3Cb%3E",
    "limit=5",
    "limit=x&after=%ff",
    "wait=1e999",
    "wait=-1",
    "cursor=x",
    "%",
    "a=b&&=" * 50,
]
TAILS = ["/", "/x", "/file-batch_x-output/content", "/x/cancel", "/../..", "/\u00e9", "/" + "9" * 30, "//"]


class LocalGateway:
    """Runs on the master's loop."""

    def __init__(self, master: LocalMaster) -> None:
        self._loop = master.loop
        config = GatewayConfig(master=master.master.address, body_bytes_max=1 << 20)
        self._gateway = Gateway(config)

    def close(self) -> None:
        self._loop.run_until_complete(self._gateway.close())

    def feed(self, data: bytes) -> None:
        head, _, body = data.partition(b"\n")
        try:
            method, path, query, headers, parts = json.loads(head)
        except (ValueError, TypeError):  # random bytes
            method, path, query, headers, parts, body = "POST", "/v1/embeddings", "", [], 1, data
        self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, path, query, headers, body, parts), PATIENCE_S)
        )

    async def _call(
        self, method: str, path: str, query: str, headers: list[list[str]], body: bytes, parts: int
    ) -> None:
        size = max(1, -(-len(body) // parts))
        chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        messages = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
        messages[-1]["more_body"] = False
        sent: list[Any] = []
        hung_up = False

        async def receive() -> Any:
            nonlocal hung_up
            if messages:
                return messages.pop(0)
            await asyncio.sleep(HANG_UP_S)  # a task waits for a worker that never comes
            hung_up = True
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": query.encode("utf-8", "replace"),
            "headers": [(name.encode(), value.encode("utf-8")) for name, value in headers],
        }  # fmt: skip
        await self._gateway(scope, receive, send)
        if hung_up:
            return
        if not sent or sent[0]["type"] != "http.response.start" or sent[-1].get("more_body", False):
            raise Crash(f"no whole answer: {sent[:2]}")
        status = sent[0]["status"]
        text = b"".join(each.get("body", b"") for each in sent[1:])
        if status == 500 or b"Traceback" in text:
            raise Crash(f"{status}: {text[:300]!r}")


def _value(rng: Random) -> Any:
    return rng.choice(VALUES) if rng.random() < 0.8 else rng.choice([each for each in DOUBLES if abs(each) < 1e300])


def _json(maker: Maker) -> bytes:
    rng = maker.rng
    if rng.random() < 0.05:
        return rng.choice(
            [b"", b"[" * 50_000, b'{"a":' * 5_000, b"nul", b"\xff", b'"\\ud800"', b"1e999", maker.noise()]
        )
    body = {name: value for name, value in FIELDS.items() if rng.random() < 0.7}
    for name in rng.sample(sorted(body), min(len(body), rng.choice((0, 1, 1, 2)))):
        body[name] = _value(rng)
        if isinstance(FIELDS[name], list) and rng.random() < 0.5:
            body[name] = [_value(rng) for _ in range(3)]
    data = json.dumps(body).encode()
    return data if rng.random() < 0.8 else maker.damaged(data)


def _inference(maker: Maker) -> bytes:
    """The body of a request to infer."""
    rng = maker.rng

    def tensor() -> dict[str, Any]:
        found: dict[str, Any] = dict(TENSOR)
        for name in rng.sample(sorted(found), rng.choice((0, 1, 1, 2))):
            found[name] = rng.choice(TENSOR_VALUES) if rng.random() < 0.8 else _value(rng)
        if rng.random() < 0.3:
            del found["data"]
            found["parameters"] = {"binary_data_size": rng.choice((8, 8, 0, 7, 2**40))}
        return found

    body: dict[str, Any] = {
        "id": "1",
        "inputs": [tensor() for _ in range(rng.choice((0, 1, 1, 2)))],
        "outputs": [{"name": "y"}],
    }
    if rng.random() < 0.2:
        body[rng.choice(("id", "inputs", "outputs", "parameters"))] = _value(rng)
    data = json.dumps(body).encode()
    return data if rng.random() < 0.8 else maker.damaged(data)


def _page_form(maker: Maker) -> bytes:
    """The body of a form of the dashboard."""
    rng = maker.rng
    fields = {name: rng.choice(values) for name, values in PAGE_FIELDS.items() if rng.random() < 0.5}
    data = urlencode(fields, errors="surrogatepass").encode()
    return data if rng.random() < 0.8 else maker.damaged(data)


def _form(maker: Maker) -> bytes:
    data = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    data += b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nhello\r\n--b--\r\n'
    return data if maker.rng.random() < 0.2 else maker.damaged(data)


def _make(maker: Maker) -> bytes:
    rng = maker.rng
    path = rng.choice(PATHS)
    if rng.random() < 0.3:
        path += rng.choice(TAILS)
    form = rng.random() < 0.15
    headers = [[rng.choice(HEADERS), rng.choice(HEADER_VALUES)] for _ in range(rng.choice((0, 0, 1, 2)))]
    if page := path == "/" or path.startswith("/ui"):
        headers.append(["sec-fetch-site", rng.choice(("same-origin", "same-origin", "cross-site"))])
    if form:
        path, headers = "/v1/files", [["content-type", FORM], *headers]
    query = rng.choice(QUERIES)
    head = json.dumps([rng.choice(METHODS), path, query, headers, rng.choice((1, 1, 3))])
    if path.endswith("/infer"):
        return _infer_request(maker, head)
    body = _form if form else _page_form if page else _json
    return head.encode() + b"\n" + body(maker)


def _infer_request(maker: Maker, head: str) -> bytes:
    """With bytes after the JSON part, whose length is mostly right."""
    rng, body = maker.rng, _inference(maker)
    method, path, query, headers, parts = json.loads(head)
    if rng.random() < 0.5:
        length = rng.choice((str(len(body)), str(len(body)), "0", "-1", "x", "9" * 30))
        headers.append(["inference-header-content-length", length])
        body += rng.randbytes(rng.choice((0, 8, 8, 16, 3)))
    return json.dumps([method, path, query, headers, parts]).encode() + b"\n" + body


def targets(local: LocalGateway) -> list[Target]:
    return [Target(name="a request to the gateway", make=_make, feed=local.feed)]

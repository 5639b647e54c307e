"""Model repositories with hostile folders, scanned by a real worker whose hello and heartbeat a real master parses."""

import asyncio
import json
import os
import shutil
import struct
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from multigpu.config.config import WorkerConfig
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_master.wire import workers
from multigpu_worker.agent import Agent
from multigpu_worker.composition import catalog_of, compose
from multigpu_worker.device.cpu import CpuDevice
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.registry import KindInfo

from tests.hostile.targets.base import Crash, Target, mute
from tests.hostile.targets.inputs import WORDS, Maker
from tests.hostile.targets.worker import identity_of

GOOD = "zz-good"
# A safetensors file without tensors: the length of its header, and the header.
EMPTY = b"\x08" + bytes(7) + b"{}      "
NUMBERS: list[Any] = [0, 1, 3, -1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308, float("inf"), float("nan")]
NUMBERS += [None, True, "7", "x" * 5000, [], [2**62, 2**62], {}, [[[]]]]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "hidden_size": 8,
}
# Bytes that a repository of a few small files may take while it is read.
MEMORY_BYTES_MAX = 64 << 20


def safetensors(header: Any, size: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def gguf(facts: bytes = b"", facts_count: int = 0, dimensions: tuple[int, ...] = (2, 2), tensors: int = 1) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, tensors, facts_count) + facts
    body = struct.pack("<Q1sI", 1, b"t", len(dimensions)) + struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return head + body + struct.pack("<IQ", 0, 0)


def gguf_strings(count: int) -> bytes:
    """A fact with this many strings, which are expected to follow."""
    return struct.pack("<Q1sIIQ", 1, b"k", 9, 8, count)


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def language_model(config: Any = None, header: Any = None, size: int = 0) -> dict[str, bytes]:
    weights = EMPTY if header is None else safetensors(header, size)
    return {"config.json": json.dumps(CONFIG | (config or {})).encode(), "model.safetensors": weights}


def put_good(root: Path) -> None:
    put(root / GOOD, language_model())


class Worker:
    """The worker of one repository at a time, and the master that it reports to."""

    def __init__(self) -> None:
        mute()
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def report(self, root: Path) -> tuple[set[str], dict[str, str]]:
        """The names that tasks may use, and the errors of models, after a start and a later scan."""
        return self._loop.run_until_complete(self._report(WorkerConfig(model_repository=str(root))))

    async def _report(self, config: WorkerConfig) -> tuple[set[str], dict[str, str]]:
        device = CpuDevice()
        found = catalog_of(config, device)
        settings = EngineSettings(device="cpu", slots=1, threads=1, handlers=(), models=dict(found.models))
        agent: Agent = compose(config, identity_of(device), device, settings, lambda: catalog_of(config, device))
        agent.pool.default.kinds = {"echo": KindInfo(kind="echo", one_by_one=True)}
        hello = pb.SessionRequest.FromString(agent.stream.hello().SerializeToString()).hello
        info = workers.worker_info(hello)
        await agent.loader.put(catalog_of(config, device))
        agent.loader.changed = True
        due = agent.dispatcher.session.heartbeat_due
        frame = agent.stream.next_frame() if due else agent.stream._heartbeat().SerializeToString()
        assert frame is not None
        event = workers.heartbeat(pb.SessionRequest.FromString(frame).heartbeat, 1)
        assert event.catalog is not None
        if event.catalog.capabilities != info.capabilities:
            raise Crash("a heartbeat offers other models than the hello before it")
        errors = {model.model_id: model.error for model in info.models if model.error}
        return {name for capability in info.capabilities for name in capability.models}, errors


def _json(rng: Random, value: dict[str, Any]) -> bytes:
    """The object with one value replaced, as JSON that may be damaged."""
    if value:
        value = value | {rng.choice(sorted(value)): rng.choice(NUMBERS)}
    data = json.dumps(value).encode()
    return data if rng.random() < 0.7 else Maker(rng).damaged(data)


def _safetensors(rng: Random) -> dict[str, bytes]:
    one = tensor([2, 2], [0, 16]) | {rng.choice(("dtype", "shape", "data_offsets")): rng.choice(NUMBERS)}
    two = tensor([rng.choice(NUMBERS), rng.choice(NUMBERS)], [rng.choice(NUMBERS), rng.choice(NUMBERS)])
    three = tensor([2**62, rng.choice((1, 2**62))], [0, 16])
    data = safetensors({"t": rng.choice((one, two, three))}, 16)
    if rng.random() < 0.2:
        data = rng.choice((b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little"))) + data[8:]
    return language_model() | {"model.safetensors": data if rng.random() < 0.8 else Maker(rng).damaged(data)}


def _gguf(rng: Random) -> dict[str, bytes]:
    counts = (0, 1, 3, 2**31, 2**53, 2**63, 2**64 - 1)
    key = rng.choice((b"general.architecture", b"a.block_count", b"a.context_length", b"\xff"))
    number = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 10, rng.choice(counts))
    text = struct.pack("<Q", len(key)) + key + struct.pack("<IQ1s", 8, 1, b"a")
    strings = gguf_strings(rng.choice(counts)) + bytes(rng.choice((0, 80, 80_000)))
    dimensions = tuple(rng.choice(counts) for _ in range(rng.choice((0, 1, 4, 9))))
    data = gguf(rng.choice((b"", number, text, strings)), rng.choice((0, 1, *counts)), dimensions, rng.choice(counts))
    return {"m.gguf": data if rng.random() < 0.8 else Maker(rng).damaged(data)}


def _archive(rng: Random) -> dict[str, bytes]:
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name in rng.sample(("m/archive_format", "../../x", "m/data/sample_inputs/model.PT", "/etc/x", "\n"), 3):
                archive.writestr(name, b"pt2")
        file.seek(0)
        data = file.read()
    return {"model.pt2": data if rng.random() < 0.5 else Maker(rng).damaged(data)}


def _toml(rng: Random) -> dict[str, bytes]:
    number = rng.choice(("1" * 40, "-1", "1e999", "inf", "nan", "0"))
    path = rng.choice(("../../etc/passwd", "/etc/passwd", "a/../..", "C:x", "", "model.safetensors"))
    lines = (
        f"instances = {number}",
        f"labels = {{ a = '{'x' * rng.choice((1, 5000, 200_000))}' }}",
        f"[parameters]\ncache_bytes = {number}\ncontext = {number}",
        f"file = '{path}'",
        f"engine = '{'a' * rng.choice((1, 300_000))}:B'",
        f"hashes = {{ '{path}' = '0' }}",
        f"versions = [{number}]",
        f"'{rng.choice(WORDS[:20])}' = {number}".replace("\0", ""),
    )
    return language_model() | {"model.toml": rng.choice(lines).encode("utf-8", "replace")}


def _layout(rng: Random) -> dict[str, bytes]:
    modules = [{"type": "a.Transformer", "path": rng.choice(("", "..", "/", "x", "a/b", None, 3))}]
    shards = {"weight_map": {"t": rng.choice(("../x", "/etc/passwd", "model.safetensors", "", "x" * 5000))}}
    name = rng.choice(("modules.json", "model.safetensors.index.json"))
    files = language_model() | {name: json.dumps(modules if name == "modules.json" else shards).encode()}
    if rng.random() < 0.5 and name != "modules.json":
        del files["model.safetensors"]
    return files


def _configuration(rng: Random) -> dict[str, bytes]:
    return language_model() | {"config.json": _json(rng, CONFIG)}


MAKERS: list[Callable[[Random], dict[str, bytes]]] = [
    *(_safetensors, _gguf, _archive, _toml, _layout, _configuration, lambda _rng: language_model())
]


def _name(rng: Random) -> bytes:
    words = ["\x1b[2J", "\u202e", "a:b", ":x", "=", "-x", "1", "\r", "a\nb", "é", "x" * 250, "\u2028", " ", "\\", "a,b"]
    name = rng.choice(words) if rng.random() < 0.7 else Maker(rng).word()
    data = name.encode("utf-8", "surrogatepass") if rng.random() < 0.9 else rng.randbytes(rng.randrange(1, 20))
    return data.replace(b"\0", b"").replace(b"/", b"")[:250].lstrip(b".") or b"a"


def put_hostile(root: Path, rng: Random) -> None:
    for _ in range(rng.choice((1, 2, 4))):
        folder = os.fsencode(root)
        for _ in range(rng.choice((1, 1, 1, 4))):
            folder += b"/" + (_name(rng) if rng.random() < 0.5 else b"m%d" % rng.randrange(9))
        try:
            put(Path(os.fsdecode(folder)), rng.choice(MAKERS)(rng))
        except (FileExistsError, NotADirectoryError):  # a file of an earlier folder has that name
            continue


class Repository:
    """A repository that is made from the input, beside a good model that must be offered."""

    def __init__(self) -> None:
        self._worker = Worker()
        memory = Path("/dev/shm")
        self._parent = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)

    def close(self) -> None:
        self._worker.close()
        self._parent.cleanup()

    def feed(self, data: bytes) -> None:
        root = Path(self._parent.name) / "models"
        try:
            put_good(root)
            put_hostile(root, Random(data))
            tracemalloc.start()
            names, _ = self._worker.report(root)
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        finally:
            shutil.rmtree(root)
        if GOOD not in names:
            raise Crash(f"the good model is not offered: {sorted(names)}")
        if taken > MEMORY_BYTES_MAX:
            raise Crash(f"reading it took {taken} bytes")


def targets(repository: Repository) -> list[Target]:
    return [Target(name="model repository", make=lambda maker: maker.rng.randbytes(8), feed=repository.feed)]

"""The engine process: owns the device and runs the engines, user code among them.

Started by the agent (processes/host.py), for a model or for what needs none. It dies with its agent, goes first when
memory runs out, and its standard output is the log's, not the protocol's.
"""

import ctypes
import dataclasses
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path

from multigpu_worker.engines.base import EmbeddingCacheSettings, EngineSettings
from multigpu_worker.engines.handlers.sources import Sources
from multigpu_worker.engines.registry import import_ahead, import_handlers, offered_kinds
from multigpu_worker.processes import ipc
from multigpu_worker.processes.blobs import BlobMemory

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJ_MAX = "1000"


def main() -> None:
    sock_fd, page_fd, blobs_fd, agent_pid = map(int, sys.argv[1:5])
    _die_with_parent(agent_pid)
    Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ_MAX, encoding="ascii")
    for fd in (sock_fd, page_fd, blobs_fd):
        os.set_inheritable(fd, False)
    sock = socket.socket(fileno=sock_fd)
    blobs = BlobMemory(blobs_fd)
    message, _ = ipc.receive(sock, blobs.down)
    _, device, slots, threads, handlers, sources, imports, how, memory_bytes, result_bytes_max, embedding_cache = (
        message
    )
    engine, precision, artifacts, artifacts_bytes_max = how
    settings = EngineSettings(
        device=device,
        slots=slots,
        threads=threads,
        handlers=tuple(handlers),
        engine=engine,
        precision=precision,
        artifacts=artifacts,
        artifacts_bytes_max=artifacts_bytes_max,
        embedding_cache=EmbeddingCacheSettings(**dict(embedding_cache)),
    )
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))

    if imports is None:
        kinds, sources = _offer(settings, sources, sock, blobs)
    else:
        kinds, sources = [], {}
        import_ahead(imports)
    ipc.send(sock, ipc.encode(("ready", kinds, sources), [], blobs.up))

    from multigpu_worker.engine.runtime import Runtime  # noqa: PLC0415  after "ready": the agent waits for that

    page = ipc.SlotPage(page_fd, settings.slots)
    if imports is not None:
        # How many of them its model uses is told with the model.
        settings = dataclasses.replace(settings, slots=1)
    runtime = Runtime(sock, page, blobs, settings, result_bytes_max=result_bytes_max)
    engine_pid = os.getpid()

    def forked() -> None:
        # A child of user code must not outlive us either, and has no business with our socket.
        runtime.forked = True
        _die_with_parent(engine_pid)
        sock.close()

    os.register_at_fork(after_in_child=forked)
    runtime.serve()


def _offer(
    settings: EngineSettings, sources: Sources, sock: socket.socket, blobs: BlobMemory
) -> tuple[list[tuple[str, bool]], Sources]:
    """The kinds that the base runs, the user's among them, and what those were imported from. Does not return if they
    can't be had.
    """

    def tell(file: str) -> None:
        ipc.send(sock, ipc.encode(("importing", file), [], blobs.up))

    try:
        sources = import_handlers(settings.handlers, sources, tell)
    except BaseException as error:  # noqa: BLE001  the user's module may raise anything, and the agent is to say it
        ipc.send(sock, ipc.encode(("rejected", _of_user(error)), [], blobs.up))
        sys.exit(1)
    return [(info.kind, info.one_by_one) for info in offered_kinds()], sources


def _of_user(error: BaseException) -> str:
    """The traceback without the frames of multigpu and importlib, which lead to the user's module."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen importlib")
    kept = [frame for frame in frames if not frame.filename.startswith(own)]
    told = traceback.format_exception_only(error)
    return "".join([*(["Traceback:\n"] if kept else []), *traceback.format_list(kept), *told])


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(0)


if __name__ == "__main__":
    main()

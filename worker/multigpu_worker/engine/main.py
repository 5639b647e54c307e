"""The main function of an engine process, which uses the device and runs engines, including user code.

The agent starts it (processes/child.py) for a model or as the default process. The kernel kills it when the agent dies,
and kills it first when the host runs out of memory. Its standard output goes to the agent's log.
"""

import dataclasses
import importlib
import os
import resource
import socket
import sys
import traceback
from pathlib import Path

import structlog
from multigpu import allow_pickle
from multigpu._handling.attempts import MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX, end_of
from multigpu.handlers import registered_handlers

from multigpu_worker.engine.channel import AgentChannel
from multigpu_worker.engines.base import EmbeddingCacheSettings, EngineSettings
from multigpu_worker.engines.handlers.sources import Sources
from multigpu_worker.engines.registry import import_ahead, import_handlers, offered_kinds
from multigpu_worker.process_group import die_with_parent
from multigpu_worker.processes.ipc.blobs import BlobMemory
from multigpu_worker.processes.ipc.slots import SlotPage

_OOM_SCORE_ADJ_MAX = "1000"


def main() -> None:
    sock_fd, page_fd, blobs_fd, agent_pid = map(int, sys.argv[1:5])
    die_with_parent(agent_pid)
    Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ_MAX, encoding="ascii")
    for fd in (sock_fd, page_fd, blobs_fd):
        os.set_inheritable(fd, False)
    channel = AgentChannel(socket.socket(fileno=sock_fd), BlobMemory(blobs_fd))
    # Without the values of variables in tracebacks: they may be the texts of callers, or weights.
    render = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], render])
    (_, plain, slots, sources, imports, memory_bytes, result_bytes_max), _ = next(channel.frames)
    settings = EngineSettings(**plain | {"embedding_cache": EmbeddingCacheSettings(**plain["embedding_cache"])})
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))

    if imports is None:
        kinds, sources = _import_handlers(settings, sources, channel)
    else:
        kinds, sources = [], {}
        import_ahead(imports)
    channel.send(("ready", kinds, sources))

    from multigpu_worker.engine.runtime import Runtime  # noqa: PLC0415  after "ready": the agent waits for that

    if imports is not None:
        # The message that loads the model contains the number of slots.
        settings = dataclasses.replace(settings, slots=1)
    runtime = Runtime(channel, SlotPage(page_fd, slots), settings, result_bytes_max=result_bytes_max)
    engine_pid = os.getpid()

    def forked() -> None:
        # A child process of user code must not outlive this process.
        die_with_parent(engine_pid)
        channel.close_in_child()

    os.register_at_fork(after_in_child=forked)
    runtime.serve()


def _import_handlers(
    settings: EngineSettings, sources: Sources, channel: AgentChannel
) -> tuple[list[tuple[str, bool, int, float]], Sources]:
    """Import the user's handlers and instantiate the classes among them. Returns the kinds that this process runs, and
    the sources that were imported.

    If that fails, sends the agent the error and ends the process.
    """
    allow_pickle(settings.allow_pickle)
    try:
        sources = import_handlers(settings.handlers, sources, lambda file: _report_import(channel, file))
        if registered_handlers():
            importlib.import_module("multigpu_worker.engines.handlers.engine").instantiate(settings.device)
    except BaseException as error:  # noqa: BLE001  the user's module may raise anything
        channel.send(("rejected", _of_user(error)))
        sys.exit(1)
    return [(info.kind, info.one_by_one, info.tasks_max, info.delay_s) for info in offered_kinds(settings)], sources


def _report_import(channel: AgentChannel, file: str) -> None:
    channel.send(("importing", end_of(file, MESSAGE_BYTES_MAX)))  # a file name may not be valid UTF-8


def _of_user(error: BaseException) -> str:
    """The end of the traceback as text, without the frames of this package and of importlib that lead to the user's
    module.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen importlib")
    kept = [frame for frame in frames if not frame.filename.startswith(own)]
    lines = traceback.format_exception_only(error)
    text = "".join([*(["Traceback:\n"] if kept else []), *traceback.format_list(kept), *lines])
    return end_of(text, TRACEBACK_BYTES_MAX)


if __name__ == "__main__":
    main()

"""The ranks of a task that several workers run: who they are, and torch.distributed's process group of them.

Rank 0 has a TCPStore, where the ranks meet. Its server stays until the process ends, for the gangs that follow: torch
can't close it, and keeps it alive where it likes (torch.optim does).
"""

from __future__ import annotations

import errno
import importlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from multigpu.config.values import split_address

T = TypeVar("T")

# The agent tells the engine by these parameters, which a task's own cannot have.
PREFIX = "multigpu."
RANK, WORLD_SIZE = f"{PREFIX}rank", f"{PREFIX}world_size"
STORE, RUN_ID = f"{PREFIX}store", f"{PREFIX}run_id"
# How long rank 0 waits for the port, which another engine of its worker may hold that is about to end.
PORT_S = 20.0
# How long the others try again to meet rank 0.
MEET_S = 60.0
# How long an error that follows from another rank's end is kept back: longer than the master needs to notice that end.
HOLD_S = 15.0
_POLL_S = 0.05

_server: tuple[str, Any] | None = None  # its address, and it


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in the gang. `store`: HOST:PORT of rank 0's store; empty if there is only one rank. `run_id`: of
    this run of the task, the same for all ranks.
    """

    rank: int = 0
    world_size: int = 1
    store: str = ""
    run_id: str = ""


ALONE = Place()


def place_of(parameters: Mapping[str, str]) -> Place:
    if WORLD_SIZE not in parameters:
        return ALONE
    return Place(int(parameters[RANK]), int(parameters[WORLD_SIZE]), parameters[STORE], parameters[RUN_ID])


def own_parameters(parameters: Mapping[str, str]) -> Mapping[str, str]:
    """A task's own parameters."""
    if WORLD_SIZE not in parameters:
        return parameters
    return {name: value for name, value in parameters.items() if not name.startswith(PREFIX)}


def init_process_group(place: Place, backend: str) -> None:
    """Makes the default process group of torch.distributed. Waits until all ranks have come."""
    distributed: Any = importlib.import_module("torch.distributed")

    def init(store: Any) -> None:
        destroy_process_group()  # of a task before, whose handler could not
        try:
            distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
        except BaseException:
            _restart_numbering(distributed)
            raise

    meet(place, init)


def _restart_numbering(distributed: Any) -> None:
    """Make the next group number 0 again, as at the other ranks. Torch counts the groups of a process, also those that
    failed, and ranks meet under this number. The end of a default group restarts the count.
    """
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    destroy_process_group()


def meet(place: Place, use: Callable[[Any], T]) -> T:
    """Calls `use` with the store where the ranks of this run meet, and returns what it returns. Calls it again if it
    was connected to the engine of an earlier rank 0, which has ended since: torch.distributed.DistNetworkError.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    end_s = time.monotonic() + MEET_S
    while True:
        try:
            store = _store_of(place, distributed) if place.store else distributed.HashStore()
            return use(distributed.PrefixStore(place.run_id, store))
        except distributed.DistNetworkError:
            if not place.rank or time.monotonic() > end_s:
                raise
            time.sleep(_POLL_S)


def destroy_process_group() -> None:
    """Ends the process group, if there is one."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _store_of(place: Place, distributed: Any) -> Any:
    global _server  # noqa: PLW0603  one for each process
    host, port = split_address(place.store)
    if place.rank:
        return distributed.TCPStore(host, port, wait_for_workers=False)
    if _server is None or _server[0] != place.store:
        _server = place.store, serve_store(host, port)
    return _server[1]


def serve_store(host: str, port: int = 0) -> Any:
    """A TCPStore that listens at this address alone, until it is dropped. By itself, it would at all of the host's."""
    distributed: Any = importlib.import_module("torch.distributed")
    listening = _listen(host, port)
    return distributed.TCPStore(
        host, listening.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _listen(host: str, port: int) -> socket.socket:
    end_s = time.monotonic() + PORT_S
    while True:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > end_s:
                what = f"rank 0 can't listen at {host} port {port}: {error.strerror}; restart its worker"
                raise OSError(error.errno, what) from error
            time.sleep(_POLL_S)
        else:
            return listening


def hold_back(error: BaseException, cancelled: Callable[[], bool]) -> None:
    """Waits, if the error says that a collective lost another rank, until the attempt is cancelled: what happened to
    that rank is the cause, and must reach the master first.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None:  # torch can't be imported
        return
    # Gloo's errors have no class of their own.
    if isinstance(error, distributed.DistError) or (type(error) is RuntimeError and "gloo" in str(error)):
        wait_for_cause(cancelled)


def wait_for_cause(cancelled: Callable[[], bool]) -> None:
    """Waits until the attempt is cancelled, for a while at most."""
    end_s = time.monotonic() + HOLD_S
    while time.monotonic() < end_s and not cancelled():
        time.sleep(_POLL_S)

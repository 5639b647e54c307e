"""The ranks of a task that several workers run: who they are, and torch.distributed's process group of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The agent tells the engine by these parameters, which a task's own cannot have.
PREFIX = "multigpu."
RANK, WORLD_SIZE, STORE = f"{PREFIX}rank", f"{PREFIX}world_size", f"{PREFIX}store"


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in the gang. `store`: HOST:PORT of rank 0's store; empty if there is only one rank."""

    rank: int = 0
    world_size: int = 1
    store: str = ""


def place_of(parameters: Mapping[str, str]) -> Place:
    if WORLD_SIZE not in parameters:
        return Place()
    return Place(int(parameters[RANK]), int(parameters[WORLD_SIZE]), parameters[STORE])


def own_parameters(parameters: Mapping[str, str]) -> Mapping[str, str]:
    """A task's own parameters."""
    if WORLD_SIZE not in parameters:
        return parameters
    return {name: value for name, value in parameters.items() if not name.startswith(PREFIX)}


def init_process_group(place: Place, attempt: str, backend: str) -> None:
    """Makes the default process group of torch.distributed. Waits until all ranks have come.

    `attempt`: names the attempt, the same for all ranks.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if place.store:
        host, _, port = place.store.rpartition(":")
        store = distributed.TCPStore(host.strip("[]"), int(port), place.world_size, is_master=place.rank == 0)
    else:
        store = distributed.HashStore()
    distributed.init_process_group(
        backend, store=distributed.PrefixStore(attempt, store), rank=place.rank, world_size=place.world_size
    )


def destroy_process_group() -> None:
    """Ends the process group, if there is one."""
    distributed: Any = importlib.import_module("torch.distributed")
    if distributed.is_initialized():
        distributed.destroy_process_group()

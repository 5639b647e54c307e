"""For scripts of training jobs (`mgpuctl train run`, Client.train): what they report, and checkpoints that survive.

A checkpoint is written by torch.distributed.checkpoint, each rank its part, into a new folder, and counts once all
ranks have synced their files and rank 0 has written the file COMMITTED. So `restore` finds the last whole one, also
after a loss of power, and on any number of ranks. Under plain torchrun or python, checkpoints are kept in ./job, and
nothing is reported.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from multigpu._checkpoints import Store, store_of
from multigpu._kinds.training import CHECKPOINTS_VARIABLE, tell

# Metrics in a report, and the length of their names.
METRICS_MAX, NAME_MAX = 64, 64

_saving: _Saving | None = None  # the checkpoint under way
_group: Any = None  # of all ranks, on CPUs


def report(metrics: Mapping[str, float], *, step: int | None = None, fraction: float | None = None) -> None:
    """Reports metrics of the job, such as {"loss": 2.31}. With several ranks, only those of rank 0 are kept.

    `step`: to which they belong; reports of one step add to each other. `fraction`: how much of the job is done, 0 to
    1. They are kept with the job, fewer of a long job: `mgpuctl train metrics`. Never blocks. TypeError, ValueError: a
    metric is no number, or there are too many.
    """
    if not 0 < len(metrics) <= METRICS_MAX:
        raise ValueError(f"report takes 1 to {METRICS_MAX} metrics, not {len(metrics)}")
    values = {_name(name): float(value) for name, value in metrics.items()}
    if fraction is not None:
        fraction = float(fraction)
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction is {fraction}; it must be 0 to 1")
    finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    event = {"metrics": finite, "step": None if step is None else int(step), "fraction": fraction}
    tell(event)


def _name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric is a str, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of a metric is valid Unicode, not {name[:NAME_MAX]!r}") from error
    if not name or len(name) > NAME_MAX:
        raise ValueError(f"the name of a metric has 1 to {NAME_MAX} characters, not {name[: NAME_MAX + 1]!r}")
    return name


def checkpoint(state: Mapping[str, Any], step: int, *, keep: int = 2, wait: bool = False) -> None:
    """Writes a checkpoint of all ranks: every rank calls it, with the same names and step.

    `state`: by name, modules, their optimizers, and other objects with `state_dict` and `load_state_dict` (schedulers,
    samplers). Those other objects are equal on all ranks, or have a name for each rank. Sharded modules (FSDP2) and
    plain ones are saved alike.

    Returns when the state is copied; it is written meanwhile, and another call waits for that. `wait`: returns when it
    is written. The last `keep` checkpoints are kept. Raises what went wrong with this checkpoint or with the one
    before: OSError, torch.distributed.checkpoint.CheckpointException. TypeError: `state` holds something else.
    """
    global _saving  # noqa: PLW0603  one for each process
    finish()
    if keep < 1:
        raise ValueError(f"keep is {keep}; it must be at least 1")
    if step < 0:
        raise ValueError(f"step is {step}; it must not be negative")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    savable = _savable(state)
    place = _shared(lambda: _store().new(step))
    future = dcp.async_save(savable, checkpoint_id=place, process_group=_cpu_group(), no_dist=not _ranks())
    _saving = _Saving(future, place, step, keep)
    if wait:
        finish()


def finish() -> None:
    """Waits until the checkpoint under way is committed. Every rank calls it before the process group is destroyed:
    else that checkpoint is not committed, and this raises UnfinishedError. Raises also as `checkpoint`.
    """
    global _saving
    saving, _saving = _saving, None
    if saving is not None:
        saving.wait()


def restore(state: Mapping[str, Any]) -> int:
    """Loads the last committed checkpoint into the objects of `state`, and returns its step; 0: there is none.

    Every rank calls it, as `checkpoint`, with the same names. The number of ranks may differ, unless an object has a
    name for each rank. TypeError: as `checkpoint`.
    """
    finish()
    savable = _savable(state)
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    found = _shared(_last_committed)
    if found is None:
        return 0
    step, place = found
    dcp.load(savable, checkpoint_id=place, process_group=_cpu_group(), no_dist=not _ranks())
    return int(step)


class UnfinishedError(RuntimeError):
    """The process group ended before a checkpoint was written."""


class _Saving:
    """A checkpoint that is being written."""

    def __init__(self, written: Future[Any], place: str, step: int, keep: int) -> None:
        """`written`: done on each rank once all ranks have written and synced their files."""
        self._world = _world()
        self._place = place
        self._step = step
        self._keep = keep
        self._written = written
        self._committed: Future[None] = Future()
        if _rank():
            self._committed.set_result(None)
        else:
            written.add_done_callback(self._finish)

    def wait(self) -> None:
        self._written.result()
        self._committed.result()

    def _finish(self, written: Future[Any]) -> None:
        """On rank 0, by the thread that has written."""
        try:
            if written.exception() is None:
                self._commit()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            logging.getLogger("multigpu").warning("%s", error)  # nobody may wait
            self._committed.set_exception(error)
        else:
            self._committed.set_result(None)

    def _commit(self) -> None:
        if _world() is not self._world:  # each rank may have written alone
            raise UnfinishedError(
                f"the checkpoint of step {self._step} is not committed: the process group was destroyed before it was "
                "written; call multigpu.train.finish() first, on every rank"
            )
        store = _store()
        store.commit(self._place, self._step)
        tell({"checkpoint": {"step": self._step, "folder": self._place}})
        for _, old in store.committed()[: -self._keep]:
            store.remove(old)


def _store() -> Store:
    where = os.environ.get(CHECKPOINTS_VARIABLE)
    return store_of(where or str(Path("job").absolute() / "checkpoints"))


def _last_committed() -> tuple[int, str] | None:
    """On rank 0. Removes what earlier attempts have not finished."""
    store = _store()
    store.remove_unfinished()
    committed = store.committed()
    return committed[-1] if committed else None


def _ranks() -> int:
    """How many ranks have a process group; 0: there is none."""
    distributed: Any = importlib.import_module("torch.distributed")
    return int(distributed.get_world_size()) if distributed.is_available() and distributed.is_initialized() else 0


def _world() -> Any:
    """The process group of all ranks; None: there is none."""
    distributed: Any = importlib.import_module("torch.distributed")
    return distributed.group.WORLD if _ranks() else None


def _rank() -> int:
    distributed: Any = importlib.import_module("torch.distributed")
    return int(distributed.get_rank()) if _ranks() else 0


def _cpu_group() -> Any:
    """A process group of all ranks for what is written: a checkpoint must not use the GPUs' while they train."""
    global _group  # noqa: PLW0603  one for each process
    if not _ranks():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single rank is no mistake
        return None
    distributed: Any = importlib.import_module("torch.distributed")
    world = _world()
    if _group is None or _group[0] is not world:
        _group = world, distributed.new_group(backend="gloo")
    return _group[1]


def _shared(call: Any) -> Any:
    """What `call` returns on rank 0, on all ranks; what it raises there, it raises on all ranks."""
    if _ranks() < 2:
        return call()
    distributed: Any = importlib.import_module("torch.distributed")
    said: list[Any] = [None, None]
    if not _rank():
        try:
            said[0] = call()
        except OSError as error:
            said[1] = error
        except Exception as error:  # noqa: BLE001  the others wait; they may not be able to unpickle it
            said[1] = RuntimeError(f"{type(error).__name__}: {error}")
    distributed.broadcast_object_list(said, 0, group=_cpu_group())
    if said[1] is not None:
        raise said[1]
    return said[0]


def _savable(state: Mapping[str, Any]) -> dict[str, Any]:
    """The objects as torch.distributed.checkpoint takes them."""
    nn: Any = importlib.import_module("torch.nn")
    optim: Any = importlib.import_module("torch.optim")
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    savable: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            savable[name] = _Module(value)
        elif isinstance(value, optim.Optimizer):
            savable[name] = _Optimizer(_owner(name, value, modules), value)
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            savable[name] = value
        else:
            raise TypeError(
                f"state[{name!r}] is of type {type(value).__name__}; it must be a module, an optimizer, or have "
                "state_dict and load_state_dict"
            )
    return savable


def _owner(name: str, optimizer: Any, modules: list[Any]) -> Any:
    """The module whose parameters an optimizer has."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules:
        if parameters <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise TypeError(f"state[{name!r}] is an optimizer of parameters that no module in state has: give its module too")


class _Module:
    def __init__(self, module: Any) -> None:
        self._module = module

    def state_dict(self) -> Any:
        return _states().get_model_state_dict(self._module)

    def load_state_dict(self, state: Any) -> None:
        _states().set_model_state_dict(self._module, state)


class _Optimizer:
    def __init__(self, module: Any, optimizer: Any) -> None:
        self._module = module
        self._optimizer = optimizer

    def state_dict(self) -> Any:
        return _states().get_optimizer_state_dict(self._module, self._optimizer)

    def load_state_dict(self, state: Any) -> None:
        _states().set_optimizer_state_dict(self._module, self._optimizer, state)


def _states() -> Any:
    return importlib.import_module("torch.distributed.checkpoint.state_dict")

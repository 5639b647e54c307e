"""The process of one model: it imports libraries, and loads a model on request. models/loader.py handles its death."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from multigpu_worker.processes.child import ProcessSettings
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.process import Callbacks, EngineProcess
from multigpu_worker.processes.reports import ModelLoaded, read_facts, read_loaded
from multigpu_worker.repository.model import ModelSpec

# Capacity of the shared page, which is created before the model is known. `load` sets how many slots are used.
MODEL_SLOTS_MAX = 256


class ModelLoaderCallbacks(Protocol):
    def model_loaded(self, process: "ModelProcess", report: ModelLoaded) -> None: ...
    def load_failed(self, process: "ModelProcess", error_type: str, message: str, *, retryable: bool) -> None: ...
    def facts_changed(self, process: "ModelProcess", facts: dict[str, str]) -> None: ...


class ModelProcess(EngineProcess):
    """Runs one model, once it is assigned one."""

    def __init__(
        self,
        settings: ProcessSettings,
        callbacks: Callbacks,
        loader: ModelLoaderCallbacks,
        imports: tuple[str, ...],
    ) -> None:
        super().__init__(settings, callbacks, MODEL_SLOTS_MAX, imports)
        self._loader = loader
        self._load: frames.Message | None = None
        # Kills the process if it outlives the grace period of `end`.
        self._end_timer: asyncio.TimerHandle | None = None
        self._respawn()

    def load(self, model: str, spec: ModelSpec, slots: int) -> None:
        """Make the process load a model, whose key in the pool is `model`.

        It sends "loaded" or "load_failed", or dies.
        """
        assert slots <= MODEL_SLOTS_MAX
        self.model, self.model_id, self.slots = model, spec.id, slots
        self._load = ("load", spec.id, spec.plain(), slots)
        self._send_load()

    def end(self, grace_s: float) -> None:
        """Let the process write its files and end; kill it after `grace_s`."""
        self.takes_no_batches = True
        if self.stopping or self._dying:
            return
        self.stopping = True
        if self.child is None:
            self._loop.call_soon(self._died, Death(returncode=0, slots=[]))
        else:
            self.child.ready, self.child.last = False, True
            self.child.channel.send(("close", self.settings.mps is None), [])
            self._end_timer = self._loop.call_later(grace_s, self.child.kill)

    def _spawn(self) -> None:
        super()._spawn()
        self._send_load()

    def _send_load(self) -> None:
        if self.child is not None and self._load is not None:
            self.child.page.slots = self.slots
            self.child.channel.send(self._load, [])

    def parse_frame(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        match message[0]:
            case "ready":
                return lambda: None
            case "closed":  # sent under MPS only: `kill` detaches the process from the GPU, then ends it
                return self.kill
            case "loaded" | "facts" | "load_failed" if not self.model:
                raise ValueError("the process has no model")
            case "loaded":
                return partial(self._loaded, read_loaded(message))
            case "facts":
                return partial(self._loader.facts_changed, self, read_facts(message[1]))
            case "load_failed":
                _, error_type, text, retryable = message
                return partial(self._loader.load_failed, self, str(error_type), str(text), retryable=bool(retryable))
            case _:
                return super().parse_frame(message, blobs)

    def _loaded(self, loaded: ModelLoaded) -> None:
        assert self.child is not None
        self.child.ready = not self.child.killed and not self.stopping
        self.share()
        self._loader.model_loaded(self, loaded)

    def _died(self, death: Death) -> None:
        self.stopping = True
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._output.close()
        super()._died(death)

"""The process of one model: it imports libraries, loads a model on request, and is not restarted when it dies."""

import asyncio
from collections.abc import Callable
from functools import partial

from multigpu_worker.processes.death import Death
from multigpu_worker.processes.host import EngineHost, EngineProcessCallbacks, ProcessSettings
from multigpu_worker.processes.ipc import frames
from multigpu_worker.repository.model import ModelSpec

# Capacity of the shared page, which is created before the model is known. `load` sets how many slots are used.
MODEL_SLOTS_MAX = 256


class ModelHost(EngineHost):
    def __init__(self, settings: ProcessSettings, callbacks: EngineProcessCallbacks, imports: tuple[str, ...]) -> None:
        super().__init__(settings, callbacks, MODEL_SLOTS_MAX)
        self.imports = imports
        self._load: frames.Message | None = None
        # Kills the process if it outlives the grace period of `end`.
        self._end_timer: asyncio.TimerHandle | None = None
        self._respawn()

    def load(self, model_id: str, spec: ModelSpec, slots: int) -> None:
        """Make the process load a model. It sends "loaded" or "load_failed", or dies."""
        assert slots <= MODEL_SLOTS_MAX
        self.page.slots = slots
        self._load = ("load", model_id, spec.plain(), slots)
        if self.channel is not None:
            self._send(self._load, [])

    def end(self, grace_s: float) -> None:
        """Let the process write its files and end; kill it after `grace_s`."""
        self.ready = False
        if self.stopping:
            return
        self.stopping = True
        if self.channel is None:
            self._loop.call_soon(self._died, Death(returncode=0, slots=[]))
        else:
            self._send(("close", self.mps is None), [])
            self._end_timer = self._loop.call_later(grace_s, self.kill)

    def _spawn(self) -> None:
        super()._spawn()
        if self._load is not None:
            self._send(self._load, [])

    def _read(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        match message[0]:
            case "ready":
                return lambda: None
            case "loaded":
                return partial(self._loaded, self.callbacks.read(message, blobs))
            case "closed":  # under MPS: `kill` detaches the process from the GPU before it ends
                return self.kill
            case _:
                return self.callbacks.read(message, blobs)

    def _loaded(self, frame: Callable[[], None]) -> None:
        self.ready = self._detaching is None and not self.stopping
        frame()

    def _died(self, death: Death) -> None:
        self.stopping = True
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._release()
        self.callbacks.engine_died(death)

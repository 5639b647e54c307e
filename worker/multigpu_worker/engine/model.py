"""Loads the model of an engine process, and sends its facts, or the error, to the agent."""

import sys
import time
import traceback

from multigpu._handling.attempts import MESSAGE_BYTES_MAX, TYPE_BYTES_MAX, message_of, text_of

from multigpu_worker.engine.channel import AgentChannel
from multigpu_worker.engines.base import EngineSettings, HasSignature, ModelEngine
from multigpu_worker.engines.registry import build_model_engine
from multigpu_worker.repository.files import require_hashes
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.signature import UNKNOWN

# Estimated memory of a CUDA context, which torch does not count.
CUDA_CONTEXT_BYTES = 400 << 20

FACTS_INTERVAL_S = 1.0


class LoadedModel:
    """A model's engine and its facts (see ModelEngine.load). The engine may change the facts."""

    def __init__(self, kind: str, engine: ModelEngine, facts: dict[str, str]) -> None:
        self.kind = kind
        self.engine = engine
        self._facts = facts
        self.facts_sent = _plain(facts)
        self.signature = engine.signature() if isinstance(engine, HasSignature) else UNKNOWN

    def send_facts_forever(self, channel: AgentChannel) -> None:
        """Send the facts whenever they have changed, also while a batch runs."""
        while True:
            time.sleep(FACTS_INTERVAL_S)
            facts = _plain(self._facts)
            if facts != self.facts_sent:
                self.facts_sent = facts
                channel.send(("facts", facts))


def load(channel: AgentChannel, settings: EngineSettings, spec: ModelSpec) -> LoadedModel | None:
    """Load a model. If that fails, send the agent the error and return None."""
    # The engine may be a module of the user, in the model's folder.
    if ":" in spec.engine or spec.source == "safetensors":
        sys.path.insert(0, str(spec.folder))
    try:
        require_hashes(spec)
        engine = build_model_engine(spec, settings)
        return LoadedModel(spec.kind, engine, engine.load())
    except BaseException as error:  # noqa: BLE001  whatever loading raises is due to the model, or to a lack of memory
        traceback.print_exc()
        message = text_of(message_of(error) or type(error).__name__, MESSAGE_BYTES_MAX)
        error_type = text_of(type(error).__name__, TYPE_BYTES_MAX)
        channel.send(("load_failed", error_type, message, getattr(error, "retryable", True)))
        return None


def _plain(facts: dict[str, str]) -> dict[str, str]:
    """Facts as they are sent. Copied first: another thread may change them."""
    return {str(name): str(fact) for name, fact in facts.copy().items()}


def device_bytes() -> int:
    """GPU memory of this process as torch counts it, for drivers that don't report it. 0: CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved()) + CUDA_CONTEXT_BYTES

"""The engine for tasks of kind "generate" on torch: text in, its continuation out, token by token.

All slots pass their sequences to one scheduler (scheduler.py), which runs them through the model together.

If an attempt is lost, the next one runs the chunks that the master has through the model as part of the prompt, and
continues with the next token. The answer is the same, because a token depends only on the input, the seed and its
position.

Messages: protos/multigpu/v1/generate.proto.
"""

import dataclasses
import os
from typing import TYPE_CHECKING

from multigpu_worker.engines.common.precision import choose_for_torch
from multigpu_worker.engines.generate.text_engine import TextEngine

if TYPE_CHECKING:
    from multigpu_worker.engines.generate.model import GenerateModel
    from multigpu_worker.engines.generate.scheduler import Scheduler


class GenerateEngine(TextEngine):
    """Generates text with one model."""

    _model: "GenerateModel | None"
    _runner: "Scheduler | None"

    def load(self) -> dict[str, str]:
        """Load the model and run its trial."""
        from multigpu_worker.engines.common.torch_runtime import bind  # noqa: PLC0415 (takes seconds: torch)
        from multigpu_worker.engines.generate.model import load_model, load_shared_model  # noqa: PLC0415 (as above)
        from multigpu_worker.engines.generate.scheduler import Scheduler  # noqa: PLC0415 (as above)

        precision = choose_for_torch(self._spec, self._settings)

        settings, ranks = self._settings, self._spec.ranks
        if ranks > 1:
            threads = settings.threads or len(os.sched_getaffinity(0))
            settings = dataclasses.replace(settings, threads=max(1, threads // ranks))

        def set_up() -> None:
            bind(settings.threads, tf32=precision == "tf32")

        set_up()
        if ranks > 1:
            model = load_shared_model(self._spec, settings, precision)
        else:
            model = load_model(self._spec, settings, precision)
        self._model, self._runner = model, Scheduler(model, set_up)
        return {"engine": "torch", "precision": precision, **model.facts}

    def close(self) -> None:
        super().close()
        if self._model is not None and self._model.group is not None:
            self._model.group.close()

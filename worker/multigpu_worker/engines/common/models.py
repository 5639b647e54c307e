"""The models that an engine has in memory, by engine and precision."""

import gc
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.failures import LOADING_ERRORS, Failure, of_loading
from multigpu_worker.engines.common.precision import Variant, choose, spec_of
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

M = TypeVar("M")


class LoadedModels(Generic[M]):
    """The configured variant of the model, and of other variants the one that tasks asked for last."""

    def __init__(
        self, settings: EngineSettings, load: Callable[[ModelSpec, Variant], tuple[M, dict[str, str]]]
    ) -> None:
        """`load` returns a model and facts for people."""
        self._settings = settings
        self._load = load
        self.loaded: dict[tuple[str, Variant], M] = {}

    def load_default(self) -> dict[str, str]:
        """Load the configured variant of the first model, and return its facts."""
        spec = next(iter(self._settings.models.values()))
        try:
            return self._add(spec, choose(spec, self._settings, {}))
        except ValueError as error:
            raise ModelFolderError(f"{spec.id}: {error}: correct model.toml") from error

    def get(self, name: str, parameters: Mapping[str, str]) -> M | Failure:
        """The model for a batch, loaded if necessary, or why it cannot run. Empty name: the first model."""
        try:
            spec = spec_of(self._settings.models, name)
            variant = choose(spec, self._settings, parameters)
            if (spec.id, variant) not in self.loaded:
                self._add(spec, variant)
            return self.loaded[spec.id, variant]
        except LOADING_ERRORS as error:
            return of_loading(error)

    def _add(self, spec: ModelSpec, variant: Variant) -> dict[str, str]:
        # Make room before loading: keep the first model only. Prepared batches keep theirs until they have run.
        for key in list(self.loaded)[1:]:
            del self.loaded[key]
        gc.collect()
        self.loaded[spec.id, variant], facts = self._load(spec, variant)
        return facts

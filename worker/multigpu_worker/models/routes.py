"""The route table of a worker: which version of which model serves the names that tasks use.

Pure. The repository may change while the worker runs:

- A name whose model is in memory keeps it until the new version is ready, and for good if the new version is broken.
  Any other name goes to the new version at once.
- A name that the repository no longer lists (such as "m:1" after version 2 has replaced it as the latest) keeps its
  model while that is in memory. The name is offered as long as the model also serves listed names; after that, the
  worker only runs the leases that it holds.
- Tasks without a model name keep the same model while the repository has it, even if it is broken. They never move to
  another model.
"""

from collections.abc import Callable

from multigpu_worker.models import catalog as catalogs
from multigpu_worker.models.measured_sizes import ModelSize
from multigpu_worker.models.residency import ModelState, Resident
from multigpu_worker.repository.model import BatchRules, ModelSpec, Scan
from multigpu_worker.session.lease import Spec

# Kind and model name; the name is empty for the kind's default model.
Route = tuple[str, str]


class ModelRoutes:
    """`engine`: the engine of models that do not choose one. `size_of`: the expected size of a model."""

    def __init__(
        self, catalog: Scan, engine: str, size_of: Callable[[ModelSpec], ModelSize] = lambda _: ModelSize()
    ) -> None:
        self.engine = engine
        self._size_of = size_of
        self.catalog = Scan()
        self.residents: dict[str, Resident] = {}
        # The key of the model that serves a name now, and of the one that is to serve it.
        self.table: dict[Route, str] = {}
        self._next: dict[Route, str] = {}
        # Keys of the models that serve a name which the repository lists.
        self.serving: set[str] = set()
        # The newest key of each model id.
        self._newest: dict[str, str] = {}
        self._made = 0
        self.put(catalog)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def serves(self, kind: str) -> bool:
        """Whether tasks of this kind run on a model."""
        return (kind, "") in self.table

    def key_of(self, spec: Spec) -> str | None:
        """The key of the model that tasks of this spec run on; None: there is none."""
        return self.table.get((spec.kind, spec.model))

    def why_not(self, spec: Spec) -> str:
        """The error for tasks whose model this worker does not have."""
        return catalogs.unknown(spec.kind, spec.model, dict(self.offers()).get(spec.kind, ()))

    def other_versions(self, spec: Spec) -> list[str]:
        """The ids of the served versions of the model that a spec names with a version."""
        return catalogs.other_versions(spec.model, dict(self.offers()).get(spec.kind, ()))

    def rules(self) -> dict[Route, BatchRules]:
        """How batches for each name are formed."""
        return {route: self.residents[key].spec.batch for route, key in self.table.items()}

    def imports_of(self, resident: Resident) -> tuple[str, ...]:
        """What a process can import before it loads this model."""
        return catalogs.imports_of(resident.spec, self.engine)

    def replaced(self) -> list[Resident]:
        """Loaded models that serve no name which the repository lists."""
        residents = self.residents.values()
        return [r for r in residents if r.state is ModelState.READY and r.key not in self.serving and not r.upcoming]

    def offers(self) -> list[tuple[str, list[str]]]:
        """Each kind with the names that its tasks may use; those of the default model come first."""
        found: dict[str, list[str]] = {}
        for (kind, name), key in self.table.items():
            if key not in self.serving:
                continue
            found.setdefault(kind, [])
            if name:
                found[kind].append(name)
        for kind, names in found.items():
            default = self.table.get((kind, ""))
            names.sort(key=lambda name, kind=kind, default=default: self.table[kind, name] != default)  # type: ignore[misc]
        return list(found.items())

    # --- changes -----------------------------------------------------------------------------------------------------

    def put(self, catalog: Scan) -> None:
        """Apply a new scan of the repository."""
        self.catalog = catalog
        for model, spec in catalog.models.items():
            self._add(model, spec)
        self._next = {route: self._newest[model] for route, model in catalogs.routes_of(catalog).items()}
        broken = {model.partition(":")[0] for model in catalog.errors}
        below = tuple(f"{folder}/" for folder in catalog.unreadable)
        for route, key in self.table.items():
            resident = self.residents.get(key)
            if resident is None or key not in self.serving:
                continue
            kind, name = route
            named = kind, resident.spec.name
            is_broken = resident.spec.name in broken or resident.spec.name.startswith(below)
            in_memory, listed = resident.state is not ModelState.ABSENT, route in self._next
            if not name and named in self._next:  # the default stays the same model
                self._next[route] = self._next[named]
            # A broken model, or one in a namespace that can't be read, keeps its names while it is in memory. The empty
            # name never moves to another model instead, so its tasks then fail.
            elif is_broken and (not name if listed else in_memory):
                self._next[route] = key
        self.switch()

    def _add(self, model: str, spec: ModelSpec) -> None:
        """Make a resident for a new or changed model."""
        before = self.residents.get(self._newest.get(model, ""))
        if before is not None and before.spec == spec:
            return
        if before is not None and before.state is ModelState.ABSENT and not before.upcoming:
            del self.residents[before.key]
        self._made += 1
        key = model if model not in self.residents else f"{model}#{self._made}"
        size = self._size_of(spec)
        self.residents[key] = Resident(
            key=key, spec=spec, memory_bytes=size.memory_bytes, load_s=size.load_s, measured=size.measured,
            signature=size.signature,
        )  # fmt: skip
        self._newest[model] = key

    def switch(self) -> None:
        """Move each name to its new version if that is ready, or if the old version is not in memory."""
        in_use = (ModelState.LOADING, ModelState.READY)
        table = {}
        for route, key in self._next.items():
            before = self.residents.get(self.table.get(route, ""))
            keep = (
                before is not None
                and before.key != key
                and before.state in in_use
                and self.residents[key].state is not ModelState.READY
                and not before.unwanted
            )
            table[route] = before.key if keep and before is not None else key
        self.serving = set(table.values())
        upcoming = {key for route, key in self._next.items() if table[route] != key}
        for route, key in self.table.items():
            resident = self.residents.get(key)
            if route not in table and resident is not None and resident.state in in_use:
                table[route] = key
        self.table = table
        for resident in list(self.residents.values()):
            resident.upcoming = resident.key in upcoming
            serves = resident.key in self.serving or resident.upcoming
            if not serves and resident.state is ModelState.ABSENT:
                del self.residents[resident.key]

"""The models that a worker has, by the names that tasks call them: which version serves a name now, and which is to.

Pure. The repository may change while the worker runs. A name whose model is in memory stays with it until its new
version is ready, and with the old one for good where the new one is broken; any other name goes to the new one at once.
A name that the repository lists no more ("m:1", where the latest version is served and that is 2 by now) means its
model as long as that is in memory. It is offered as long as the model serves; after that only what is held is run.
Tasks that name no model go on with the same one as long as the repository has it, even broken: never with another.
"""

from collections.abc import Callable

from multigpu.v1 import model_pb2

from multigpu_worker.models import catalog as catalogs
from multigpu_worker.models.catalog import Catalog
from multigpu_worker.models.residency import ModelState, Resident

Route = tuple[str, str]


class Shelf:
    """`engine`: the worker's choice for models that make none. `expect` notes of a new model what it is to take."""

    def __init__(self, catalog: Catalog, engine: str, expect: Callable[[Resident], None] = lambda _: None) -> None:
        self.engine = engine
        self._expect = expect
        self.catalog = Catalog()
        self.residents: dict[str, Resident] = {}
        # By kind and name: the keys of those that serve it now, and of those that are to.
        self.routes: dict[Route, str] = {}
        # The keys of those that serve what the repository lists.
        self.serving: set[str] = set()
        self._next: dict[Route, str] = {}
        # The newest of each id.
        self._newest: dict[str, str] = {}
        self._made = 0
        self.put(catalog)

    def put(self, catalog: Catalog) -> None:
        """What there is now."""
        self.catalog = catalog
        for model, spec in catalog.specs.items():
            before = self.residents.get(self._newest.get(model, ""))
            if before is not None and before.spec == spec:
                continue
            if before is not None and before.state is ModelState.ABSENT and not before.upcoming:
                del self.residents[before.key]
            self._made += 1
            key = model if model not in self.residents else f"{model}#{self._made}"
            self.residents[key] = Resident(key=key, spec=spec)
            self._expect(self.residents[key])
            self._newest[model] = key
        broken = {model.partition(":")[0] for model in catalog.errors}
        self._next = {route: self._newest[model] for route, model in catalog.routes().items()}
        for route, key in self.routes.items():
            resident = self.residents.get(key)
            if resident is None or key not in self.serving:
                continue
            kind, name = route
            named = kind, resident.spec.name
            in_memory, another = resident.state is not ModelState.ABSENT, route in self._next
            if not name and named in self._next:  # whatever else the repository holds by now
                self._next[route] = self._next[named]
            # What is broken by now goes on as it was. The default then fails: no other model answers for it.
            elif resident.spec.name in broken and (not name if another else in_memory):
                self._next[route] = key
        self.switch()

    def switch(self) -> None:
        """Give names to their new versions where those are ready, or the old ones are not in memory."""
        routes = {}
        for route, key in self._next.items():
            before = self.residents.get(self.routes.get(route, ""))
            keep = (
                before is not None
                and before.key != key
                and before.state in (ModelState.LOADING, ModelState.READY)
                and self.residents[key].state is not ModelState.READY
                and not before.unwanted
            )
            routes[route] = before.key if keep and before is not None else key
        self.serving = set(routes.values())
        upcoming = {key for route, key in self._next.items() if routes[route] != key}
        for route, key in self.routes.items():
            if route not in routes and self.residents[key].state in (ModelState.LOADING, ModelState.READY):
                routes[route] = key
        self.routes = routes
        for resident in self.residents.values():
            resident.upcoming = resident.key in upcoming
        for key in [key for key, resident in self.residents.items() if self._forgotten(resident)]:
            del self.residents[key]

    def _forgotten(self, resident: Resident) -> bool:
        out = resident.key not in self.serving and not resident.upcoming
        return out and resident.state is ModelState.ABSENT

    def replaced(self) -> list[Resident]:
        """In memory, and nothing that the repository lists means them any more."""
        return [
            r
            for r in self.residents.values()
            if r.state is ModelState.READY and r.key not in self.serving and not r.upcoming
        ]

    def offers(self) -> list[tuple[str, list[str]]]:
        """The kinds, each with all that tasks may say, the default first."""
        found: dict[str, list[str]] = {}
        for (kind, name), key in self.routes.items():
            if key not in self.serving:
                continue
            found.setdefault(kind, [])
            if name:
                found[kind].append(name)
        for kind, names in found.items():
            default = self.routes.get((kind, ""))
            names.sort(key=lambda name, kind=kind, default=default: self.routes[kind, name] != default)  # type: ignore[misc]
        return list(found.items())

    def messages(self) -> list[model_pb2.Model]:
        """Every model, and what is known of it."""
        found: dict[str, model_pb2.Model] = {}
        for resident in self.residents.values():
            if resident.key in self.serving:
                found[resident.model] = self._message(resident)
        for resident in self.residents.values():
            if resident.model not in found:
                found[resident.model] = self._message(resident)
            elif resident.upcoming:  # of the same id: what serves is told, and what is wrong with the new one
                found[resident.model].error = resident.error
        for model, error in self.catalog.errors.items():
            name, _, version = model.partition(":")
            message = found.setdefault(model, model_pb2.Model(name=name, version=version))
            message.error = error
        return list(found.values())

    def _message(self, resident: Resident) -> model_pb2.Model:
        spec = resident.spec
        message = model_pb2.Model(
            name=spec.name,
            version=spec.version,
            current=self.routes.get((spec.kind, spec.name)) == resident.key,
            kind=spec.kind,
            engine=resident.facts.get("engine") or catalogs.engine_of(spec, self.engine),
            precision=resident.facts.get("precision") or spec.precision,
            source=spec.source,
            digest=resident.digest,
            files_bytes=spec.files_bytes,
            memory_bytes=resident.memory_bytes if resident.measured else 0,
            expected_memory_bytes=0 if resident.measured else resident.memory_bytes,
            labels=spec.labels,
            facts=resident.facts,
            error=resident.error,
        )
        if resident.load_s:
            message.load_duration.FromNanoseconds(int(resident.load_s * 1e9))
        return message

    def residencies(self) -> list[model_pb2.ModelResidency]:
        """Every model in memory, or on its way there or out."""
        found: dict[str, model_pb2.ModelResidency] = {}
        order: Callable[[Resident], bool] = lambda r: r.key not in self.serving  # noqa: E731
        for resident in sorted(self.residents.values(), key=order):
            if resident.state is ModelState.ABSENT:
                continue
            if resident.model in found:  # an old one and a new one of the same id
                found[resident.model].memory_bytes += resident.memory_bytes
                continue
            message = found[resident.model] = model_pb2.ModelResidency(
                model=resident.model,
                state=resident.state.value,
                memory_bytes=resident.memory_bytes,
                loads=resident.loads,
                pinned=resident.pinned,
            )
            if resident.used_ns:
                message.last_use_time.FromNanoseconds(resident.used_ns)
        return list(found.values())

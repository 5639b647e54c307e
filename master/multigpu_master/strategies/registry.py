"""Loads the installed strategies, of this package and others, from the entry point group "multigpu.strategies"."""

import math
from importlib.metadata import EntryPoint, entry_points

import structlog

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy

log = structlog.get_logger()

GROUP = "multigpu.strategies"
OWN_PACKAGE = __name__.rpartition(".")[0]
# The master logs at most this many different mistakes of a strategy.
LOGGED_MAX = 20


class StrategyError(Exception):
    """A strategy can't be used; the message says which and why."""


class GuardedStrategy(Strategy):
    """Wraps a strategy of another package, so that its mistakes do not end the master: a mistake in excludes() or
    score() excludes the worker, and a mistake in min_backlog() makes it return 1. Logs each mistake once.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._logged: set[str] = set()
        for name in ("name", "aliases", "summary", "score_meaning", "pinned"):
            setattr(self, name, getattr(strategy, name))

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        try:
            why = self._strategy.excludes(shape, worker, fleet)
            if why is None:
                self._score(shape, worker, fleet)
            elif not isinstance(why, str):
                return self._log_mistake(f"excludes() returned {why!r}, which is neither a text nor None")
        except Exception as error:  # noqa: BLE001  any mistake
            return self._log_mistake(f"{error!r} in excludes() or score()")
        return why

    def _score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        score = self._strategy.score(shape, worker, fleet)
        if not isinstance(score, int | float) or math.isnan(score):
            raise ValueError(f"score() returned {score!r}, which is not a number")
        return score

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        """Returns inf for a worker that a mistake excludes; excludes() has logged the mistake."""
        try:
            return self._score(shape, worker, fleet)
        except Exception:  # noqa: BLE001  any mistake
            return math.inf

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        try:
            return int(self._strategy.min_backlog(shape, worker, fleet))
        except Exception as error:  # noqa: BLE001  any mistake
            self._log_mistake(f"{error!r} in min_backlog()")
            return 1

    def _log_mistake(self, what: str) -> str:
        text = f"the strategy {self.name} has a mistake: {what}"
        if what not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(what)
            log.error("a strategy has a mistake", strategy=self.name, mistake=what)
        return text


def load_strategies() -> dict[str, Strategy]:
    """Every installed strategy by its canonical name, sorted by name. Raises StrategyError if one can't be used."""
    found: dict[str, Strategy] = {}
    points: dict[str, EntryPoint] = {}  # by name and alias
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        try:
            strategy = _load(point)
        except (Exception, SystemExit) as error:
            raise StrategyError(
                f"strategy {point.name!r} ({point.value}) can't be used: {error!r}; fix or uninstall its package"
            ) from error
        for name in (strategy.name, *strategy.aliases):
            other = points.setdefault(name, point)
            if other is not point:
                raise StrategyError(
                    f"the strategies {other.name!r} ({other.value}) and {point.name!r} ({point.value}) are both called "
                    f"{name!r}: rename one, or uninstall its package"
                )
        found[strategy.name] = strategy
    return found


def _load(point: EntryPoint) -> Strategy:
    """Raises an exception that says what is wrong with the strategy."""
    strategy: Strategy = point.load()()
    if not isinstance(strategy, Strategy):
        raise TypeError("it is not derived from multigpu_master.core.strategy.Strategy")
    if missing := [name for name in ("name", "summary", "score_meaning") if not hasattr(strategy, name)]:
        raise TypeError(f"it lacks {', '.join(missing)}")
    if strategy.name != point.name:
        raise ValueError(f"its name is {strategy.name!r}: it must be the name of its entry point, {point.name!r}")
    if not isinstance(strategy.aliases, tuple):
        raise TypeError("its aliases are not a tuple")
    return strategy if point.module.startswith(f"{OWN_PACKAGE}.") else GuardedStrategy(strategy)


def canonical_name(name: str, strategies: dict[str, Strategy]) -> str | None:
    """The canonical name of the strategy with this name or alias; None if there is no such strategy."""
    if name in strategies:
        return name
    return next((s.name for s in strategies.values() if name in s.aliases), None)

"""Loads the installed strategies, of this package and others, from the entry point group "multigpu.strategies"."""

from importlib.metadata import entry_points

from multigpu_master.core.strategy import Strategy

GROUP = "multigpu.strategies"


class StrategyError(Exception):
    """A strategy can't be used; the message says which and why."""


def load_strategies() -> dict[str, Strategy]:
    """Every installed strategy by its canonical name, sorted by name. Raises StrategyError if one can't be used."""
    found: dict[str, Strategy] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        try:
            strategy: Strategy = point.load()()
        except Exception as error:
            raise StrategyError(
                f"strategy {point.name!r} ({point.value}) can't be loaded: {error!r}; fix or uninstall its package"
            ) from error
        missing = [name for name in ("name", "summary", "score_meaning") if not hasattr(strategy, name)]
        if missing or not isinstance(strategy, Strategy) or strategy.name != point.name:
            raise StrategyError(
                f"strategy {point.name!r} ({point.value}) lacks {missing or 'its base class or its own name'}; "
                "derive it from multigpu_master.core.strategy.Strategy and give it the name of its entry point"
            )
        found[strategy.name] = strategy
    return found


def canonical_name(name: str, strategies: dict[str, Strategy]) -> str | None:
    """The canonical name of the strategy with this name or alias; None if there is no such strategy."""
    if name in strategies:
        return name
    return next((s.name for s in strategies.values() if name in s.aliases), None)

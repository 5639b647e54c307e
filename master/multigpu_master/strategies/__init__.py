"""Load-balancing strategies, one per file. core/strategy.py has the base class; registry.py loads the strategies."""

"""Load-balancing strategies, one a file. core/strategy.py has the base class; registry.py loads the installed ones."""

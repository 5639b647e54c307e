"""Load-balancing strategies, one a file. core/strategy.py has their protocol; registry.py loads the installed ones."""

"""Load-balancing strategies, one a file, behind the small protocol of base.py; registry.py finds the installed ones."""

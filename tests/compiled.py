"""What tests cannot do with compiled modules (hatch_build.py)."""

import pytest
from multigpu._build import build_of

COMPILED = build_of("multigpu_master.driver") == "compiled"


def replaces_a_method() -> None:
    """Skips the test if the modules are compiled: the methods of compiled classes cannot be replaced."""
    if COMPILED:
        pytest.skip("replaces a method of a compiled class")

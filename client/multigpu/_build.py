"""Whether this installation was compiled. hatch_build.py compiles it."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def build_of(module: str) -> str:
    """Returns "compiled" if mypyc compiled the module, else "pure Python". Does not import the module.

    ModuleNotFoundError: its package is not installed.
    """
    spec = find_spec(module)
    compiled = spec is not None and spec.origin is not None and spec.origin.endswith(tuple(EXTENSION_SUFFIXES))
    return "compiled" if compiled else "pure Python"

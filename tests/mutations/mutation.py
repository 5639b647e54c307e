"""A mutation replaces one text of the product by another; a checker must then fail.

The product's files are not changed. `plant` installs a loader that reads the one file, replaces the text and compiles
the result; it must run in a new process, before the product is imported.
"""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"multigpu_master": ROOT / "master", "multigpu_worker": ROOT / "worker", "multigpu": ROOT / "client"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` occurs exactly once in the file of `module`; with `new` in its place the product breaks a rule, which
    `breaks` states, and `checker` must notice within `seeds` seeds. Without `new`, `old` has no effect.
    """

    breaks: str
    old: str
    new: str | None = None
    checker: str = "simulator"
    _: KW_ONLY
    module: str
    seeds: int = 1000

    @property
    def path(self) -> Path:
        return PACKAGES[self.module.partition(".")[0]].joinpath(*self.module.split(".")).with_suffix(".py")

    def found(self) -> int:
        """How often `old` occurs in the product as it is. Anything but once: the list is out of date."""
        return self.path.read_text("utf-8").count(self.old)

    def mutated(self) -> str:
        """The file's text with the mutation in it."""
        assert self.found() == 1, f"{self.breaks}: its text occurs {self.found()} times in {self.path}, not once"
        new = _disabled(self.old) if self.new is None else self.new
        assert self.old != new, f"{self.breaks}: the mutation changes nothing"
        return self.path.read_text("utf-8").replace(self.old, new)


def _disabled(old: str) -> str:
    """`old`, an `if` or complete statements, replaced by what has no effect."""
    code = old.strip()
    return old.replace(code, "if False:" if code.startswith("if ") and code.endswith(":") else "pass")


class _Loader(SourceFileLoader):
    """Compiles a mutated text instead of the file, and neither reads nor writes byte code."""

    def __init__(self, mutation: Mutation) -> None:
        super().__init__(mutation.module, str(mutation.path))
        self._code: CodeType = compile(mutation.mutated(), str(mutation.path), "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutation.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None, f"{fullname} is there"
        spec.loader = _Loader(self.mutation)
        return spec


def plant(mutation: Mutation) -> None:
    """Has this process import the mutated module."""
    assert mutation.module not in sys.modules, f"{mutation.module} was imported before it could be mutated"
    sys.meta_path.insert(0, _Finder(mutation))


def planted() -> Mutation | None:
    """The mutation of this process."""
    return next((finder.mutation for finder in sys.meta_path if isinstance(finder, _Finder)), None)

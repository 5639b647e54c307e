"""One version of the user's handlers for all engine processes of a worker.

The first process imports the files; later ones import the sources that it has read. So an edit takes effect with
`mgpuctl handlers reload`, and not when an engine dies. A version holds the modules of --handlers and the modules that
they import from the same directories.
"""

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# By module: its file, and the file's content.
Sources = dict[str, tuple[str, bytes]]


def version_of(sources: Sources) -> str:
    """12 hex digits, equal for equal modules in any directory. Empty: there are no modules."""
    if not sources:
        return ""
    parts = [[name, hashlib.sha256(source).hexdigest()] for name, (_, source) in sorted(sources.items())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def sources_of(said: Any) -> Sources:
    """Check the sources that an engine process reports. Raises TypeError."""
    for module, (file, source) in said.items():
        if not (isinstance(module, str) and isinstance(file, str) and isinstance(source, bytes)):
            raise TypeError(f"the source of {module!r} in {file!r} is a {type(source)}")
    return dict(said)


class SourceFinder:
    """For sys.meta_path, while handlers are imported. `sources`: the version to import; {}: from the files.

    `tell` is called with the file whose code runs from then on. Empty: none.
    """

    def __init__(self, modules: Iterable[str], sources: Sources, tell: Callable[[str], None]) -> None:
        self.sources = dict(sources)
        self.tell = tell
        # Files whose code is running, the innermost last.
        self.running: list[str] = []
        self._packages = {module.partition(".")[0] for module in modules}
        self._elsewhere = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.sources:
            file = Path(self.sources[name][0])
            folders = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                name, file, loader=_Loader(name, str(file), self), submodule_search_locations=folders
            )
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for other in others if (spec := other.find_spec(name, path, target)) is not None), None)
        if spec is not None and type(spec.loader) is SourceFileLoader and self._is_users(name, Path(spec.loader.path)):
            spec.loader = _Loader(name, spec.loader.path, self)
        return spec

    def _is_users(self, name: str, file: Path) -> bool:
        package = name.partition(".")[0]
        if package in self._packages:
            return True
        depth = name.count(".") + (file.name == "__init__.py")
        return package not in self._elsewhere and not _is_of_pip(file.parents[depth])


class _Loader(SourceFileLoader):
    """Keeps the sources that it compiles. Python's cache is not used: it may hold another version."""

    def __init__(self, name: str, path: str, finder: SourceFinder) -> None:
        super().__init__(name, path)
        self._finder = finder

    def get_code(self, fullname: str) -> CodeType:
        sources = self._finder.sources
        if fullname not in sources:
            sources[fullname] = self.path, self.get_data(self.path)
        code: CodeType = self.source_to_code(sources[fullname][1], self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        running, tell = self._finder.running, self._finder.tell
        running.append(self.path)
        tell(self.path)
        try:
            super().exec_module(module)
        finally:
            running.pop()
            tell(running[-1] if running else "")


@functools.cache
def _is_of_pip(folder: Path) -> bool:
    """Whether pip installs packages into the folder."""
    return next(folder.glob("*.dist-info"), None) is not None

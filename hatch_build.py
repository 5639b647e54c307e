"""The optional build of the wheel with modules that mypyc compiles: HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip install .

pyproject.toml has the list of these modules. The wheel has their sources as well, which Python uses for tracebacks.

A coroutine of a compiled module must not await in an `except` or a `finally` clause, nor use `async with`. When mypyc's
coroutines are suspended there, the exception stays the one that the thread handles: other tasks take it for theirs, and
two such coroutines can leave it there for ever. grpc.aio then ends no call any more.
"""

import os
import shlex
import shutil
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Packages without types are Any: what is compiled does not depend on what else the build's environment has.
MYPY_OPTIONS = (
    "--config-file=", "--explicit-package-bases", "--namespace-packages", "--ignore-missing-imports",
    "--follow-imports=silent",
)  # fmt: skip


class CompileHook(BuildHookInterface[Any]):
    """Compiles the modules that match `modules`, but not those that match `except`. Both are lists of globs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """RuntimeError: there is no C compiler. An editable install is not compiled."""
        if version == "editable":
            return
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
        if shutil.which(compiler) is None:
            raise RuntimeError(
                f"multigpu is compiled with the C compiler {compiler}, which is not installed; install it, or build "
                "without HATCH_BUILD_HOOK_ENABLE_CUSTOM"
            )
        self._folder = TemporaryDirectory()
        built = Path(self._folder.name) / "lib"
        self._compile(built)
        build_data["infer_tag"] = True
        build_data["pure_python"] = False
        for library in built.rglob("*.so"):
            build_data["force_include"][str(library)] = library.relative_to(built).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what the wheel has copied."""
        if version != "editable":
            self._folder.cleanup()

    def sources(self) -> list[str]:
        """The paths of the modules to compile."""
        root = Path(self.root)
        excluded = {path for pattern in self.config["except"] for path in root.glob(pattern)}
        found = {path for pattern in self.config["modules"] for path in root.glob(pattern)} - excluded
        return sorted(str(path) for path in found if path.name != "__init__.py")

    def _compile(self, built: Path) -> None:
        # The build has these packages only if it compiles.
        from mypyc.build import mypycify  # noqa: PLC0415
        from setuptools import Distribution  # noqa: PLC0415

        packages = [str(Path(self.root) / package.rpartition("/")[0]) for package in self.build_config.packages]
        os.environ["MYPYPATH"] = os.pathsep.join(packages)
        options = [*MYPY_OPTIONS, f"--cache-dir={self._folder.name}/cache"]
        modules = mypycify(
            [*options, *self.sources()], debug_level="0", group_name="multigpu", target_dir=f"{self._folder.name}/c"
        )
        command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(built), f"{self._folder.name}/o"
        command.ensure_finalized()
        command.run()

"""The daemons say whether they are compiled."""

import tomllib
from pathlib import Path

import multigpu
import multigpu_master
import pytest
from click import Command
from click.testing import CliRunner
from multigpu._build import build_of
from multigpu_master.main import main as master
from multigpu_worker.main import main as worker

from tests.compiled import COMPILED

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
BUILT = "compiled" if COMPILED else "pure Python"


@pytest.mark.parametrize("program", [master, worker])
def test_the_version_says_how_the_program_was_built(program: Command) -> None:
    output = CliRunner().invoke(program, ["--version"]).output
    assert output.endswith(f", version {multigpu.__version__} ({BUILT})\n")


def test_a_module_that_is_an_extension_is_compiled() -> None:
    assert build_of("google._upb._message") == "compiled"
    assert build_of("multigpu.errors") == "pure Python"


def test_all_listed_modules_are_compiled_or_none() -> None:
    hook = tomllib.loads(PYPROJECT.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    packages = Path(multigpu_master.__file__).parents[1]

    def listed(patterns: list[str]) -> set[Path]:
        return {path for pattern in patterns for path in packages.glob(pattern.partition("/")[2])}

    paths = [path for path in listed(hook["modules"]) - listed(hook["except"]) if path.name != "__init__.py"]
    assert len(paths) > 40
    built = {path: build_of(".".join(path.relative_to(packages).with_suffix("").parts)) for path in paths}
    assert set(built.values()) == {BUILT}, built

"""Style as a test: sizes, docstrings, import directions and cycles, pure modules, text that no file may contain."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import uvloop

from hatch_build import CompileHook

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "multigpu": ROOT / "client" / "multigpu",
    "multigpu_gateway": ROOT / "gateway" / "multigpu_gateway",
    "multigpu_master": ROOT / "master" / "multigpu_master",
    "multigpu_worker": ROOT / "worker" / "multigpu_worker",
}
GENERATED = PACKAGES["multigpu"] / "v1"
CHILDREN = {name: {path.stem for path in root.iterdir()} - {"__init__", "v1"} for name, root in PACKAGES.items()}

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
FOLDER_MODULES_MAX = 20

TORCH = {"torch", "transformers", "tokenizers", "safetensors", "sentence_transformers", "tensorrt", "onnxruntime"}
# What a package must not import, anywhere in it.
FOREIGN = {
    "multigpu": {"multigpu_gateway", "multigpu_master", "multigpu_worker"} | TORCH,
    "multigpu_gateway": {"multigpu_master", "multigpu_worker"} | TORCH,
    "multigpu_master": {"multigpu_gateway", "multigpu_worker"} | TORCH,
    "multigpu_worker": {"multigpu_gateway", "multigpu_master"},
}
INPUT_OUTPUT = {
    "asyncio", "concurrent", "grpc", "http", "io", "multiprocessing", "os", "pathlib", "psutil", "pynvml", "select",
    "selectors", "shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "urllib", "uvloop",
}  # fmt: skip
# A pure module has no clock, no random numbers, no log, no I/O and no protobuf: values in, values out.
IMPURE = INPUT_OUTPUT | {
    "datetime", "google", "logging", "multigpu.v1", "random", "secrets", "structlog", "time", "uuid",
}  # fmt: skip
PURE = [
    *sorted((PACKAGES["multigpu_master"] / "core").rglob("*.py")),
    PACKAGES["multigpu_worker"] / "session/session.py",
    PACKAGES["multigpu_worker"] / "session/batcher.py",
    PACKAGES["multigpu_worker"] / "device/health.py",
    PACKAGES["multigpu_worker"] / "device/xids.py",
]
# Loaded by the interpreter or by dataclasses, so sys.modules does not tell who imported them.
ALWAYS_LOADED = {"io", "os", "time", "datetime", "random", "pathlib", "threading", "signal", "urllib", "tempfile"}

# Written so that this file doesn't match itself.
FORBIDDEN_TEXT = [
    (r"/wor[k]/|/tmp/tea[m]", "a path of the machine it was made on"),
    (r"\b[Ii]ssues? #?[0-9]", "a number that means nothing outside a tracker"),
    (r"inde[x]-url|artifactor[y]|pypi\.or[g]/simple", "where packages came from"),
    (r"\bT[O]DO\b|\bF[I]XME\b|\bX{3}\b", "a promise instead of the thing"),
]
TEXT = {".py", ".md", ".proto", ".toml", ".sh", ".service", ".txt", ".yaml", ".yml", ".js", ""}
FOLDERS = (
    "client", "master", "worker", "protos", "tests", "tools", "benchmarks", "docs", "systemd", "examples",
    "deploy", ".ci", ".github",
)  # fmt: skip


def product_sources() -> Iterator[Path]:
    for package in PACKAGES.values():
        paths = sorted(package.rglob("*.py"))
        yield from (path for path in paths if GENERATED not in path.parents and not path.stem.endswith("_pb2"))


def sources() -> Iterator[Path]:
    yield from product_sources()
    for folder in ("tests", "tools", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def texts() -> Iterator[Path]:
    for place in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]:
        if place.is_file() and place.suffix in TEXT and not {"__pycache__", "node_modules", ".git"} & {*place.parts}:
            yield place


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, as an absolute name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def module_name(path: Path) -> str:
    package = next(root for root in PACKAGES.values() if root in path.parents)
    return path.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def test_the_sources_are_found() -> None:
    assert len(list(product_sources())) > 10
    assert all(path.is_file() for path in PURE)
    assert len(PURE) > 3
    assert any(path.name == "LICENSE" for path in texts())


def test_modules_are_short() -> None:
    lines = {relative(path): len(path.read_text("utf-8").splitlines()) for path in sources()}
    del lines["client/multigpu/fleet.py"]  # generated
    assert {path: count for path, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    lines = {
        f"{relative(path)}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {function: count for function, count in lines.items() if count > FUNCTION_LINES_MAX} == {}


def test_folders_are_small() -> None:
    modules = Counter(relative(path.parent) for path in sources() if path.name != "__init__.py")
    assert {folder: count for folder, count in modules.items() if count > FOLDER_MODULES_MAX} == {}


def test_no_modules_import_each_other() -> None:
    modules = {module_name(path): path for path in product_sources()}

    def module_of(name: str) -> str:
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        return name

    def product_imports(module: str) -> set[str]:
        names = (name for name in imports(modules[module]) if not within(name, {"multigpu.v1"}))
        return {module_of(name) for name in names} & modules.keys() - {module}

    TopologicalSorter({module: product_imports(module) for module in modules}).prepare()  # CycleError names the modules


def test_no_packages_import_each_other() -> None:
    """Nor in a longer circle. A package is what lies directly in one of PACKAGES: a folder, or a module."""
    found: dict[str, set[str]] = {}
    for path in product_sources():
        package = module_name(path).split(".")[:2]
        names = [name.split(".") for name in imports(path)]
        inner = {name[1] for name in names if name[0] == package[0] and len(name) > 1} & CHILDREN[package[0]]
        found.setdefault(".".join(package), set()).update(f"{package[0]}.{each}" for each in inner - {*package[1:]})
    TopologicalSorter({name: needed for name, needed in found.items() if "." in name}).prepare()


def test_every_module_has_a_docstring() -> None:
    without = [
        relative(path)
        for path in sources()
        if path.read_text("utf-8").strip() and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert without == []


def forbidden(paths: Iterable[Path], modules: set[str]) -> list[str]:
    """The imports of these modules in these files."""
    return [f"{relative(path)} imports {name}" for path in paths for name in imports(path) if within(name, modules)]


@pytest.mark.parametrize("package", FOREIGN)
def test_the_daemons_do_not_import_each_other(package: str) -> None:
    assert forbidden(PACKAGES[package].rglob("*.py"), FOREIGN[package]) == []


def test_no_timer_is_asked_when_it_is_due() -> None:
    """uvloop's call_later and call_at return a Handle without when() for a callback that is due at once."""
    loop = uvloop.new_event_loop()
    assert not hasattr(loop.call_later(0.0, print), "when")
    loop.close()
    asked = [relative(path) for path in product_sources() if ".when()" in path.read_text("utf-8")]
    assert not asked, asked


def test_no_simple_queue_is_read_with_a_timeout() -> None:
    """Python 3.11's and 3.12's wait for ever if the thread is suspended while the time passes. The journal did, with
    entries to write, on a host with more processes than cores.
    """
    for path in product_sources():
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        if any(isinstance(node, ast.Attribute) and node.attr == "SimpleQueue" for node in nodes):
            calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
            assert not [call for call in calls if re.search(r"\.get\((True,|.*timeout)", call)], relative(path)


class Suspensions(ast.NodeVisitor):
    """Lines at which a coroutine or a generator can be suspended while it handles an exception."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self._handles = False

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        self._visit([*node.body, *node.orelse], handles=self._handles)
        self._visit([*node.handlers, *node.finalbody], handles=True)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self.visit_Try(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit(node.body, handles=False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit(node.body, handles=False)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.lines.append(node.lineno)  # its __aexit__ is awaited with the exception

    def generic_visit(self, node: ast.AST) -> None:
        if self._handles and isinstance(node, ast.Await | ast.AsyncFor | ast.Yield | ast.YieldFrom):
            self.lines.append(node.lineno)
        super().generic_visit(node)

    def _visit(self, nodes: Sequence[ast.AST], *, handles: bool) -> None:
        before, self._handles = self._handles, handles
        for node in nodes:
            self.visit(node)
        self._handles = before


def suspensions(path: Path) -> list[str]:
    visitor = Suspensions()
    visitor.visit(ast.parse(path.read_text()))
    return [f"{relative(path)}:{line}" for line in visitor.lines]


def test_no_compiled_coroutine_is_suspended_while_it_handles_an_exception() -> None:
    """After two calls had been cancelled together, a compiled master ended no call any more: see hatch_build.py."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    compiled = CompileHook(str(ROOT), wheel["hooks"]["custom"], None, None, "", "wheel").sources()  # type: ignore[arg-type]  # it needs none of these
    assert str(PACKAGES["multigpu_master"] / "driver.py") in compiled
    assert not [found for path in compiled for found in suspensions(Path(path))]
    assert suspensions(PACKAGES["multigpu_master"] / "rpc/serve_stream.py"), "the check finds what it looks for"
    assert suspensions(PACKAGES["multigpu"] / "_transport/run_stream.py"), "as above: `async with`"


def test_only_engines_import_torch() -> None:
    may = {PACKAGES["multigpu_worker"] / name for name in ("engines", "baselines", "energy/torch_model.py")}
    paths = PACKAGES["multigpu_worker"].rglob("*.py")
    others = [path for path in paths if not may & {path, *path.parents} or path.name in {"__init__.py", "base.py"}]
    assert forbidden(others, TORCH) == []


def test_pure_modules_import_nothing_impure() -> None:
    assert forbidden(PURE, IMPURE) == []


def test_pure_modules_import_nothing_impure_indirectly() -> None:
    watched = sorted(IMPURE - ALWAYS_LOADED)
    code = (
        "import dataclasses, enum, typing, heapq, collections, bisect, math, functools, sys\n"
        f"import {', '.join(PACKAGES)}\n"
        f"before = set(sys.modules)\nimport {', '.join(module_name(path) for path in PURE)}\n"
        f"print(*(set({watched!r}) & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.split() == []


def test_strategies_do_no_input_or_output() -> None:
    assert forbidden((PACKAGES["multigpu_master"] / "strategies").glob("*.py"), INPUT_OUTPUT) == []


@pytest.mark.parametrize(("pattern", "what"), FORBIDDEN_TEXT, ids=[what for _, what in FORBIDDEN_TEXT])
def test_files_mention_only_the_product(pattern: str, what: str) -> None:
    found = [
        f"{relative(path)}:{number}: {what}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = [
        *project["project"]["dependencies"],
        *(entry for extra in project["project"]["optional-dependencies"].values() for entry in extra),
        *project["dependency-groups"]["dev"],
    ]
    names = {re.split(r"[^A-Za-z0-9-]", entry)[0] for entry in wanted} - {"multigpu"}
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    rows = {name.strip() for cell in first_cells for name in cell.split(",")}
    assert names - rows == set()


def test_links_between_pages_have_a_target() -> None:
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{relative(page)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    # The site of docs/ has no other files: links to these name the repository.
    broken += [
        f"{relative(page)}: {target}"
        for page in pages
        for target in re.findall(
            r"\]\(https://github\.com/multigpu/multigpu/(?:blob|tree)/main/([^)#]+)", page.read_text("utf-8")
        )
        if not (ROOT / target).exists()
    ]
    assert broken == []


def test_pictures_are_drawn_from_their_text(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    command = [sys.executable, "tools/draw_picture.py", "docs/architecture.toml", str(drawn)]
    subprocess.run(command, cwd=ROOT, timeout=400, check=True)
    assert drawn.read_text("utf-8") == (ROOT / "docs/architecture.svg").read_text("utf-8")


def test_tests_and_benchmarks_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page, path) for page in pages for path in re.findall(r"`(tests/[\w./]*\w)`", page.read_text("utf-8"))}
    missing = [f"{relative(page)}: {path}" for page, path in named if not (ROOT / path).exists()]
    modules = {
        (page, module)
        for page in pages
        for module in re.findall(r"python -m ((?:tests|benchmarks)[\w.]*)", page.read_text("utf-8"))
    }
    for page, module in modules:
        path = ROOT / module.replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            missing.append(f"{relative(page)}: python -m {module}")
    assert named
    assert modules
    assert missing == []

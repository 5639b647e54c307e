"""Style as a test: sizes, docstrings, which way imports run, which rooms stay pure, what product files never say.

Outliers are reported as warnings well before they fail: the summary of a run lists them.
"""

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "multigpu": ROOT / "client" / "multigpu",
    "multigpu_master": ROOT / "master" / "multigpu_master",
    "multigpu_worker": ROOT / "worker" / "multigpu_worker",
}
GENERATED = PACKAGES["multigpu"] / "v1"

FILE_LINES_REPORTED, FILE_LINES_MAX = 400, 600
FUNCTION_LINES_REPORTED, FUNCTION_LINES_MAX = 70, 80

TORCH = {"torch", "transformers", "tokenizers", "safetensors", "sentence_transformers", "tensorrt", "onnxruntime"}
# What a package must not import, anywhere in it.
FOREIGN = {
    "multigpu": {"multigpu_master", "multigpu_worker"} | TORCH,
    "multigpu_master": {"multigpu_worker"} | TORCH,
    "multigpu_worker": {"multigpu_master"},
}
INPUT_OUTPUT = {
    *(
        "asyncio",
        "concurrent",
        "grpc",
        "http",
        "io",
        "multiprocessing",
        "os",
        "pathlib",
        "select",
        "selectors",
        "shutil",
    ),
    *("signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "urllib", "uvloop", "psutil", "pynvml"),
}
# No clock, no dice, no log, and no message of the wire: pure rooms take values and give values.
IMPURE = INPUT_OUTPUT | {
    "datetime",
    "google",
    "logging",
    "multigpu.v1",
    "random",
    "secrets",
    "structlog",
    "time",
    "uuid",
}
PURE = [
    *sorted((PACKAGES["multigpu_master"] / "core").rglob("*.py")),
    PACKAGES["multigpu_worker"] / "session/session.py",
    PACKAGES["multigpu_worker"] / "session/batcher.py",
    PACKAGES["multigpu_worker"] / "device/health.py",
    PACKAGES["multigpu_worker"] / "device/xids.py",
]
# Loaded by the interpreter itself or by dataclasses, so that sys.modules can't tell who wanted them.
ALWAYS_LOADED = {"io", "os", "time", "datetime", "random", "pathlib", "threading", "signal", "urllib", "tempfile"}

# Written so that this file doesn't match itself.
NEVER_SAID = [
    (r"/wor[k]/|/tmp/tea[m]", "a path of the machine it was made on"),
    (r"\b[Ii]ssues? #?[0-9]", "a number that means nothing outside a tracker"),
    (r"inde[x]-url|artifactor[y]|pypi\.or[g]/simple", "where packages came from"),
    (r"\bT[O]DO\b|\bF[I]XME\b|\bX{3}\b", "a promise instead of the thing"),
]
TEXT = {".py", ".md", ".proto", ".toml", ".sh", ".service", ".txt", ".yaml", ".js", ""}
ROOMS = ("client", "master", "worker", "protos", "tests", "tools", "benchmarks", "docs", "systemd", "examples", ".ci")


def product_sources() -> Iterator[Path]:
    for package in PACKAGES.values():
        yield from (path for path in sorted(package.rglob("*.py")) if GENERATED not in path.parents)


def sources() -> Iterator[Path]:
    yield from product_sources()
    for room in ("tests", "tools", "benchmarks"):
        yield from sorted((ROOT / room).rglob("*.py"))


def texts() -> Iterator[Path]:
    for place in [*ROOT.iterdir(), *(path for room in ROOMS for path in (ROOT / room).rglob("*"))]:
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


def test_the_rooms_are_there() -> None:
    assert len(list(product_sources())) > 10
    assert all(path.is_file() for path in PURE)
    assert len(PURE) > 3
    assert any(path.name == "LICENSE" for path in texts())


def test_files_fit_in_the_head() -> None:
    too_long = []
    for path in sources():
        lines = len(path.read_text("utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            too_long.append(f"{relative(path)}: {lines} lines")
        elif lines > FILE_LINES_REPORTED:
            warnings.warn(f"long file: {relative(path)}: {lines} lines", stacklevel=1)
    assert too_long == []


def test_functions_fit_on_a_screen() -> None:
    too_long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    too_long.append(f"{relative(path)}: {node.name}: {lines} lines")
                elif lines > FUNCTION_LINES_REPORTED:
                    warnings.warn(f"long function: {relative(path)}: {node.name}: {lines} lines", stacklevel=1)
    assert too_long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        relative(path)
        for path in sources()
        if path.read_text("utf-8").strip() and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def test_imports_run_one_way() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for package, foreign in FOREIGN.items()
        for path in PACKAGES[package].rglob("*.py")
        for name in imports(path)
        if within(name, foreign)
    ]
    assert wrong == []


def test_nobody_asks_a_timer_when_it_is_due() -> None:
    """uvloop's call_later and call_at answer with a Handle, which has no when(), for what is due at once. It ended a
    worker once in some thousand batches that waited to grow.
    """
    loop = uvloop.new_event_loop()
    assert not hasattr(loop.call_later(0.0, print), "when")
    loop.close()
    asked = [relative(path) for path in product_sources() if ".when()" in path.read_text("utf-8")]
    assert not asked, asked


def test_torch_is_imported_by_engines_alone() -> None:
    may = {PACKAGES["multigpu_worker"] / "engines", PACKAGES["multigpu_worker"] / "baselines"}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in PACKAGES["multigpu_worker"].rglob("*.py")
        for name in imports(path)
        if within(name, TORCH) and (not may & {*path.parents} or path.name in {"__init__.py", "base.py"})
    ]
    assert wrong == []


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_pure_rooms_import_nothing_impure(path: Path) -> None:
    assert [name for name in imports(path) if within(name, IMPURE)] == []


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_pure_rooms_pull_nothing_impure_in(path: Path) -> None:
    package = next(root for root in PACKAGES.values() if root in path.parents)
    module = path.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    watched = sorted(IMPURE - ALWAYS_LOADED)
    code = (
        f"import dataclasses, enum, typing, heapq, collections, bisect, math, functools, sys, {package.name}\n"
        f"before = set(sys.modules)\nimport {module}\n"
        f"print(*(set({watched!r}) & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_strategies_do_no_input_or_output() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in (PACKAGES["multigpu_master"] / "strategies").glob("*.py")
        for name in imports(path)
        if within(name, INPUT_OUTPUT)
    ]
    assert wrong == []


@pytest.mark.parametrize(("pattern", "what"), NEVER_SAID, ids=[what for _, what in NEVER_SAID])
def test_product_files_speak_of_the_product_alone(pattern: str, what: str) -> None:
    said = [
        f"{relative(path)}:{number}: {what}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert said == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import time", ["time"]),
        ("def f():\n    from multigpu.v1 import task_pb2 as t", ["multigpu.v1.task_pb2"]),
        ("import google.protobuf.message", ["google.protobuf.message"]),
    ],
)
def test_the_import_rule_can_fail(tmp_path: Path, code: str, names: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(code, "utf-8")
    assert list(imports(path)) == names
    assert all(within(name, IMPURE) for name in names)


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


def test_links_between_the_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{relative(page)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []

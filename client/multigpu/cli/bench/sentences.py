"""English sentences as input of benchmarks: the first lines of docstrings in Python's standard library."""

import ast
import sysconfig
from pathlib import Path

# Limits of a sentence, in characters.
LENGTH_MIN, LENGTH_MAX = 25, 120
WORDS_MIN = 5


def sentences(n: int) -> list[str]:
    """At most `n` different sentences, the same in every run on one Python. There are about 4,700."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                line = (ast.get_docstring(node) or "").split("\n")[0].strip()
                if LENGTH_MIN <= len(line) <= LENGTH_MAX and line.endswith(".") and line.count(" ") >= WORDS_MIN - 1:
                    found[line] = None
        if len(found) >= n:
            break
    return list(found)[:n]

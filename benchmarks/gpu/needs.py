"""Lists what `benchmarks/gpu.sh` needs and this Python does not have, one line each.

Imports only the standard library: on a host without downloads, it says what has to be brought.
"""

import argparse
import importlib.metadata
import re

# Of the project's own extras; and the baseline that a fleet is compared with.
EXTRAS = ("cli", "master", "worker", "minilm")
PLAIN_LOOP = "sentence-transformers"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LEAST = re.compile(r"[>=]=([0-9.]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)")


def missing() -> list[str]:
    """Of each package that is missing or too old: its requirement, and what is there instead."""
    try:
        requirements = importlib.metadata.requires("multigpu") or []
    except importlib.metadata.PackageNotFoundError:
        return ["multigpu: not installed; python -m build, or pip wheel --no-deps ., makes the wheel to bring"]
    found = []
    for line in [*requirements, PLAIN_LOOP]:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if extra and extra[1] not in EXTRAS:
            continue
        name = _NAME.match(requirement.strip())
        assert name is not None, line
        try:
            version = importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.strip()}: not installed")
            continue
        least = _LEAST.search(requirement)
        if least and numbers(version) < numbers(least[1]):
            found.append(f"{requirement.strip()}: {version} is installed")
    return found


def numbers(version: str) -> tuple[int, ...]:
    """Of a version, as far as it is numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(missing()))


if __name__ == "__main__":
    main()

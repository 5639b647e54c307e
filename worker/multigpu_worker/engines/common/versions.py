"""Versions of installed packages, for the keys of what was made with them."""

from importlib import metadata

# Distributions of one package: an environment has one of them.
_DISTRIBUTIONS = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu")}


def version_of(package: str) -> str:
    """Raises PackageNotFoundError."""
    first, *others = _DISTRIBUTIONS.get(package, (package,))
    for name in others:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return metadata.version(first)

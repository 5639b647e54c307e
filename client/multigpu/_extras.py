"""The extras of the programs: `pip install multigpu` alone installs the client."""

import importlib.util

# The modules that each program can't do without. pyproject.toml has their packages in the extra of the same name.
MODULES = {
    "cli": ("click", "cryptography", "rich", "structlog"),
    "containers": ("docker",),
    "gateway": (
        "click",
        "httptools",
        "httpx2",
        "jinja2",
        "msgspec",
        "prometheus_client",
        "python_multipart",
        "structlog",
        "uvicorn",
        "uvloop",
    ),
    "master": ("click", "cryptography", "grpc_health", "grpc_reflection", "prometheus_client", "structlog", "uvloop"),
    "worker": ("click", "structlog", "typeguard", "uvloop", "yaml"),
}


def missing(program: str, extra: str) -> str:
    """The error if a module of the extra is not installed, else "". A program passes it to sys.exit: exit code 1."""
    names = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    return f"{program}: not installed: {', '.join(names)}; run `pip install 'multigpu[{extra}]'`" if names else ""

"""mgpu-master: the worker registry, the durable queue, the strategies, and the front doors. docs/architecture.md has
the map.
"""

from importlib.metadata import version

VERSION = version("multigpu")

"""mgpu-master: the worker registry, the durable queue, the strategies, and the front doors. docs/architecture.md has
the map.
"""

from multigpu import __version__

VERSION = __version__

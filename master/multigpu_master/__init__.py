"""mgpu-master: the worker registry, the durable queue, the strategies, and the gRPC services. docs/architecture.md
describes how they work together.
"""

from multigpu import __version__

VERSION = __version__

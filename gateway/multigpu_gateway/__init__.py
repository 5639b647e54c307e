"""mgpu-gateway: HTTP and gRPC for a fleet. Clients of OpenAI's API work unchanged; the master queues their requests."""

from multigpu import __version__ as VERSION  # noqa: N812  a constant of this package

__all__ = ["VERSION"]

"""mgpu-gateway: HTTP for a fleet. Clients of OpenAI's API work unchanged, with the master's queue behind them."""

from multigpu import __version__ as VERSION  # noqa: N812  a constant of this package

__all__ = ["VERSION"]

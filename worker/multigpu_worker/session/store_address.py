"""The address at which a worker's engine meets the other ranks of a gang, if it is rank 0."""

import socket

from multigpu.config.values import split_address


class StoreAddress:
    """A port that nothing else gets, although nothing listens on it until an engine does.

    Bound, not listening: with SO_REUSEADDR, which the engine sets too (multigpu._ranks), an engine can bind and listen
    there, while the system gives the port to no one who asks for any.
    """

    def __init__(self, master: str) -> None:
        """`master`: its address; this one is that of the interface that leads there. OSError: there is none now."""
        host, port = ("127.0.0.1", 1) if master.startswith("unix:") else split_address(master)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
        self._reserved = socket.socket(family, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((own, 0))
        shown = f"[{own}]" if family is socket.AF_INET6 else own
        self.text = f"{shown}:{self._reserved.getsockname()[1]}"

"""The address at which the engine of a gang's rank 0 listens for the other ranks."""

import socket

from multigpu.config.values import split_address


class StoreAddress:
    """Reserves a port for an engine.

    The socket is bound and does not listen. With SO_REUSEADDR, which the engine also sets (multigpu._ranks), the engine
    can bind the same port and listen, while the kernel gives it to no program that asks for any free port.
    """

    def __init__(self, master: str) -> None:
        """Reserve a port on the interface that leads to the address `master`. Raises OSError if there is none now."""
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

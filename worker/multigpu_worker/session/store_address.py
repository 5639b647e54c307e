"""The address at which a worker's engine meets the other ranks of a gang, if it is rank 0."""

import socket


class StoreAddress:
    """A port that nothing else gets, although nothing listens on it until an engine does.

    Bound, not listening: with SO_REUSEADDR, which torch's TCPStore sets too, an engine can bind and listen there, while
    the system gives the port to no one who asks for any.
    """

    def __init__(self, master: str) -> None:
        """`master`: HOST:PORT; the address is that of the interface that leads there. OSError: there is none now."""
        host, port = _host_port(master)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
        self._reserved = socket.socket(family, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((own, 0))
        shown = f"[{own}]" if family is socket.AF_INET6 else own
        self.text = f"{shown}:{self._reserved.getsockname()[1]}"


def _host_port(master: str) -> tuple[str, int]:
    if master.startswith("unix:"):
        return "127.0.0.1", 1
    host, _, port = master.rpartition(":")
    return host.strip("[]"), int(port)

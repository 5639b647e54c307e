"""The server of the metrics endpoint: in the clear, or over TLS for peers who show a certificate.

prometheus_client's own has no time limit, and makes the TLS handshake where it accepts connections: one that says
nothing would keep everybody out. Here each has a thread and a minute, and there are few at a time.
"""

import socket
import ssl
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog

log = structlog.get_logger()

CONNECTION_TIMEOUT_S = 60
CONNECTIONS_MAX = 32


def start_server(port: int, host: str, app: Any, tls: tuple[str, str, str] | None) -> tuple[WSGIServer, Any]:
    """The server and its thread; `tls`: a certificate, its key, and the authority of callers. OSError: the address
    can't be had, or the files are no good (SSLError).
    """
    context = None
    if tls is not None:
        certificate, key, ca = tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    server = make_server(host, port, app, _Server6 if ":" in host else _Server, _Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name="multigpu metrics", daemon=True)
    thread.start()
    return server, thread


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Closes those beyond CONNECTIONS_MAX."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not a traceback for each who is not let in."""
        log.debug("a scrape failed", peer=str(client_address), error=repr(sys.exc_info()[1]))


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base names it so
        """A scrape is no news."""

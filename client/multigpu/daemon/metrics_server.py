"""The HTTP server of the metrics endpoint: in the clear, or over TLS for peers with a certificate.

prometheus_client's server has no timeout and makes the TLS handshake on its accepting thread, where one silent peer
would block all others. Here each connection has a thread and a timeout, and connections are limited.
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


class MetricsServer:
    """Serves a WSGI application on a thread until closed. `tls`: paths of the certificate, its key and the
    CA of clients (mTLS). OSError: the address is not available, or the files are invalid (SSLError).
    """

    def __init__(self, host: str, port: int, app: Any, tls: tuple[str, str, str] | None) -> None:
        context = None if tls is None else _make_context(*tls)
        self._server = make_server(host, port, app, _Server6 if ":" in host else _Server, _Handler)
        self._server.context = context
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="multigpu metrics", daemon=True)
        self._thread.start()

    def reload_certificate(self, certificate: str, key: str, ca: str) -> None:
        """Uses these files for new connections. OSError, SSLError: they are invalid, and the present ones stay."""
        assert self._server.context is not None, "only a server with TLS has a certificate"
        # Another context: the accepting thread may be making a connection from the present one.
        self._server.context = _make_context(certificate, key, ca)

    def close(self) -> None:
        """Stops, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # Of new connections; None: they are in the clear.
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection. Its own thread makes the TLS handshake, when it reads."""
        connection, address = super().get_request()
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Closes connections beyond CONNECTIONS_MAX."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread for it
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a failed connection without a traceback."""
        log.debug("a scrape failed", peer=str(client_address), error=repr(sys.exc_info()[1]))


class _Server6(_Server):
    address_family = socket.AF_INET6


def _make_context(certificate: str, key: str, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it so
        """Scrapes are not logged."""

"""The metrics endpoint over TLS, for those who show a certificate.

prometheus_client can serve over TLS itself, but makes the handshake where it accepts connections: one that says nothing
would keep everybody out. Here each has a thread, and a minute.
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


def start_tls_server(port: int, host: str, app: Any, certificate: str, key: str, ca: str) -> tuple[WSGIServer, Any]:
    """The server and its thread. OSError: the address can't be had, or the files are no good (SSLError)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    server = make_server(host, port, app, _Server6 if ":" in host else _Server, _Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name="multigpu metrics", daemon=True)
    thread.start()
    return server, thread


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not a traceback for each who is not let in."""
        log.debug("a scrape failed", peer=str(client_address), error=repr(sys.exc_info()[1]))


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base names it so
        """A scrape is no news."""

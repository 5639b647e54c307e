"""The HTTP server: uvicorn, with the limits that it lacks."""

import asyncio
import socket
from typing import Any

import uvicorn
from multigpu.config.config import ConfigError, GatewayConfig
from multigpu.config.values import split_address
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Limits of the headers of one request: their bytes, and the seconds until they are complete.
HEADER_BYTES_MAX = 64 << 10
HEADER_TIMEOUT_S = 30.0
# A connection is aborted if data waits to be sent and the client reads none of it for this long.
READER_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 75


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed if a request's headers are too large or too slow, or if the client stops reading."""

    # In slots: further instance attributes would enlarge the __dict__ of every connection.
    __slots__ = ("_header_bytes", "_header_timer", "_reader_timer")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes of the next request's headers, which may arrive while a request is served; None: a body is arriving.
        self._header_bytes: int | None = 0
        self._header_timer: asyncio.TimerHandle | None = None
        # Runs while the transport's write buffer is too full (between pause_writing and resume_writing).
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._expect_reader()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            if self._header_timer is None:  # the first bytes of another request
                self._expect_headers()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > HEADER_BYTES_MAX:
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        self._stop_header_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        super().on_message_complete()

    def _expect_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._too_slow)

    def _too_slow(self) -> None:
        self._header_timer = None
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait until the client has read everything
        super().timeout_keep_alive_handler()

    def _expect_reader(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(READER_TIMEOUT_S, self._check_reader, unread_bytes)

    def _check_reader(self, unread_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unread_bytes:
            self._expect_reader()
        else:
            self.transport.abort()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class HttpServer:
    """Serves an ASGI application at config.http. Raises ConfigError if the address or the certificate can't be used."""

    def __init__(self, config: GatewayConfig, app: Any) -> None:
        host, port = split_address(config.http)
        settings = uvicorn.Config(
            app, host=host, port=port, http=LimitedProtocol, ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=config.connections_max, timeout_graceful_shutdown=int(config.stop_timeout_s),
            ssl_certfile=config.http_tls_cert or None, ssl_keyfile=config.http_tls_key or None,
        )  # fmt: skip
        try:
            settings.load()
            self._socket = _listen(host, port, settings.backlog)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"can't serve HTTP at {config.http}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(settings)

    async def serve(self) -> None:
        """Serves until `stop` is called."""
        await self._server._serve([self._socket])  # noqa: SLF001  serve() would take the process' signals

    def stop(self) -> None:
        """Makes `serve` return, after at most stop_timeout_s for the requests under way."""
        self._server.should_exit = True


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(backlog)
    listener.setblocking(False)
    return listener

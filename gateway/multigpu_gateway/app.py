"""The ASGI application: finds a request's route, checks where it comes from, and turns errors into responses."""

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from multigpu import errors
from multigpu._transport.credentials import is_loopback
from multigpu.config.config import GatewayConfig

from multigpu_gateway import apidocs, dashboard, openai, rerank, rest, tei
from multigpu_gateway.clients import Clients
from multigpu_gateway.errors import (
    FORBIDDEN,
    INTERNAL,
    NOT_FOUND,
    UNAVAILABLE,
    DisconnectedError,
    HttpError,
    http_error,
    not_allowed,
)
from multigpu_gateway.http import Receive, Request, Send
from multigpu_gateway.kserve.endpoints import routes as inference_routes
from multigpu_gateway.kserve.inference import Inference
from multigpu_gateway.metrics import Metrics
from multigpu_gateway.routes import ErrorBody, Route, Serve

log = structlog.get_logger()

HEALTH, METRICS = "/health", "/metrics"
# The status, in metrics, of a request whose client disconnected. nginx uses the same number.
CLIENT_CLOSED_REQUEST = 499

API_ROUTES: dict[str, Route] = {**openai.ROUTES, **rerank.ROUTES, **rest.ROUTES, **tei.ROUTES}
ROUTES: dict[str, Route] = {**API_ROUTES, **apidocs.routes_of(API_ROUTES), **dashboard.ROUTES}


class Gateway:
    """Serves all HTTP requests. The gRPC server shares its clients, metrics and `inference`."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._on_this_host = is_loopback(config.http)
        self.clients = Clients(config)
        self.metrics = Metrics()
        self.inference = Inference(config)
        self.metrics.register(self.inference.statistics)
        self._routes = ROUTES | inference_routes(self.inference, self.clients)

    async def close(self) -> None:
        await self.clients.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "no other protocol is configured"
        begun_at = time.perf_counter()
        self.metrics.begun()
        limits: Any = {"body_bytes_max": self._config.body_bytes_max, "timeout_s": self._config.request_timeout_s}
        request = Request(scope, receive, send, **limits)
        name, status = "other", CLIENT_CLOSED_REQUEST
        try:
            name, status = await self._serve(request)
        except asyncio.CancelledError:  # the server is stopping, and stop_timeout_s has passed
            if not request.responded:
                stopping = HttpError(UNAVAILABLE, "the gateway is stopping: send the request again", retry_s=1.0)
                status = await self._fail(request, stopping, openai.error_body)
        finally:
            self.metrics.ended(name, status, time.perf_counter() - begun_at)

    async def _serve(self, request: Request) -> tuple[str, int]:
        """Responds to the request. Returns the route's name and the status, for metrics."""
        name = "other"
        error_body: ErrorBody = openai.error_body
        try:
            if request.path == HEALTH:
                name = HEALTH
                await self._health(request)
            elif request.path == METRICS:
                name = METRICS
                await request.respond(200, self.metrics.text(), b"text/plain; version=1.0.0; charset=utf-8")
            else:
                name, route = _route_of(request, self._routes)
                error_body = route.error_body
                serve = _method_of(route, request)
                if name not in dashboard.ROUTES:  # the dashboard checks its forms itself, and shows an error page
                    _check_site(request)
                if self._on_this_host and not _names_this_host(request):
                    await self._check_tokens(request)
                async with self.clients.acquire(route.token_of(request)) as pair:
                    await serve(request, pair)
        except DisconnectedError:
            return name, CLIENT_CLOSED_REQUEST
        except Exception as error:  # noqa: BLE001  _fail responds, and logs unexpected errors
            return name, await self._fail(request, error, error_body)
        return name, 200

    async def _fail(self, request: Request, error: Exception, error_body: ErrorBody) -> int:
        try:
            failure = http_error(error)
        except Exception:
            log.exception("a request failed", method=request.method, path=request.path)
            failure = HttpError(INTERNAL, "the gateway failed: its log says why", code="internal_error")
        if request.responded:  # too late for an error status: the server closes the connection, so the client notices
            log.warning("a response broke off", method=request.method, path=request.path, reason=failure.message)
            return failure.status
        await request.respond(failure.status, msgspec.json.encode(error_body(failure)), headers=failure.headers)
        return failure.status

    async def _check_tokens(self, request: Request) -> None:
        """Raises HttpError if the master requires no tokens. For a request whose Host names another host: the owner of
        a name can let it resolve to this host (DNS rebinding), and a browser then takes his page and the gateway for
        one site.
        """
        if not await self.clients.requires_tokens():
            raise HttpError(
                FORBIDDEN,
                f"Host is {request.header(b'host')}, and this gateway serves its own host, because the master asks "
                "nobody for a token: start the master with --require-tokens, or let a proxy send Host: localhost",
            )

    async def _health(self, request: Request) -> None:
        """Responds 200. Needs no token. Raises HttpError (503) if the master does not answer."""
        try:
            await self.clients.check_master()
        except errors.MultigpuError as error:
            raise HttpError(UNAVAILABLE, str(error), code="master_unavailable", retry_s=1.0) from error
        await request.respond(200, b'{"status":"ok"}')


def _route_of(request: Request, routes: Mapping[str, Route]) -> tuple[str, Route]:
    """Returns the path under which the route is registered, and the route. Raises HttpError if none matches."""
    path = request.path
    if path == "/" and request.method in ("GET", "HEAD"):  # POST / belongs to TEI
        return path, dashboard.HOME
    route = routes.get(path)
    if route is None:
        path = next((at for at, each in routes.items() if each.prefix and path.startswith(f"{at}/")), "")
        if not path:
            raise HttpError(NOT_FOUND, f"there is no {request.path}; docs/compatibility.md lists what there is")
        route = routes[path]
    return path, route


def _check_site(request: Request) -> None:
    """Raises HttpError if a page of another site made a browser send a request other than GET or HEAD. Only browsers
    send Sec-Fetch-Site: https://www.w3.org/TR/fetch-metadata/
    """
    if request.method not in ("GET", "HEAD") and request.header(b"sec-fetch-site") in ("cross-site", "same-site"):
        raise HttpError(
            FORBIDDEN, "pages of other sites may only read: send the request from a program, or a page of the gateway"
        )


def _names_this_host(request: Request) -> bool:
    """Whether Host is an IP address, localhost or a name below it. No page of another site has such a name."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{request.header(b'host')}").hostname or "localhost"
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
        return True
    return False


def _method_of(route: Route, request: Request) -> Serve:
    """Returns the function that serves the method. HEAD is served as GET: the server omits the body. Raises HttpError
    if the route does not have the method.
    """
    serve = route.methods.get("GET" if request.method == "HEAD" else request.method)
    if serve is None:
        raise not_allowed(request.path, request.method, *route.methods)
    return serve

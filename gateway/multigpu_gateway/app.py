"""The ASGI application: routes, callers, errors."""

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
# The status of a request whose caller hung up, for metrics: nginx' number.
HUNG_UP = 499

API_ROUTES: dict[str, Route] = {**openai.ROUTES, **rerank.ROUTES, **rest.ROUTES, **tei.ROUTES}
ROUTES: dict[str, Route] = {**API_ROUTES, **apidocs.routes_of(API_ROUTES), **dashboard.ROUTES}


class Gateway:
    """Serves the routes. `config`: limits and the master's address."""

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
        name, status = "other", HUNG_UP
        try:
            name, status = await self._answer(request)
        except asyncio.CancelledError:  # the server stops, and has waited for stop_timeout_s
            if not request.responded:
                stopping = HttpError(UNAVAILABLE, "the gateway is stopping: send it again", retry_s=1.0)
                status = await self._fail(request, stopping, openai.error_body)
        finally:
            self.metrics.ended(name, status, time.perf_counter() - begun_at)

    async def _answer(self, request: Request) -> tuple[str, int]:
        """Returns the route's name and the status, for metrics."""
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
                if name not in dashboard.ROUTES:  # its forms have a check and a page of their own
                    _check_site(request)
                if self._on_this_host and not _names_this_host(request):
                    await self._check_tokens(request)
                async with self.clients.of(route.token_of(request)) as connected:
                    await serve(request, connected)
        except DisconnectedError:
            return name, HUNG_UP
        except Exception as error:  # noqa: BLE001  the caller gets an answer, and the log the reason
            return name, await self._fail(request, error, error_body)
        return name, 200

    async def _fail(self, request: Request, error: Exception, error_body: ErrorBody) -> int:
        try:
            failure = http_error(error)
        except Exception:
            log.exception("a request failed", method=request.method, path=request.path)
            failure = HttpError(INTERNAL, "the gateway failed: its log says why", code="internal_error")
        if request.responded:  # it can't be taken back: the server closes the connection, so that the reader notices
            log.warning("an answer broke off", method=request.method, path=request.path, reason=failure.message)
            return failure.status
        await request.respond(failure.status, msgspec.json.encode(error_body(failure)), headers=failure.headers)
        return failure.status

    async def _check_tokens(self, request: Request) -> None:
        """HttpError: the master asks nobody for a token, and Host names another host. A browser sends that for a page
        whose owner has changed the address of his name to this host's (DNS rebinding): to it, this is the page's site.
        """
        if not await self.clients.asks_for_tokens():
            raise HttpError(
                FORBIDDEN,
                f"Host is {request.header(b'host')}, and this gateway serves its own host, because the master asks "
                "nobody for a token: start the master with --require-tokens, or let a proxy send Host: localhost",
            )

    async def _health(self, request: Request) -> None:
        """200: the master answers. Needs no token."""
        try:
            await self.clients.check_master()
        except errors.MultigpuError as error:
            raise HttpError(UNAVAILABLE, str(error), code="master_unavailable", retry_s=1.0) from error
        await request.respond(200, b'{"status":"ok"}')


def _route_of(request: Request, routes: Mapping[str, Route]) -> tuple[str, Route]:
    """The route and its path. HttpError: there is none."""
    path = request.path
    if path == "/" and request.method in ("GET", "HEAD"):  # TEI has POST
        return path, dashboard.HOME
    route = routes.get(path)
    if route is None:
        path = next((at for at, each in routes.items() if each.tree and path.startswith(f"{at}/")), "")
        if not path:
            raise HttpError(NOT_FOUND, f"there is no {request.path}; docs/compatibility.md lists what there is")
        route = routes[path]
    return path, route


def _check_site(request: Request) -> None:
    """HttpError: a page of another site sent it, by a browser that reaches the gateway. Other clients send no such
    header: https://www.w3.org/TR/fetch-metadata/
    """
    if request.method not in ("GET", "HEAD") and request.header(b"sec-fetch-site") in ("cross-site", "same-site"):
        raise HttpError(
            FORBIDDEN, "pages of other sites may only read here: send it from a program, or from the gateway's pages"
        )


def _names_this_host(request: Request) -> bool:
    """Whether Host is localhost or an address: no page of another site has these."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{request.header(b'host')}").hostname or "localhost"
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
        return True
    return False


def _method_of(route: Route, request: Request) -> Serve:
    """What serves the request; the server leaves out the body of an answer to HEAD. HttpError: the route does not take
    its method.
    """
    serve = route.methods.get("GET" if request.method == "HEAD" else request.method)
    if serve is None:
        raise not_allowed(request.path, request.method, *route.methods)
    return serve

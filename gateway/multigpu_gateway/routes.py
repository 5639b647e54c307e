"""What a route is."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from multigpu_gateway.clients import Connected
from multigpu_gateway.errors import HttpError
from multigpu_gateway.http import Request

# A request, and the caller's clients.
Serve = Callable[[Request, Connected], Awaitable[None]]
# An error, as the clients of a protocol expect it: a JSON value.
ErrorBody = Callable[[HttpError], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """What serves a method of a path, with what GET /openapi.json says of it; the docstring of `serve` is its summary.

    `body`, `answer`: the shape of a JSON value (apidocs/schemas.py); None: there is no body. `query`: a Struct of the
    parameters. `status`: of the answer. `content`: its content type; `body_content`: the body's. `headers`: those that
    it reads. `errors`: statuses that not every route has.
    """

    serve: Callable[..., Awaitable[Any]]
    body: Any = None
    query: type[Any] | None = None
    answer: Any = Any
    status: int = 200
    content: str = "application/json"
    body_content: str = "application/json"
    headers: tuple[bytes, ...] = ()
    errors: tuple[int, ...] = ()

    def __call__(self, request: Request, connected: Connected) -> Awaitable[Any]:
        return self.serve(request, connected)


# Operations by path, whose variable parts are in braces, and by method.
Paths = Mapping[str, Mapping[str, Operation]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path. `methods`: what serves each method. `tree`: the route also matches all paths below it. `token_of`: the
    caller's token; empty: none. `paths`: what GET /openapi.json says of it, where `methods` is not enough.
    """

    methods: Mapping[str, Serve]
    error_body: ErrorBody
    tree: bool = False
    token_of: Callable[[Request], str] = attrgetter("token")
    paths: Paths | None = None

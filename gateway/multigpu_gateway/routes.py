"""The types of the route table."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import HttpError
from multigpu_gateway.http import Request

# Responds to a request, with the clients of its token.
Serve = Callable[[Request, ClientPair], Awaitable[None]]
# Converts an error to the JSON value that clients of a protocol expect.
ErrorBody = Callable[[HttpError], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """Serves a method of a path, and describes it for GET /openapi.json; the docstring of `serve` is the summary.

    `body`, `response`: shapes of the request body and of the response, see apidocs/schemas.py; `body` None: there is
    none. `query`: a Struct of the query parameters. `status`, `content`: of the response. `body_content`: the request's
    content type. `headers`: request headers that `serve` reads. `errors`: statuses that not every route has.
    """

    serve: Callable[..., Awaitable[Any]]
    body: Any = None
    query: type[Any] | None = None
    response: Any = Any
    status: int = 200
    content: str = "application/json"
    body_content: str = "application/json"
    headers: tuple[bytes, ...] = ()
    errors: tuple[int, ...] = ()

    def __call__(self, request: Request, pair: ClientPair) -> Awaitable[Any]:
        return self.serve(request, pair)


# Operations by path, whose variable parts are in braces, and by method.
Paths = Mapping[str, Mapping[str, Operation]]


@dataclass(frozen=True, slots=True)
class Route:
    """What serves a path. `methods`: the function for each method. `prefix`: the route also matches all paths below the
    path. `token_of`: returns a request's token, "" if there is none. `paths`: the operations in GET /openapi.json, if
    they differ from `methods`.
    """

    methods: Mapping[str, Serve]
    error_body: ErrorBody
    prefix: bool = False
    token_of: Callable[[Request], str] = attrgetter("token")
    paths: Paths | None = None

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
class Route:
    """A path. `methods`: what serves each method. `tree`: also what is below the path. `token_of`: the caller's token;
    empty: none.
    """

    methods: Mapping[str, Serve]
    error_body: ErrorBody
    tree: bool = False
    token_of: Callable[[Request], str] = attrgetter("token")

"""GET /openapi.json, the OpenAPI document of the routes, and GET /docs, the same as a page. Neither needs a token."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from multigpu_gateway.apidocs.document import document
from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.pages import Page, page
from multigpu_gateway.http import Request
from multigpu_gateway.rest.errors import error_body
from multigpu_gateway.routes import Route, Serve

JSON_PATH, PAGE_PATH = "/openapi.json", "/docs"


def routes_of(described: Mapping[str, Route]) -> dict[str, Route]:
    """Returns the two routes, for a document that describes the routes in `described`."""
    made = cache(lambda: document(described))

    async def openapi(request: Request, _pair: ClientPair) -> None:
        await request.respond(200, msgspec.json.encode(made()))

    async def show(_request: Request, _pair: ClientPair) -> Page:
        return Page("docs.html", _values(made()), live=False)

    return {JSON_PATH: _public(openapi), PAGE_PATH: _public(page(show))}


def _public(serve: Serve) -> Route:
    return Route({"GET": serve}, error_body, token_of=lambda _request: "")


def _values(made: dict[str, Any]) -> dict[str, Any]:
    """Returns the values for the page: the operations of each tag, and the schemas as JSON."""
    operations = [
        (method.upper(), path, each) for path, methods in made["paths"].items() for method, each in methods.items()
    ]
    tags = {tag["name"]: tag["description"] for tag in made["tags"]}
    groups = [(tags[tag], [entry for entry in operations if tag in entry[2]["tags"]]) for tag in tags]
    schemas = {name: json.dumps(each, indent=2) for name, each in made["components"]["schemas"].items()}
    return {"groups": groups, "schemas": schemas}

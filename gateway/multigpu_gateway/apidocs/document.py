"""The OpenAPI document of the gateway's routes: https://spec.openapis.org/oas/v3.1.1.html."""

import re
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

import multigpu_gateway
from multigpu_gateway.apidocs.schemas import Schemas, error_schema
from multigpu_gateway.errors import (
    BAD_REQUEST,
    CONFLICT,
    FORBIDDEN,
    INTERNAL,
    LATE,
    NOT_FOUND,
    TIMED_OUT,
    TOO_LARGE,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    UNSUPPORTED,
)
from multigpu_gateway.routes import ErrorBody, Operation, Paths, Route

OPENAPI = "3.1.1"
# Error statuses of every operation, of those whose path has a variable part, and of those with a request body.
_EVERY = (BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, TOO_MANY, INTERNAL, UNAVAILABLE, LATE)
_NAMED = (NOT_FOUND,)
_WITH_BODY = (NOT_FOUND, TIMED_OUT, CONFLICT, TOO_LARGE, UNSUPPORTED)


def document(routes: Mapping[str, Route]) -> dict[str, Any]:
    """Returns the OpenAPI document of these routes."""
    operations = list(_operations(routes))
    schemas = Schemas(shape for *_, each, _ in operations for shape in (each.body, each.response) if shape is not None)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation, error_body in operations:
        name = f"{_package(error_body)}.Error"
        schemas.components[name] = error_schema(error_body)
        paths.setdefault(path, {})[method.lower()] = _described(path, method, operation, schemas, name)
    packages = dict.fromkeys(_package(operation.serve) for _, _, operation, _ in operations)
    tags = [{"name": name, "description": _summary(sys.modules[f"multigpu_gateway.{name}"])} for name in packages]
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "mgpu-gateway", "version": multigpu_gateway.VERSION, "description": _summary(multigpu_gateway)
        },
        "tags": tags,
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": {"token": bearer}},
    }  # fmt: skip


def _operations(routes: Mapping[str, Route]) -> Iterator[tuple[str, str, Operation, ErrorBody]]:
    """Yields the path, method, operation and error format of each operation."""
    for path, route in routes.items():
        paths = _paths(path, route) if route.paths is None else route.paths
        for at, methods in paths.items():
            for method, operation in methods.items():
                yield at, method, operation, route.error_body


def _paths(path: str, route: Route) -> Paths:
    """Returns the paths of a route whose `paths` is None."""
    methods = {
        method: serve if isinstance(serve, Operation) else Operation(serve) for method, serve in route.methods.items()
    }
    return {path: methods} | ({f"{path}/{{name}}": methods} if route.prefix else {})


def _described(path: str, method: str, operation: Operation, schemas: Schemas, error: str) -> dict[str, Any]:
    """Returns OpenAPI's Operation Object. `error`: the name of the component with the schema of its errors."""
    names = re.findall(r"{(\w+)}", path)
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": _summary(operation.serve),
        "tags": [_package(operation.serve)],
        "parameters": [*_path_parameters(names), *_query_parameters(operation.query), *_headers(operation)],
    }
    if operation.body is not None:
        content = {operation.body_content: {"schema": schemas.of(operation.body)}}
        found["requestBody"] = {"required": True, "content": content}
    media_type = {} if operation.content != "application/json" else {"schema": schemas.of(operation.response)}
    ok = {"description": HTTPStatus(operation.status).phrase, "content": {operation.content: media_type}}
    failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    statuses = {*_EVERY, *(_NAMED if names else ()), *(_WITH_BODY if operation.body is not None else ())}
    found["responses"] = {str(operation.status): ok} | {
        str(status): {"description": HTTPStatus(status).phrase, "content": failed}
        for status in sorted(statuses | set(operation.errors))
    }
    return found


def _path_parameters(names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(query: type[Any] | None) -> Iterator[dict[str, Any]]:
    if query is not None:
        (_,), components = msgspec.json.schema_components([query])
        schema = components[query.__name__]
        for name, each in schema["properties"].items():
            yield {"name": name, "in": "query", "required": name in schema["required"], "schema": each}


def _headers(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in operation.headers:
        yield {"name": name.decode().title(), "in": "header", "schema": {"type": "string"}}


def _summary(documented: Any) -> str:
    """Returns the first paragraph of a docstring, as one line."""
    return " ".join((documented.__doc__ or "").partition("\n\n")[0].split())


def _package(function: Any) -> str:
    """Returns the package, or the module, directly below multigpu_gateway that contains the function."""
    name: str = function.__module__.split(".")[1]
    return name

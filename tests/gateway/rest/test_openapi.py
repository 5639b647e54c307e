"""GET /openapi.json is valid, has every route, and the gateway answers as it says. GET /docs shows it."""

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from multigpu_gateway import tei
from multigpu_gateway.apidocs.document import document as document_of
from multigpu_gateway.app import API_ROUTES
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.conftest import GatewayProcess
from tests.gateway.dashboard.conftest import Text
from tests.gateway.rest.test_tasks import ended, submit

FLEET = {"workers": 1}
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gateway.md").read_text("utf-8")


@pytest.fixture(scope="module")
def document(gateway: GatewayProcess) -> Any:
    response, body = gateway.call("GET", "/openapi.json")
    assert response.status == 200
    return body


def check(document: Any, schema: Any, value: Any) -> None:
    """ValidationError: the value is not as the schema says."""
    OAS31Validator({**schema, "components": document["components"]}).validate(value)


def answer_schema(document: Any, method: str, path: str, status: int) -> Any:
    return document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]


def test_the_document_is_valid(document: Any) -> None:
    OpenAPIV31SpecValidator(document).validate()


def test_every_route_is_described(document: Any) -> None:
    for path, route in API_ROUTES.items():
        if path in {f"/{name}" for name, methods in tei.OPERATIONS.items() if tei.not_served in methods.values()}:
            continue
        described = {
            at: methods
            for at, methods in document["paths"].items()
            if at == path or (at.startswith(f"{path}/") and at not in API_ROUTES)
        }
        assert described, path
        methods = {method.upper() for each in described.values() for method in each}
        assert methods == set(route.methods)
        for operation in (each for methods in described.values() for each in methods.values()):
            assert operation["summary"]
            assert operation["responses"].keys() >= {"400", "401", "403", "429", "500", "503", "504"}


def test_every_body_has_the_schema_of_what_reads_it(document: Any) -> None:
    bodies = {
        path: methods["post"]["requestBody"]["content"] for path, methods in document["paths"].items()
        if "requestBody" in methods.get("post", {})
    }  # fmt: skip
    assert {"/v1/embeddings", "/v1/chat/completions", "/v1/rerank", "/v1/tasks", "/embed", "/tei/{model}"} <= set(
        bodies
    )
    schema = bodies["/v1/embeddings"]["application/json"]["schema"]
    check(document, schema, {"model": "m", "input": ["x", "y"]})
    with pytest.raises(Exception, match="'model' is a required property"):
        check(document, schema, {"input": ["x", "y"]})


def test_the_examples_of_the_page_are_as_described(gateway: GatewayProcess, document: Any) -> None:
    examples = re.findall(r"curl localhost:8000/v1/tasks -d '(.+)'", PAGE)
    assert examples
    schema = document["paths"]["/v1/tasks"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for text in examples:
        check(document, schema, json.loads(text))
        response, body = gateway.call("POST", "/v1/tasks", text.encode())
        check(document, answer_schema(document, "post", "/v1/tasks", response.status), body)
    for path in re.findall(r"curl '?(?:-N )?'?localhost:8000(/v1/tasks/by-request-id/[^?'/]+\?[^']+)'", PAGE):
        response, body = gateway.call("GET", path)
        template = "/v1/tasks/by-request-id/{request_id}"
        check(document, answer_schema(document, "get", template, response.status), body)
        assert body["outcome"]["result"] == {"n": 1}


def test_answers_are_as_described(gateway: GatewayProcess, document: Any) -> None:
    task = ended(gateway, submit(gateway, kind="echo", payload_base64="/w==", labels={}, parameters={"a": "b"}))
    check(document, answer_schema(document, "get", "/v1/tasks/{task_id}", 200), task)
    for path in ("/v1/tasks", "/v1/workers", "/v1/queues", "/v1/usage", "/v1/stats"):
        _, body = gateway.call("GET", path)
        check(document, answer_schema(document, "get", path, 200), body)
    for path in ("/v1/tasks/x", "/v1/tasks/1"):
        response, body = gateway.call("GET", path)
        check(document, answer_schema(document, "get", "/v1/tasks/{task_id}", response.status), body)
    response, body = gateway.call("POST", "/v1/embeddings", {"model": "nobody"})
    check(document, answer_schema(document, "post", "/v1/embeddings", response.status), body)
    response, body = gateway.call("POST", "/embed", {})
    assert response.status == 422
    check(document, answer_schema(document, "post", "/embed", response.status), body)


def test_the_page_shows_every_operation(gateway: GatewayProcess, document: Any) -> None:
    response, html = gateway.call("GET", "/docs")
    assert response.status == 200
    assert "script-src 'self'" in (response.getheader("content-security-policy") or "")
    text = Text(html).text
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in text
            assert " ".join(operation["summary"].split()) in text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in html
    assert set(re.findall(r'href="#([^"]+)"', html)) <= {*document["components"]["schemas"], "content"}


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
def test_no_master_and_no_token_are_needed(tmp_path: Path, path: str) -> None:
    with GatewayProcess(tmp_path, "127.0.0.1:1") as alone:
        assert alone.call("GET", path, headers={"Authorization": "Basic x"})[0].status == 200
        assert alone.call("POST", path)[0].status == 405


@pytest.fixture(scope="module")
def api(gateway: GatewayProcess) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


# What an answer has to be, by the document.
CONFORMANCE = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def cases() -> Iterator[tuple[str, str, GenerationMode]]:
    """Method, path, and whether requests are as the document says: others need something that can be wrong."""
    for path, methods in document_of(API_ROUTES)["paths"].items():
        if re.match("/v1/(tasks|queues|workers|stats)", path):
            for method, operation in methods.items():
                yield method, path, GenerationMode.POSITIVE
                if "requestBody" in operation or any(each["in"] == "query" for each in operation["parameters"]):
                    yield method, path, GenerationMode.NEGATIVE


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), list(cases()))
def test_no_request_gets_an_answer_that_contradicts_the_document(
    gateway: GatewayProcess, api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    task_id = submit(gateway, kind="echo", payload={"a": [1]}, request_id=str(uuid.uuid4()))
    task = ended(gateway, task_id)
    statuses = set()

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def call(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:  # a task, and a kind, that there is
            case.path_parameters = {name: task[name] for name in case.path_parameters or ()}
            if isinstance(case.body, dict) and "kind" in case.body:
                case.body["kind"] = "echo"
        statuses.add(case.call_and_validate(checks=CONFORMANCE, timeout=70).status_code)

    call()
    assert min(statuses) < 300 if mode is GenerationMode.POSITIVE else max(statuses) >= 400

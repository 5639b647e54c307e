"""OpenAI's API: https://platform.openai.com/docs/api-reference."""

from typing import Any

from multigpu_gateway.openai import batches, files, serving_files
from multigpu_gateway.openai.embeddings import embeddings
from multigpu_gateway.openai.errors import error_body as error_body
from multigpu_gateway.openai.generating import chat_completions, completions
from multigpu_gateway.openai.models import PATH, models
from multigpu_gateway.openai.requests import ChatRequest, CompletionRequest, EmbeddingsRequest
from multigpu_gateway.routes import Operation, Paths, Route
from multigpu_gateway.tasks import IDEMPOTENCY_KEY, TASK_HEADERS

_MODELS: Paths = {PATH: {"GET": Operation(models)}, f"{PATH}/{{model}}": {"GET": Operation(models)}}
_FILES: Paths = {
    files.PATH: {
        "GET": Operation(serving_files.get),
        "POST": Operation(serving_files.upload, body=dict[str, Any], body_content="multipart/form-data"),
    },
    f"{files.PATH}/{{file_id}}": {"GET": Operation(serving_files.get)},
    f"{files.PATH}/{{file_id}}/content": {"GET": Operation(serving_files.get, content="application/octet-stream")},
}
_BATCHES: Paths = {
    batches.PATH: {
        "GET": Operation(batches.get),
        "POST": Operation(batches.post, body=batches.BatchRequest, headers=(IDEMPOTENCY_KEY,)),
    },
    f"{batches.PATH}/{{batch_id}}": {"GET": Operation(batches.get)},
    f"{batches.PATH}/{{batch_id}}/cancel": {"POST": Operation(batches.post)},
}
ROUTES = {
    "/v1/embeddings": Route({"POST": Operation(embeddings, body=EmbeddingsRequest, headers=TASK_HEADERS)}, error_body),
    "/v1/completions": Route(
        {"POST": Operation(completions, body=CompletionRequest, headers=TASK_HEADERS)}, error_body
    ),
    "/v1/chat/completions": Route(
        {"POST": Operation(chat_completions, body=ChatRequest, headers=TASK_HEADERS)}, error_body
    ),
    PATH: Route({"GET": models}, error_body, prefix=True, paths=_MODELS),
    files.PATH: Route({"POST": serving_files.upload, "GET": serving_files.get}, error_body, prefix=True, paths=_FILES),
    batches.PATH: Route({"POST": batches.post, "GET": batches.get}, error_body, prefix=True, paths=_BATCHES),
}

"""OpenAI's API: https://platform.openai.com/docs/api-reference."""

from multigpu_gateway.openai import batches, files, serving_files
from multigpu_gateway.openai.embeddings import embeddings
from multigpu_gateway.openai.errors import error_body as error_body
from multigpu_gateway.openai.generating import chat_completions, completions
from multigpu_gateway.openai.models import PATH, models
from multigpu_gateway.routes import Route

ROUTES = {
    "/v1/embeddings": Route({"POST": embeddings}, error_body),
    "/v1/completions": Route({"POST": completions}, error_body),
    "/v1/chat/completions": Route({"POST": chat_completions}, error_body),
    PATH: Route({"GET": models}, error_body, tree=True),
    files.PATH: Route({"POST": serving_files.upload, "GET": serving_files.get}, error_body, tree=True),
    batches.PATH: Route({"POST": batches.post, "GET": batches.get}, error_body, tree=True),
}

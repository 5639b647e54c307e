"""GET /v1/models and /v1/models/NAME."""

from typing import Any

import msgspec

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import NOT_FOUND, HttpError
from multigpu_gateway.http import Request

PATH = "/v1/models"


async def models(request: Request, pair: ClientPair) -> None:
    """Lists the models of the fleet, or returns one."""
    async with request.while_connected():
        entries = await pair.admin.list_models()
    names = sorted({entry.model.name for entry in entries if not entry.model.error})
    wanted = request.path.removeprefix(PATH).removeprefix("/")
    answer: dict[str, Any] = {"object": "list", "data": [_model(name) for name in names]}
    if wanted:
        if wanted not in names:
            there = f"there are {', '.join(names)}" if names else "the fleet has none"
            raise HttpError(NOT_FOUND, f"there is no model {wanted!r}; {there}", code="model_not_found", param="model")
        answer = _model(wanted)
    await request.respond(200, msgspec.json.encode(answer))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "multigpu"}

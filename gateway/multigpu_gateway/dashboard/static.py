"""The files of /ui/static: a style sheet, a script, an icon, and two libraries, whose hashes are in SHA256SUMS."""

from importlib.resources import files
from pathlib import PurePosixPath

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.pages import HEADERS
from multigpu_gateway.errors import NOT_FOUND, HttpError
from multigpu_gateway.http import Request

_TYPES = {".js": b"text/javascript", ".css": b"text/css", ".svg": b"image/svg+xml"}
_FILES = {
    each.name: each.read_bytes()
    for each in files(__package__).joinpath("static").iterdir()
    if PurePosixPath(each.name).suffix in _TYPES
}


async def serve(request: Request, _pair: ClientPair) -> None:
    name = request.path.removeprefix("/ui/static/")
    if name not in _FILES:
        raise HttpError(NOT_FOUND, f"there is no {request.path}")
    headers = [(b"cache-control", b"no-cache") if key == b"cache-control" else (key, value) for key, value in HEADERS]
    await request.respond(200, _FILES[name], _TYPES[PurePosixPath(name).suffix], headers)

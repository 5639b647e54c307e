"""A handler class whose model is missing."""

import multigpu


@multigpu.handler
class Broken:
    def __init__(self) -> None:
        raise FileNotFoundError("no weights in /models/m")

    def __call__(self, value: bytes) -> bytes:
        return value

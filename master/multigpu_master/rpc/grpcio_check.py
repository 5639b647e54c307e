"""The private names of grpcio that `transport` uses: each minor version may change them."""

import pkgutil

import grpc

_CORE = "grpc._cython.cygrpc:"
NAMES = (
    "grpc.aio._server:Server",
    f"{_CORE}_handle_stream_stream_rpc",
    f"{_CORE}_handle_stream_unary_rpc",
    f"{_CORE}_schedule_rpc_coro",
    f"{_CORE}AioServer._make_request_call_future",
    f"{_CORE}AioServer._request_call",
    f"{_CORE}AioServer._request_registered_call",
    f"{_CORE}AioServer.add_registered_method_handlers",
)


def error() -> str:
    """Why a master cannot serve with the installed grpcio, else ""."""
    missing = [name.rpartition(":")[2] for name in NAMES if not _exists(name)]
    if not missing:
        return ""
    return (
        f"mgpu-master: grpcio {grpc.__version__} lacks {', '.join(missing)}: the master does not start, because one "
        "malformed call could end gRPC's own server; run `pip install 'multigpu[master]'`"
    )


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True

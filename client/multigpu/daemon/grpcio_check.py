"""The private names of grpcio that `grpc_server` uses: each minor version may change them."""

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


def error(program: str, extra: str) -> str:
    """Why a program cannot serve with the installed grpcio, else "". `extra`: the program's, which has another."""
    missing = [name.rpartition(":")[2] for name in NAMES if not _exists(name)]
    if not missing:
        return ""
    return (
        f"{program}: grpcio {grpc.__version__} lacks {', '.join(missing)}: it does not start, because one malformed "
        f"call could end gRPC's own server; run `pip install 'multigpu[{extra}]'`"
    )


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True

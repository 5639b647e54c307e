"""Registers services on the server: authentication, audit, parsing and error handling of every call.

Every method is registered with a stream of requests, because gRPC then reads no request by itself. A request may have
64 MiB, so it is read only after the token check. Interceptors of grpc.aio cannot do this, see decision 17.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection, reflection_pb2

# These imports add the payload messages to the descriptor pool, from which reflection serves message types.
from multigpu.v1 import classify_pb2, embed_pb2, generate_pb2, infer_pb2, rerank_pb2  # noqa: F401

from multigpu_master.errors import InvalidArgumentError, call_error
from multigpu_master.rpc.requests import parse
from multigpu_master.security.audit import Audit
from multigpu_master.security.auth import Auth, Serve

Read = Callable[[Any], Awaitable[Any]]  # reads one message, or EOF, from a call's context


def add_service(
    server: Any,
    descriptor: ServiceDescriptor,
    servicer: object,
    auth: Auth | None = None,
    audit: Audit | None = None,
    read: Read | None = None,
) -> None:
    """Serves every method of the descriptor with the servicer's method of the same name.

    Methods with one request are `async (request, context)` and return their response, or write their responses if they
    stream. Methods with a stream of requests are `async (context)`, and read and write bytes.

    `read`: reads the one request in place of `context.read`. The call is then served as a stream, so the methods write
    their response themselves.
    """
    handlers = {}
    for method in descriptor.methods:
        name, request_type = f"{descriptor.name}/{method.name}", GetMessageClass(method.input_type)
        serve = _with_request_parsed(getattr(servicer, method.name), None if method.client_streaming else request_type)
        # Inside authentication: rejected calls must not fill the audit log.
        serve = serve if audit is None else audit.wrap(serve, name, functools.partial(parse, request_type))
        serve = serve if method.client_streaming else _with_request_read(serve, name, read)
        serve = serve if auth is None else auth.with_checks(serve, name)
        serialize = None if method.client_streaming else GetMessageClass(method.output_type).SerializeToString
        streams = method.server_streaming or read is not None
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        handlers[method.name] = make(_errors_to_status(serve, method.name), response_serializer=serialize)
    server.add_registered_method_handlers(descriptor.full_name, handlers)


class Reflection:
    """gRPC's reflection service, which lets generic tools read the message types."""

    DESCRIPTOR: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the full names of the other services."""
        self._servicer = reflection.aio.ReflectionServicer((*names, reflection.SERVICE_NAME))

    async def ServerReflectionInfo(self, context: Any) -> None:  # noqa: N802  gRPC's name
        async for response in self._servicer.ServerReflectionInfo(self._requests(context), context):
            await context.write(response.SerializeToString())

    async def _requests(self, context: Any) -> AsyncIterator[Any]:
        while (data := await context.read()) is not grpc.aio.EOF:
            yield parse(reflection_pb2.ServerReflectionRequest, data)


def _with_request_read(serve: Serve, name: str, read: Read | None) -> Serve:
    """Wraps `serve`: reads the one request of the call, and passes its bytes on."""

    async def reading(_requests: object, context: Any) -> Any:
        data = await (context.read() if read is None else read(context))
        if data is grpc.aio.EOF:
            raise InvalidArgumentError(f"{name} takes a request, and none came: send one")
        return await serve(data, context)

    return reading


def _with_request_parsed(implementation: Callable[..., Awaitable[Any]], request_type: Any | None) -> Serve:
    """Wraps a method: parses its request. `request_type`: None for a method that reads a stream of requests itself."""

    async def serving(data: bytes, context: Any) -> Any:
        if request_type is None:
            return await implementation(context)
        return await implementation(parse(request_type, data), context)

    return serving


def _errors_to_status(serve: Serve, name: str) -> Serve:
    """Wraps `serve`: if it raises an exception, ends the call with a status."""

    async def ending_with_status(request: Any, context: Any) -> Any:
        try:
            return await serve(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except grpc.aio.InternalError as error:  # gRPC could not send: the peer is gone
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001  every exception becomes a status
            failure = call_error(error, name)
            # The traceback's frames would keep the request in memory.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            await context.abort(failure.code, str(failure))
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError from error

    return ending_with_status

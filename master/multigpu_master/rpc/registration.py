"""Puts a service on a server. We parse requests ourselves, so that one that isn't ours is INVALID_ARGUMENT and says
what was expected, where the generated code would answer INTERNAL. And an exception of ours is logged, once, and is
INTERNAL.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from multigpu_master.journal import JournalError
from multigpu_master.security.audit import Audit
from multigpu_master.security.gate import Gate, GuardedHandlers

log = structlog.get_logger()


def add_service(
    server: Any, descriptor: ServiceDescriptor, servicer: object, gate: Gate | None = None, audit: Audit | None = None
) -> None:
    """Serves every method of the descriptor by the servicer's method of the same name: for those whom the gate lets
    in, and with what administrators do written into the audit.

    Methods with one request are `async (request, context)`, returning or writing responses; those with a stream of
    requests are `async (context)`, and read and write bytes, to be parsed with `parse`.
    """
    handlers = {}
    for method in descriptor.methods:
        implementation = getattr(servicer, method.name)
        serialize = GetMessageClass(method.output_type).SerializeToString
        request_type, name = GetMessageClass(method.input_type), f"{descriptor.name}/{method.name}"

        def behind(serve: Any, name: str = name, request_type: Any = request_type) -> Any:
            # The audit behind the gate: who isn't let in can't fill it.
            serve = serve if audit is None else audit.wrap(serve, name, request_type)
            return serve if gate is None else gate.guard(serve, name)

        if method.client_streaming:
            wrapped = _guarded_stream(implementation, method.name)
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(behind(wrapped))
        elif method.server_streaming:
            wrapped = _guarded(implementation, method.name, request_type)
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(behind(wrapped), response_serializer=serialize)
        else:
            wrapped = _guarded(implementation, method.name, request_type)
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(behind(wrapped), response_serializer=serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(descriptor.full_name, handlers),))


def add_reflection(server: Any, names: Sequence[str], gate: Gate | None) -> None:
    """Lets generic tools ask for our messages; those whom the gate lets in."""
    guarded = server if gate is None else _Behind(server, gate)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), guarded)


class _Behind:
    """What generated code sees of a server, with a gate before what it adds."""

    def __init__(self, server: Any, gate: Gate) -> None:
        self._server = server
        self._gate = gate

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._server.add_generic_rpc_handlers(tuple(GuardedHandlers(h, self._gate) for h in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same handlers a second time, as a quicker way past the first: not past the gate."""


async def parse(message_type: Any, data: bytes, context: Any) -> Any:
    """The message in these bytes. INVALID_ARGUMENT: they are not one."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"not a {name}: {error}; check that both sides use the same .proto files and that strings are UTF-8",
        )


async def _report(error: Exception, name: str, context: Any) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        # gRPC could not send: the peer is gone, and nobody is left to be told.
        raise asyncio.CancelledError from error
    if isinstance(error, JournalError):
        log.error("a call failed for want of the journal", method=name, error=str(error))
        await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
    log.error("a call failed by a fault of the master", method=name, exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"the master failed to serve {name}: {error!r}; its log has the details"
    )


def _guarded(implementation: Callable[..., Awaitable[Message]], name: str, message_type: Any) -> Callable[..., Any]:
    async def serve(data: bytes, context: Any) -> Message | None:
        request = await parse(message_type, data, context)
        try:
            return await implementation(request, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await _report(error, name, context)
            raise

    return serve


def _guarded_stream(implementation: Callable[..., Awaitable[None]], name: str) -> Callable[..., Any]:
    async def serve(_iterator: object, context: Any) -> None:
        try:
            await implementation(context)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await _report(error, name, context)
            raise

    return serve

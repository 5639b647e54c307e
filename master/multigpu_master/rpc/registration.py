"""Puts a service on a server. We read requests ourselves, after the token was checked: gRPC would read up to 64 MiB
before it runs a handler. We parse them ourselves, so that one that isn't ours is INVALID_ARGUMENT and says what was
expected, where the generated code would answer INTERNAL. And an exception of ours is logged, once, and is INTERNAL.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from multigpu._transport.payloads import is_transient

from multigpu_master.driver import BrokenError
from multigpu_master.journal.protocol import JournalDamagedError, JournalError
from multigpu_master.rpc.fields import more_fields_than
from multigpu_master.rpc.status import reject
from multigpu_master.security.audit import Audit
from multigpu_master.security.auth import Gate

log = structlog.get_logger()

# Most that a request without payloads may have: parsing many small fields holds the event loop, 60 ms a MiB.
REQUEST_BYTES_MAX = 2 << 20
WITH_PAYLOADS = {"SubmitRequest", "RunRequest", "SessionRequest"}
# Most that one with payloads may have, if it is larger than that. Ten thousand tasks of Submit have fewer.
FIELDS_MAX = 500_000

Read = Callable[[Any], Awaitable[Any]]  # of a call's context: one message in bytes, or EOF


def add_service(
    server: Any,
    descriptor: ServiceDescriptor,
    servicer: object,
    gate: Gate | None = None,
    audit: Audit | None = None,
    read: Read | None = None,
) -> None:
    """Serves every method of the descriptor by the servicer's method of the same name: for those whom the gate lets
    in, and with what administrators do written into the audit.

    Methods with one request are `async (request, context)`, returning or writing responses; those with a stream of
    requests are `async (context)`, and read and write bytes, to be parsed with `parse`. `read` reads the one
    request, of a servicer whose methods all write their responses.
    """
    handlers = {}
    for method in descriptor.methods:
        implementation, name = getattr(servicer, method.name), f"{descriptor.name}/{method.name}"
        serialize, request_type = (
            GetMessageClass(method.output_type).SerializeToString,
            GetMessageClass(method.input_type),
        )
        if method.client_streaming:
            serve = _guarded_stream(implementation, method.name)
        else:
            serve = _guarded(implementation, method.name, request_type)
        # The audit behind the gate: who isn't let in can't fill it.
        serve = serve if audit is None else audit.wrap(serve, name, request_type)
        serve = serve if method.client_streaming else _reading(serve, name, read or _read)
        serve = serve if gate is None else gate.guard(serve, name)
        # To gRPC all requests are streams: it would read a single request itself, before it calls us.
        if method.client_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(serve)
        elif method.server_streaming or read is not None:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(serve, response_serializer=serialize)
        else:
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(serve, response_serializer=serialize)
    server.add_registered_method_handlers(descriptor.full_name, handlers)


def add_reflection(server: Any, names: Sequence[str], gate: Gate | None) -> None:
    """Lets generic tools ask for our messages; those whom the gate lets in."""
    servicer = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, _Behind(server, gate))


class _Behind:
    """What generated code sees of a server, with a gate before what it adds."""

    def __init__(self, server: Any, gate: Gate | None) -> None:
        self._server = server
        self._gate = gate

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same handlers a second time, by a way that our server doesn't have."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        guarded = {name: self._guarded(handler, service, name) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, guarded)

    def _guarded(self, handler: Any, service: str, name: str) -> Any:
        async def serve(request_iterator: Any, context: Any) -> None:
            try:
                async with contextlib.aclosing(handler.stream_stream(request_iterator, context)) as responses:
                    async for response in responses:
                        await context.write(response)
            except DecodeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a ServerReflectionRequest: {error}")

        if self._gate is None:
            return handler._replace(stream_stream=serve)
        return handler._replace(stream_stream=self._gate.guard(serve, f"{service.rsplit('.', 1)[-1]}/{name}"))


async def _read(context: Any) -> Any:
    return await context.read()


def _reading(serve: Callable[..., Awaitable[Any]], name: str, read: Read) -> Callable[..., Any]:
    """`serve`, with the one request that is read from the stream."""

    async def reading(_iterator: object, context: Any) -> Any:
        data = await read(context)
        if data is grpc.aio.EOF:
            try:
                await reject(
                    context, grpc.StatusCode.INVALID_ARGUMENT, f"{name} takes a request, and none came: send one"
                )
            except grpc.aio.InternalError as error:  # the peer is gone
                raise asyncio.CancelledError from error
        return await serve(data, context)

    return reading


async def parse(message_type: Any, data: bytes, context: Any) -> Any:
    """The message in these bytes. INVALID_ARGUMENT: they are not one, or too many for one without payloads, or it has
    too many fields.
    """
    if len(data) > REQUEST_BYTES_MAX:
        if message_type.DESCRIPTOR.name not in WITH_PAYLOADS:
            text = (
                f"the request has {len(data)} bytes, and at most {REQUEST_BYTES_MAX} are allowed: ask for less at once"
            )
            await reject(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        if more_fields_than(FIELDS_MAX, message_type.DESCRIPTOR, data):
            text = f"the message has more than {FIELDS_MAX} fields: send fewer tasks at once"
            await reject(context, grpc.StatusCode.INVALID_ARGUMENT, text)
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
    if isinstance(error, BrokenError):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    if isinstance(error, JournalDamagedError):
        log.error("a call failed: the journal is damaged", method=name, error=str(error))
        await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
    if isinstance(error, JournalError) or is_transient(error):
        log.error("a call failed: the journal cannot be read now", method=name, error=repr(error))
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"the master cannot read it now ({error!r}); try again")
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

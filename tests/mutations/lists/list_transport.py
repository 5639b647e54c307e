"""Mutations of what the master does before it knows a peer's token."""

from functools import partial

from tests.mutations.mutation import Mutation

transport = partial(Mutation, module="multigpu_master.rpc.transport", checker="transport", seeds=1)
registration = partial(Mutation, module="multigpu_master.rpc.registration", checker="transport", seeds=1)
health = partial(Mutation, module="multigpu_master.rpc.health_service", checker="transport", seeds=1)

TRANSPORT = (
    health(
        name="a connection may have any number of health calls",
        old="if self._calls[peer] >= CALLS_MAX or ",
        new="if ",
        breaks="a peer that reads nothing holds 40 KiB for each call",
    ),
    health(
        name="any number of Watch streams of health",
        old="if self._watches >= WATCHES_MAX:",
        new="if self._watches >= 1_000_000:",
        breaks="connections without a token hold a gigabyte",
    ),
    transport(
        name="compressed messages are unpacked",
        old='    ("grpc.compression_enabled_algorithms_bitset", 1),\n',
        new="",
        breaks="61 KB of anybody take 60 MiB",
    ),
    transport(
        name="gRPC decodes the path of any call",
        old="return self._running_loop.create_task(self._answer(method))",
        new="return super()._make_request_call_future(method)",
        breaks="one frame of anybody ends the service",
    ),
    transport(
        name="health requests may be large",
        old="time.process_time() > cpu_s or time.monotonic() > end_s",
        new="time.monotonic() > end_s",
        breaks="anybody may have the master hold 64 MiB for each call of health",
    ),
    registration(
        name="a request is read before the token is checked",
        old="""        serve = serve if method.client_streaming else _reading(serve, name, read)
        serve = serve if auth is None else auth.guard(serve, name)
""",
        new="""        serve = serve if auth is None else auth.guard(serve, name)
        serve = serve if method.client_streaming else _reading(serve, name, read)
""",
        breaks="anybody may have the master hold 64 MiB for each call",
    ),
)

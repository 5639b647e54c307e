"""Mutations of the client: run_state.py (unsettled calls, and sending them again), and the origin of its settings."""

from functools import partial

from tests.mutations.mutation import Mutation

run_state = partial(Mutation, module="multigpu._transport.run_state", checker="client", seeds=300)
stream = partial(Mutation, checker="stream", seeds=30)
settings = partial(Mutation, checker="access", seeds=1)

CLIENT = (
    run_state(
        name="a reference is sent before the stream's offer",
        old="        if not self.sharing.shares:\n            return None\n",
        new="",
        breaks="a master that was restarted rejects the references of a client's earlier stream",
    ),
    run_state(
        name="a reference outlives its master",
        old="            for call in self._unsettled.values():\n                call.place = None\n",
        new="            pass\n",
        breaks="a client sends references to files written before a restart of the master",
    ),
    run_state(
        name="unsettled calls are not sent on a new stream",
        old="self._outbox = deque(call for call in self._unsettled.values() if not call.deferred)",
        new="self._outbox = deque(call for call in self._outbox if not call.deferred)",
        breaks="P9: a call waits for ever for a task that was lost with its stream",
    ),
    run_state(
        name="withdrawals are not sent on a new stream",
        old="        self._cancel_outbox = list(self._cancelling)\n",
        new="",
        breaks="a task whose caller is gone runs on",
    ),
    run_state(
        name="the answer to a withdrawal settles the next call",
        old="            if withdrawals and request_id in withdrawals and message.error.type == WITHDRAWN:",
        new="            if False:",
        breaks="a call that is started again after its withdrawal fails with TaskCancelled",
    ),
    stream(
        name="the stream's writer is not supervised",
        module="multigpu._transport.run_stream",
        old="writer = group.create_task(",
        new="writer = asyncio.get_running_loop().create_task(",
        breaks="after an error of the writer every call of the client waits for ever",
    ),
    stream(
        name="a task's own options are sent unread",
        module="multigpu.options",
        old="(value := _own_value(name, options.pop(name)))",
        new="(value := options.pop(name))",
        breaks="a value that no message can carry ends the stream that all calls share",
    ),
    settings(
        name="arguments of a client replace the config file",
        module="multigpu._calls.core",
        old="dataclasses.replace(load_client_config(), **changes)",
        new="dataclasses.replace(load_client_config().__class__(), **changes)",
        breaks="a client drops TLS and its token",
    ),
    settings(
        name="--config is for administrative calls only",
        module="multigpu.cli.options",
        old="    os.environ[config.FILE_VARIABLE] = str(Path(str(path)).resolve())\n",
        new="",
        breaks="commands of the SDK, threads and child processes do not read the file given by --config",
    ),
)

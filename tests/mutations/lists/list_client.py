"""Mutations of run_state.py: a client's unsettled calls, and sending them again."""

from functools import partial

from tests.mutations.mutation import Mutation

run_state = partial(Mutation, module="multigpu._transport.run_state", checker="client", seeds=300)
CLIENT = (
    run_state(
        "a master that was restarted rejects the references of a client's earlier stream",
        "        if not self.sharing.shares:\n            return None\n",
    ),
    run_state(
        "a client sends references to files written before a restart of the master",
        "            for call in self._unsettled.values():\n                call.place = None\n",
    ),
    run_state(
        "P9: a call waits for ever for a task that was lost with its stream",
        "self._outbox = deque(call for call in self._unsettled.values() if not call.deferred)",
        "self._outbox = deque(call for call in self._outbox if not call.deferred)",
    ),
    run_state("a task whose caller is gone runs on", "self._cancel_outbox = list(self._cancelling)"),
    run_state(
        "a call that is started again after its withdrawal fails with TaskCancelled",
        "if withdrawals and request_id in withdrawals and message.error.type == WITHDRAWN:",
    ),
)

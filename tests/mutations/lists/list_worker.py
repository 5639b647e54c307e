"""Mutations of the worker's half: session.py (what is held and owed), batcher.py (what goes together)."""

from functools import partial

from tests.mutations.mutation import Mutation

session = partial(Mutation, module="multigpu_worker.session.session")
batcher = partial(Mutation, module="multigpu_worker.session.batcher", checker="batcher")

WORKER = (
    session(
        "a worker goes on with what its new session does not count",
        "        for lease in unwanted:\n            self.revoke(lease.lease_id)\n",
    ),
    session(
        "sent reports are dropped when the stream breaks",
        "groups = [group for _, group in self._sent] + [",
        "groups = [",
        checker="session",
        seeds=300,
    ),
    session(
        "a result that was not sent yet is lost",
        "[item for item in self._outbox if isinstance(item, Reports)]\n        self._sent.clear()",
        "[]\n        self._sent.clear()",
        checker="session",
        seeds=300,
    ),
    session("reports that nobody wants are sent again", "if report.lease.lease_id in adopted and", "if"),
    session(
        "hello lists what runs alone", "reported += [group for _, group in self._sent]", checker="session", seeds=300
    ),
    session(
        "P9: outputs that were on their way are lost",
        "        for lease in self.leases.values():\n            self._resend_partials(lease)\n",
        seeds=5000,
    ),
    session(
        "P9: a report arrives without its outputs",
        "            for report in wanted:\n                self._resend_partials(report.lease)\n",
        seeds=5000,
    ),
    session(
        "P9: partial outputs count from 0 in each attempt",
        "        index = lease.partials_received + lease.partials_made\n",
        "        index = lease.partials_made\n",
    ),
    session("P9: an output overwrites the one before", "lease.partials_made += 1"),
    session(
        "P9: partial outputs sent again count from 0", "lease.partials_received + index", "index", checker="pytest"
    ),
    session("P9: a report is read before its outputs", "if frame.partials or", "if", checker="session"),
    session(
        "P10: a frame is larger than a message may be",
        "                if frame_bytes and frame_bytes + size_bytes > bytes_max:\n                    break\n"
        "                frame.partials.append",
        "                frame.partials.append",
        checker="session",
        seeds=300,
    ),
    session("sent reports are not kept until they are acknowledged", "self._remember(entry, now_s)", checker="session"),
    session("P10: reports that arrived stay in memory", "while self._sent and", "while False and", checker="pytest"),
    session(
        "revoked leases are reported",
        "            if self.leases.pop(lease.lease_id, None) is None:\n                continue\n",
        "            self.leases.pop(lease.lease_id, None)\n",
        checker="pytest",
    ),
    session(
        "a lease is held after its report",
        "            if self.leases.pop(lease.lease_id, None) is None:\n                continue\n",
        "            if lease.lease_id not in self.leases:\n                continue\n",
    ),
    session(
        "a finished task counts as lost",
        "        reported = [group for group in self._outbox if isinstance(group, Reports)]\n",
        "        reported = list[Reports]()\n",
        checker="session",
    ),
    session(
        "P9: leases that can't be resumed are not revoked",
        "        for lease in lost:\n            self.revoke(lease.lease_id)\n        return lost\n",
        "        return []\n",
        checker="pytest",
    ),
    session(
        "P9: leases that can't be resumed are in hello",
        "leases = [lease for lease in leases if lease.resumable]",
        checker="session",
    ),
    session("P10: the engine stops for bytes that were sent", "self.unsent_bytes -= frame_bytes", checker="session"),
    session("dropped leases make outputs", "        if lease.dropped:\n            return True\n", checker="pytest"),
    session("a worker that leaves keeps its leases", "self.report(now_ns", "_ = (now_ns", checker="pytest"),
    session("a failed attempt's checkpoint is lost", "self.heartbeat_due = True", checker="pytest"),
    session(
        "P10: every heartbeat carries every checkpoint", "or (lease.checkpoint_unsent and ", "or (", checker="pytest"
    ),
    batcher("the youngest spec is batched first", "key=self._head", "key=self._head, reverse=True"),
    batcher("dropped leases are run", "if lease.dropped:"),
    batcher("P10: a batch is larger than the device may bear", "if batch and tokens > tokens_max:"),
    batcher("P7: a task larger than the budget waits for ever", "batch and tokens > tokens_max", "tokens > tokens_max"),
    batcher("P10: a batch has more tasks than it may", "and len(batch) < tasks_max:", "and len(batch) <= tasks_max:"),
    batcher(
        "P4: a task that ended its engine takes others down again",
        "            if len(batch) >= lease.batch_size_max:\n                break\n"
        "            tasks_max = min(tasks_max, lease.batch_size_max)\n",
    ),
    batcher(
        "returned leases go to the end",
        "            self._queues.setdefault(lease.spec, deque()).appendleft((self._returns, lease))\n",
        "            self._queues.setdefault(lease.spec, deque()).append((self._returns, lease))\n",
    ),
    batcher(
        "the order of a batch is lost",
        "        for lease in reversed(list(leases)):\n            self._returns",
        "        for lease in list(leases):\n            self._returns",
    ),
    batcher("a displaced lease loses its rank", "lease.rank = queue[0][0]"),
    batcher(
        "a displaced lease goes to the end",
        "            queue.appendleft((min(lease.rank, queue[0][0] - 1) if queue else lease.rank, lease))\n",
        "            queue.append((lease.rank, lease))\n",
    ),
    batcher("arrivals are not counted", "self._arrivals = rank - behind"),
    batcher("an unknown kind begins with all", "None:\n            return 1\n", "None:\n            return waiting\n"),
    batcher("one slot takes what two could share", "max(1, min(tasks, -(-waiting // self.slots)))", "max(1, tasks)"),
    batcher("a batch of bounded time has no bound", "if speed.task_s * tasks > self.limits.batch_s:"),
    batcher("urgent tasks wait behind all others", "behind = (spec.priority - 1) * AGE_TASKS\n", "behind = 0\n"),
    batcher(
        "a batch goes to a model that is not there",
        "            if may is not None and not may(spec):\n                continue\n",
    ),
    batcher("P7: a batch that waits begins its wait anew", "self._delayed.setdefault(spec, fresh)", "fresh"),
    batcher("returned leases wait for a larger batch", "if delay_s and queue[0][0] > 0:\n", "if delay_s:\n"),
    batcher(
        "P7: the time at which a batch is due is not reported",
        "self._due_s = delay.due_s if self._due_s is None else min(self._due_s, delay.due_s)",
    ),
)

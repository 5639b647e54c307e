"""Mutations of fleet.py, ledger.py, model.py, timers.py and the strategies."""

from functools import partial

from tests.mutations.mutation import Mutation

fleet = partial(Mutation, module="multigpu_master.core.workers.fleet")
ledger = partial(Mutation, module="multigpu_master.core.ledger")
model = partial(Mutation, module="multigpu_master.core.model")
timers = partial(Mutation, module="multigpu_master.core.timers")

LEDGER = (
    Mutation(
        name="a lease is recalled again and again",
        module="multigpu_master.core.outbox",
        old="            lease.recalled = worker.session\n",
        new="            pass\n",
    ),
    ledger(
        name="a requeued dead letter stands behind younger tasks",
        old="        if requeued:\n",
        new="        if False:\n",
        breaks="tasks of one class run out of order",
        seeds=20_000,
    ),
    fleet(
        name="long run times do not narrow the window",
        old="            pace.allowed = min(pace.allowed, window)\n",
        checker="pytest",
    ),
    fleet(
        name="eligible workers are not recomputed",
        old="        self._eligible.clear()\n        self._resident.clear()\n        self.touch(worker)\n",
        new="        self._resident.clear()\n        self.touch(worker)\n",
    ),
    fleet(
        name="a full window stays open",
        old="        if worker.accepting and not worker.full:\n            self.open[worker] = None\n",
        new="        if worker.accepting:\n            self.open[worker] = None\n",
        breaks="P10: a worker holds more than it may",
    ),
    fleet(
        name="a worker that takes no more work stays open",
        old="        if worker.accepting and not worker.full:\n            self.open[worker] = None\n",
        new="        if not worker.full:\n            self.open[worker] = None\n",
    ),
    fleet(
        name="counts of loaded models are not recomputed",
        old="        self._eligible.clear()\n        self._resident.clear()\n        self.touch(worker)\n",
        new="        self._eligible.clear()\n        self.touch(worker)\n",
    ),
    fleet(
        name="a change does not increment the worker's version",
        old="        worker.version += 1\n",
    ),
    fleet(
        name="labels ignored",
        old="            if worker.info.labels.get(key) != value:\n",
        new="            if False:\n",
    ),
    fleet(
        name="models ignored",
        old="            if not c.models or not shape.model or shape.model in c.models:\n",
        new="            if True:\n",
    ),
    Mutation(
        name="a window wider than the worker said",
        module="multigpu_master.core.workers.pace",
        old="min(int(rate * WINDOW_S), info.window_tasks))",
        new="int(rate * WINDOW_S))",
        breaks="P10: a fast worker is given more than it said it takes",
    ),
    Mutation(
        name="a new session has the old one's window",
        module="multigpu_master.core.workers.pace",
        old="        self.allowed = narrow_window(info)\n",
        breaks="P10: a worker that comes back narrower is given too much",
    ),
    fleet(
        name="bytes of a window don't come back",
        old="        worker.leased_bytes -= payload_bytes\n",
    ),
    fleet(
        name="promised memory does not come back",
        old="        worker.leased_memory_bytes -= sum([lease.task.spec.memory_bytes for lease in leases])\n",
    ),
    fleet(
        name="backlogs only grow",
        old="        worker.backlog_s = max(0.0, worker.backlog_s - cost_s) if worker.leases else 0.0\n",
    ),
    fleet(
        name="a lost worker keeps its session",
        old="        self.sessions.pop(worker.session, None)\n",
        breaks="P2: reports of a session that is over count",
    ),
    fleet(
        name="a lost worker keeps its models",
        old="        worker.residency.lost()\n",
    ),
    fleet(
        name="a worker that left is believed to be leaving",
        old="        worker.stopping = False\n",
    ),
    fleet(
        name="a new session goes on with the old one's frames",
        old="        worker.frame = 0\n",
    ),
    model(
        name="windows are off by one",
        old="len(self.leases) >= self.pace.allowed or",
        new="len(self.leases) > self.pace.allowed or",
        breaks="P10: a worker holds one lease more than it may",
    ),
    model(
        name="window bytes ignored",
        old=" or self.leased_bytes >= self.info.window_bytes",
        breaks="P10: a worker holds more bytes than it said it takes",
    ),
    model(
        name="a cordon doesn't count",
        old="not (self.cordon or self.stopping or self.quarantined)",
        new="not (self.stopping or self.quarantined)",
    ),
    model(
        name="a task is dispatched during its retry delay",
        old="        return self.extra is None or not self.extra.not_before_s\n",
        new="        return True\n",
    ),
    ledger(
        name="deadlines are not armed",
        old="            self.expiries.at(spec.deadline_s, task, Due.DEADLINE)\n",
        new="            pass\n",
    ),
    ledger(
        name="queue timeouts are not armed",
        old="            self.expiries.at(task.submit_s + spec.queue_timeout_s, task, Due.QUEUE_TIMEOUT)\n",
        new="            pass\n",
    ),
    ledger(
        name="run timeouts are not armed",
        old="            self.expiries.at(now + task.spec.run_timeout_s + RUN_GRACE_S, task, Due.RUN_TIMEOUT)\n",
        new="            pass\n",
        breaks="P7: an attempt that never ends is never ended",
    ),
    ledger(
        name="leased tasks are counted as queued",
        old="        queue.queued -= 1\n        queue.queued_bytes -= size\n        queue.leased += 1\n",
        new="        queue.queued_bytes -= size\n        queue.leased += 1\n",
    ),
    fleet(
        name="a lease that ends frees nothing",
        old="        self.freed[lease.worker] = None\n",
    ),
    ledger(
        name="settled tasks count as unsettled",
        old="        self.unsettled -= 1\n",
        breaks="P10: the master fills up with tasks that have ended",
    ),
    ledger(
        name="outcomes on their way are not counted",
        old="            self.uncommitted_bytes += outcome_bytes(task)\n",
        new="            pass\n",
        breaks="P10: outcomes pile up without end",
    ),
    ledger(
        name="a request outlives its task",
        old="            del self.requests[task.request_id]\n",
        new="            pass\n",
        breaks="P10: requests of tasks that are forgotten stay in memory",
    ),
    ledger(
        name="a task goes and another's request is forgotten",
        old="        if self.requests.get(task.request_id) is task:\n",
        new="        if self.requests.get(task.request_id):\n",
        breaks="P5: forgetting one task forgets the request of another",
        checker="pytest",
    ),
    Mutation(
        name="ephemeral outcomes without limit",
        module="multigpu_master.core.ephemeral",
        old="        while self.size_bytes > self._bytes_max:\n",
        new="        while False:\n",
        breaks="P10: ephemeral outcomes pile up",
    ),
    Mutation(
        name="ephemeral outcomes live for ever",
        module="multigpu_master.core.ephemeral",
        old="        self._timers.at(due_s, self._expire)\n",
        breaks="P10: ephemeral outcomes outlive their time",
    ),
    Mutation(
        name="ephemeral outcomes are forgotten at once",
        module="multigpu_master.core.ephemeral",
        old="            if not self._heap or self._heap[0][0] > now:\n",
        new="            if not self._heap:\n",
    ),
    timers(
        name="timers are a tick early",
        old="        while heap and heap[0][0] <= now:\n            heappop(heap)[2](now)\n",
        new="        while heap and heap[0][0] <= now + 0.2:\n            heappop(heap)[2](now)\n",
        breaks="P6: what is due is done before its time",
    ),
    timers(
        name="timers of settled tasks fire",
        old="        return task if task is not None and task.outcome is None else None\n",
        new="        return task\n",
    ),
    timers(
        name="a sweep forgets deadlines",
        old="            if self._task(instant) is not None:\n                heappush(self._heap, instant)\n",
        new="            pass\n",
        checker="pytest",
    ),
    timers(
        name="all due timers fire in one event",
        old="        for _ in range(FIRE_MAX):\n",
        new="        while True:\n",
        breaks="P12: deadlines that come together hold the event loop",
        checker="pytest",
    ),
    Mutation(
        name="loading a model costs nothing",
        module="multigpu_master.strategies.auto",
        old="        return 1 + int(load_s * others / fleet.expected_s(worker, shape))\n",
        new="        return 1 + int(load_s * max(1, others) / fleet.expected_s(worker, shape))\n",
    ),
    Mutation(
        name="least_loaded prefers the most loaded worker",
        module="multigpu_master.strategies.least_loaded",
        old="        return len(worker.leases) / worker.info.slots\n",
        new="        return -len(worker.leases) / worker.info.slots\n",
        checker="pytest",
    ),
    Mutation(
        name="the memory threshold ignored",
        module="multigpu_master.strategies.memory_usage",
        old="fraction is not None and fraction > fleet.memory_threshold",
        new="False",
        seeds=5000,
    ),
)

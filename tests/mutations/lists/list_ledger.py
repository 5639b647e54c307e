"""Mutations of fleet.py, ledger.py, model.py, timers.py and the strategies."""

from functools import partial

from tests.mutations.mutation import Mutation

fleet = partial(Mutation, module="multigpu_master.core.workers.fleet")
ledger = partial(Mutation, module="multigpu_master.core.ledger")
model = partial(Mutation, module="multigpu_master.core.model")
timers = partial(Mutation, module="multigpu_master.core.timers")

LEDGER = (
    Mutation(
        "a lease is recalled again and again",
        "lease.recalled_in = worker.session",
        module="multigpu_master.core.events",
    ),
    ledger("tasks of one class run out of order", "if requeued_letter:", seeds=20_000),
    fleet(
        "long run times do not narrow the window", "pace.leases_max = min(pace.leases_max, window)", checker="pytest"
    ),
    fleet(
        "eligible workers are not recomputed",
        "        self._eligible.clear()\n        self._resident.clear()\n        self.score_changed(worker)\n",
        "        self._resident.clear()\n        self.score_changed(worker)\n",
    ),
    fleet("P10: a full window stays open", "if worker.accepting and not worker.full:\n", "if worker.accepting:\n"),
    fleet("a worker that takes no more work stays open", "worker.accepting and not worker.full:", "not worker.full:"),
    fleet(
        "counts of loaded models are not recomputed",
        "        self._eligible.clear()\n        self._resident.clear()\n        self.score_changed(worker)\n",
        "        self._eligible.clear()\n        self.score_changed(worker)\n",
    ),
    fleet("a change does not increment the worker's version", "worker.change_count += 1"),
    fleet("labels ignored", "if worker.info.labels.get(key) != value:"),
    fleet("models ignored", "if not c.models or not shape.model or shape.model in c.models:\n", "if True:\n"),
    Mutation(
        "P10: a fast worker is given more than it said it takes",
        "min(int(self.rate * WINDOW_S), info.window_tasks))",
        "int(self.rate * WINDOW_S))",
        module="multigpu_master.core.workers.pace",
    ),
    Mutation(
        "P10: a worker that comes back narrower is given too much",
        "self.leases_max = narrow_window(info)",
        module="multigpu_master.core.workers.pace",
    ),
    fleet(
        "bytes of a window don't come back", "worker.leased_bytes -= sum([len(lease.task.payload) for lease in leases])"
    ),
    fleet(
        "promised memory does not come back",
        "worker.leased_memory_bytes -= sum([lease.task.spec.memory_bytes for lease in leases])",
    ),
    fleet("backlogs only grow", "worker.leased_s = max(0.0, worker.leased_s - cost_s) if worker.leases else 0.0"),
    fleet("P2: reports of a session that is over count", "self.sessions.pop(worker.session, None)"),
    fleet("a lost worker keeps its models", "worker.residency.end_session()"),
    fleet("a worker that left is believed to be leaving", "worker.stopping = False"),
    fleet("a new session goes on with the old one's dispatch numbers", "worker.dispatches_sent = 0"),
    model(
        "P10: a worker holds one lease more than it may",
        "if held < self.pace.leases_max:",
        "if held <= self.pace.leases_max:",
    ),
    model(
        "P10: a slot of a worker that runs tasks together gets no more than its pace allows",
        "(self.info.slots + 1) * SLOT",
        "(self.info.slots + 2) * SLOT",
    ),
    model(
        "P10: a worker holds more bytes than it said it takes", " or self.leased_bytes >= self.info.window_bytes", ""
    ),
    model("a cordon doesn't count", "self.cordon or self.stopping or", "self.stopping or"),
    model("a task is dispatched during its retry delay", "self.extra is None or not self.extra.not_before_s", "True"),
    ledger("deadlines are not armed", "self.expiries.at(spec.deadline_s, task, TimeLimit.DEADLINE)"),
    ledger(
        "queue timeouts are not armed",
        "self.expiries.at(task.submit_s + spec.queue_timeout_s, task, TimeLimit.QUEUE_TIMEOUT)",
    ),
    ledger(
        "P7: run timeouts are not armed",
        "self.expiries.at(now + task.spec.run_timeout_s + RUN_GRACE_S, task, TimeLimit.RUN_TIMEOUT)",
    ),
    ledger(
        "leased tasks are counted as queued",
        "        queue.queued -= 1\n        queue.queued_bytes -= size\n        queue.leased += 1\n",
        "        queue.queued_bytes -= size\n        queue.leased += 1\n",
    ),
    fleet("a lease that ends frees nothing", "self.room_changed(lease.worker)"),
    fleet("P2: a lease that was taken back can still be reported", "del lease.worker.leases[lease.lease_id]"),
    ledger("P10: the master fills up with tasks that have ended", "self.unsettled -= 1"),
    ledger("P10: outcomes on their way are not counted", "self.uncommitted_bytes += settled_bytes(task)"),
    ledger("P10: requests of tasks that are forgotten stay in memory", "del self.requests[task.request_id]"),
    ledger(
        "P5: forgetting one task forgets the request of another",
        "        if self.requests.get(task.request_id) is task:\n",
        "        if self.requests.get(task.request_id):\n",
        checker="pytest",
    ),
    Mutation(
        "P10: ephemeral outcomes pile up",
        "        while self.size_bytes > self._bytes_max:\n",
        "        while False:\n",
        module="multigpu_master.core.ledger",
    ),
    Mutation(
        "P10: ephemeral outcomes outlive their time",
        "self._timers.at(due_s, self._expire)",
        module="multigpu_master.core.ledger",
    ),
    Mutation(
        "ephemeral outcomes are forgotten at once",
        "            if not self._heap or self._heap[0][0] > now:\n",
        "            if not self._heap:\n",
        module="multigpu_master.core.ledger",
    ),
    timers("P6: timers are a tick early", "while heap and heap[0][0] <= now", "while heap and heap[0][0] <= now + 0.2"),
    timers("timers of settled tasks fire", "task if task is not None and task.outcome is None else None\n", "task\n"),
    timers(
        "a sweep forgets deadlines",
        "            if self._task(expiry) is not None:\n                heappush(self._heap, expiry)\n",
        checker="pytest",
    ),
    timers(
        "P12: deadlines that come together hold the event loop",
        "        for _ in range(DUE_MAX):\n",
        "        while True:\n",
        checker="pytest",
    ),
    Mutation(
        "loading a model costs nothing",
        "        return 1 + int(load_s * loaded_workers / fleet.expected_s(worker, shape))\n",
        "        return 1 + int(load_s * max(1, loaded_workers) / fleet.expected_s(worker, shape))\n",
        module="multigpu_master.strategies.auto",
    ),
    Mutation(
        "least_loaded prefers the most loaded worker",
        "        return len(worker.leases) / worker.info.slots\n",
        "        return -len(worker.leases) / worker.info.slots\n",
        module="multigpu_master.strategies.least_loaded",
        checker="pytest",
    ),
    Mutation(
        "the memory threshold ignored",
        "fraction is not None and fraction > fleet.memory_threshold",
        "False",
        module="multigpu_master.strategies.memory_usage",
        seeds=5000,
    ),
)

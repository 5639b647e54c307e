"""Mutations of the rules for sick devices, poison tasks and the circuit breaker: the master's quarantine.py and code
that uses its results; and of a worker's health.py, reset_watch.py and processes/start.py.
"""

from functools import partial

from tests.mutations.mutation import Mutation

quarantine = partial(Mutation, module="multigpu_master.core.workers.quarantine", checker="pytest")
health = partial(Mutation, module="multigpu_worker.device.health", checker="pytest")
reset = partial(Mutation, module="multigpu_worker.device.reset_watch", checker="pytest")
start = partial(Mutation, module="multigpu_worker.processes.start", checker="pytest")
by_pytest = partial(Mutation, checker="pytest")

QUARANTINE = (
    Mutation(
        "a quarantine doesn't count",
        " or self.stopping or self.quarantined)",
        " or self.stopping)",
        module="multigpu_master.core.model",
    ),
    Mutation(
        "a lease returned by a sick device counts as lost",
        "        if sick:\n            self._requeue(task, now, 0.0)\n            return\n",
        module="multigpu_master.core.attempts",
    ),
    by_pytest(
        "a task under which every device falls sick is never charged",
        "extra.sick_returns > SICK_RETURNS_MAX",
        "extra.sick_returns > 1 << 30",
        module="multigpu_master.core.attempts",
    ),
    Mutation(
        "a task makes the devices of all workers sick",
        "if extra.sick_returns > SICK_RETURNS_MAX:",
        module="multigpu_master.core.attempts",
        seeds=1000,
    ),
    quarantine("a quarantine never ends", "self._set(worker, quarantined=False)", checker="simulator", seeds=1000),
    quarantine("the breaker never trips", "        if count <= most:", "        if count <= most or count:"),
    quarantine(
        "the breaker holds back what can't run anything",
        "(self._count_and_admit(worker, now) or worker.health.unusable)",
        "self._count_and_admit(worker, now)",
    ),
    quarantine("the breaker forgets nothing", "sum(at_s > now - self.window_s for", "sum(at_s > 0.0 for"),
    quarantine(
        "the share of quarantined devices rounds down to none",
        "return max(1, int(self.share * devices))",
        "return int(self.share * devices)",
    ),
    quarantine("the breaker resets itself", "if breaker.tripped_s:", "if breaker.tripped_s > now - breaker.window_s:"),
    quarantine(
        "a breaker reset judges no worker",
        "if worker.health_reported]:\n            self._judge(worker, now)\n",
        "]:\n            pass\n",
    ),
    quarantine(
        "a poison task has all its attempts",
        "            self._condemn(key, now)\n            return True\n",
        "            self._condemn(key, now)\n            return False\n",
    ),
    quarantine("a device is counted twice", "if device in extra.broke_on_devices or device in extra.blamed_devices:"),
    quarantine(
        "failures of a poison task count against devices",
        "            kept = {i: m for i, m in marks.items() if m[1] != key}\n",
        "            kept = dict(marks)\n",
    ),
    quarantine("a suspected device costs an attempt", "(device,)\n        for worker", "()\n        for worker"),
    quarantine(
        "a sick device is not to blame",
        "        if not worker.health.fit:\n            extra.blamed_devices += (device,)\n            return False\n",
    ),
    quarantine(
        "a device is suspected without another to compare",
        " and any(w.device_key != device for w in self._fleet.sessions.values())",
        "",
    ),
    quarantine(
        "an old check is passed for a new one",
        "max(worker.requested_check, worker.health.checks_passed) + 1",
        "worker.requested_check + 1",
    ),
    health(
        "a sick finding that disappears is forgotten",
        "if reason.severity >= Severity.SICK and code not in self._findings:",
    ),
    health(
        "no engine is not unusable", "reason.severity >= Severity.NO_ENGINE", "reason.severity > Severity.NO_ENGINE"
    ),
    health(
        "no engine bars the device", "reason.severity is Severity.UNUSABLE", "reason.severity >= Severity.NO_ENGINE"
    ),
    reset("no reset is needed", "        if self.needed is None:\n            self.needed = code, message\n"),
    reset(
        "a reset is seen although none was needed",
        "        if self._blocked and driver_blocked is",
        "        if driver_blocked is",
    ),
    reset("an unknown reset state counts as a reset", "and driver_blocked is False:", "and not driver_blocked:"),
    reset("the next process does not know of a reset that is needed", "new.replace(self.path)"),
    reset("a restart of the host is no reset", 'if values["boot_id"] == _boot_id():\n', 'if values["boot_id"]:\n'),
    reset(
        "an error count that falls is a reset",
        "        if self._blocked and driver_blocked is False:\n",
        "        if (self._blocked and driver_blocked is False) or new < 0:\n",
    ),
    start("a rejected start is no error", "self._error = error"),
    start("one kill makes a worker sick", "        if not killed or self._kills >= KILLS_MAX:\n", "        if True:\n"),
    start("a start may take for ever", " > READY_S else", " > 1e9 else"),
    health("a lost device is checked", "self.state is State.SICK and not self._blocked()", "self.state is State.SICK"),
    health("checks without patience", "self._setbacks += 1"),
    health("a check that is void counts", "if self._checking and severity >= Severity.SICK:"),
    by_pytest(
        "a lost worker's device keeps its health",
        "w.health if w.session else None",
        "w.health",
        module="multigpu_master.metrics.devices",
    ),
    by_pytest(
        "a lost worker's telemetry is shown", "if worker.session:", "if True:", module="multigpu_master.wire.workers"
    ),
)

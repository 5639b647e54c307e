"""Mutations of the rules for sick devices, poison tasks and the circuit breaker: the master's quarantine.py and code
that uses its results; and of a worker's health.py, reset_watch.py and processes/start.py.
"""

from functools import partial

from tests.mutations.mutation import Mutation

quarantine = partial(Mutation, module="multigpu_master.core.workers.quarantine", checker="pytest", seeds=1)
health = partial(Mutation, module="multigpu_worker.device.health", checker="pytest", seeds=1)
reset = partial(Mutation, module="multigpu_worker.device.reset_watch", checker="pytest", seeds=1)
start = partial(Mutation, module="multigpu_worker.processes.start", checker="pytest", seeds=1)
by_pytest = partial(Mutation, checker="pytest", seeds=1)

QUARANTINE = (
    Mutation(
        name="a quarantine doesn't count",
        module="multigpu_master.core.model",
        old=" or self.stopping or self.quarantined)",
        new=" or self.stopping)",
    ),
    Mutation(
        name="a lease returned by a sick device counts as lost",
        module="multigpu_master.core.attempts",
        old="        if sick:\n            self._requeue(task, now, 0.0)\n            return\n",
    ),
    by_pytest(
        name="a task under which every device falls sick is never charged",
        module="multigpu_master.core.attempts",
        old="extra.sick_returns > SICK_RETURNS_MAX",
        new="extra.sick_returns > 1 << 30",
    ),
    Mutation(
        name="a task makes the devices of all workers sick",
        module="multigpu_master.core.attempts",
        old="            if extra.sick_returns > SICK_RETURNS_MAX:",
        new="            if False:",
        seeds=1000,
    ),
    quarantine(
        name="a quarantine never ends",
        old="                self._set(worker, quarantined=False)\n",
        new="                pass\n",
        checker="simulator",
        seeds=1000,
    ),
    quarantine(
        name="the breaker never trips",
        old="        if count <= most:",
        new="        if count <= most or count:",
    ),
    quarantine(
        name="the breaker holds back what can't run anything",
        old="(self._admitted(worker, now) or worker.health.unusable)",
        new="self._admitted(worker, now)",
    ),
    quarantine(
        name="the breaker forgets nothing",
        old="if at_s > now - self.window_s}",
        new="if at_s}",
    ),
    quarantine(
        name="the share of quarantined devices rounds down to none",
        old="return max(1, int(self.share * devices))",
        new="return int(self.share * devices)",
    ),
    quarantine(
        name="the breaker resets itself",
        old="        if breaker.tripped_s:\n            return False\n",
        new="        if breaker.tripped_s > now - breaker.window_s:\n            return False\n",
    ),
    quarantine(
        name="a breaker reset judges no worker",
        old="        for worker in list(self._state.fleet.sessions.values()):\n            self._judge(worker, now)\n",
    ),
    quarantine(
        name="a poison task has all its attempts",
        old="            self._condemn(kind, now)\n            return True\n",
        new="            self._condemn(kind, now)\n            return False\n",
    ),
    quarantine(
        name="a device is counted twice",
        old="        if device in extra.broke or device in extra.forgiven:\n            return False",
        new="        if False:\n            return False",
    ),
    quarantine(
        name="failures of a poison task count against devices",
        old="            kept = {i: m for i, m in marks.items() if m[1] != kind}\n",
        new="            kept = dict(marks)\n",
    ),
    quarantine(
        name="a suspected device costs an attempt",
        old="            extra.forgiven += (device,)  # it stays",
        new="            extra.forgiven += ()  # it stays",
    ),
    quarantine(
        name="a sick device is not to blame",
        old="        if not worker.health.fit:\n            extra.forgiven += (device,)\n            return False\n",
    ),
    quarantine(
        name="a device is suspected without another to compare",
        old=" and any(w.device_key != device for w in self._state.fleet.sessions.values())",
    ),
    quarantine(
        name="an old check is passed for a new one",
        old="max(worker.checks_asked, worker.health.checks_passed) + 1",
        new="worker.checks_asked + 1",
    ),
    health(
        name="a sick finding that disappears is forgotten",
        old="            if reason.gravity >= Gravity.SICK and code not in self._findings:\n",
        new="            if False:\n",
    ),
    health(
        name="no engine is not unusable",
        old="any(reason.gravity >= Gravity.NO_ENGINE for reason in self.reasons)",
        new="any(reason.gravity > Gravity.NO_ENGINE for reason in self.reasons)",
    ),
    health(
        name="no engine bars the device",
        old="any(reason.gravity is Gravity.UNUSABLE for reason in self.reasons)",
        new="any(reason.gravity >= Gravity.NO_ENGINE for reason in self.reasons)",
    ),
    reset(
        name="no reset is needed",
        old="        if self.needed is None:\n            self.needed = code, message\n",
        new="        pass\n",
    ),
    reset(
        name="a reset is seen although none was needed",
        old="        if self._wanted and wanted is False:\n",
        new="        if wanted is False:\n",
    ),
    reset(
        name="an unknown reset state counts as a reset",
        old="if self._wanted and wanted is False:",
        new="if self._wanted and not wanted:",
    ),
    reset(
        name="the next process does not know of a reset that is needed",
        old="            new.replace(self.path)\n",
    ),
    reset(
        name="a restart of the host is no reset",
        old='            if values["boot_id"] == _boot_id():\n',
        new='            if values["boot_id"]:\n',
    ),
    reset(
        name="an error count that falls is a reset",
        old="        if self._wanted and wanted is False:\n",
        new="        if (self._wanted and wanted is False) or new < 0:\n",
    ),
    start(
        name="a rejected start is no error",
        old="        self._error = error\n",
        new="        pass\n",
    ),
    start(
        name="one kill makes a worker sick",
        old="        if not killed or self._kills >= KILLS_MAX:\n",
        new="        if True:\n",
    ),
    start(
        name="a start may take for ever",
        old=" > READY_S else",
        new=" > 1e9 else",
    ),
    health(
        name="a lost device is checked",
        old="return self.state is State.SICK and not self._blocked() and now_s >= self.next_check_s",
        new="return self.state is State.SICK and now_s >= self.next_check_s",
    ),
    health(
        name="checks without patience",
        old="        self._setbacks += 1\n",
    ),
    health(
        name="a check that is void counts",
        old="        if self._checking and gravity >= Gravity.SICK:\n",
        new="        if False:\n",
    ),
    by_pytest(
        name="a lost worker's device keeps its health",
        module="multigpu_master.telemetry.device_metrics",
        old="w.health if w.session else None",
        new="w.health",
    ),
    by_pytest(
        name="a lost worker's telemetry is shown",
        module="multigpu_master.wire.workers",
        old="    if worker.session:  # the last",
        new="    if True:  # the last",
    ),
)

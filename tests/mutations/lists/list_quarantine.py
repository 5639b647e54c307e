"""Mutations of sick devices, poison tasks and the breaker: quarantine.py, and what it has to do with the rest; and of
what a worker thinks of its device: health.py.
"""

from functools import partial

from tests.mutations.mutation import Mutation

quarantine = partial(Mutation, module="multigpu_master.core.workers.quarantine", checker="stories", seeds=1)
health = partial(Mutation, module="multigpu_worker.device.health", checker="stories", seeds=1)
reset = partial(Mutation, module="multigpu_worker.device.reset_watch", checker="stories", seeds=1)
start = partial(Mutation, module="multigpu_worker.processes.start", checker="stories", seeds=1)
told = partial(Mutation, checker="stories", seeds=1)

QUARANTINE = (
    Mutation(
        name="a quarantine doesn't count",
        module="multigpu_master.core.model",
        old=" or self.stopping or self.quarantined)",
        new=" or self.stopping)",
        breaks="a sick device gets work",
    ),
    Mutation(
        name="what a sick device gives back is a loss",
        module="multigpu_master.core.attempts",
        old="        if sick:\n            self._requeue(task, now, 0.0)\n            return\n",
        new="",
        breaks="a device that falls sick again and again makes dead letters",
    ),
    quarantine(
        name="a quarantine never ends",
        old="                self._set(worker, quarantined=False)\n",
        new="                pass\n",
        breaks="a device stays out for ever after a passing fault",
        checker="simulator",
        seeds=1000,
    ),
    quarantine(
        name="the breaker never trips",
        old="        if count <= most:",
        new="        if count <= most or count:",
        breaks="a common cause takes the whole fleet out of work",
    ),
    quarantine(
        name="the breaker holds back what can't run anything",
        old="(self._admitted(worker, now) or worker.health.unusable)",
        new="self._admitted(worker, now)",
        breaks="devices that can't run anything get work",
    ),
    quarantine(
        name="the breaker forgets nothing",
        old="if at_s > now - self.window_s}",
        new="if at_s}",
        breaks="slow wear trips the breaker",
    ),
    quarantine(
        name="not even one device may be quarantined",
        old="return max(1, int(self.share * devices))",
        new="return int(self.share * devices)",
        breaks="a small fleet has no quarantine",
    ),
    quarantine(
        name="the breaker resets itself",
        old="        if breaker.tripped_s:\n            return False\n",
        new="        if breaker.tripped_s > now - breaker.window_s:\n            return False\n",
        breaks="only a person resets the breaker",
    ),
    quarantine(
        name="a reset looks at nobody",
        old="        for worker in list(self._state.fleet.sessions.values()):\n            self._judge(worker, now)\n",
        new="",
        breaks="who is sick when the breaker is reset goes on working",
    ),
    quarantine(
        name="a poison task has all its attempts",
        old="            self._condemn(kind, now)\n            return True\n",
        new="            self._condemn(kind, now)\n            return False\n",
        breaks="a task that breaks two devices breaks the next one",
    ),
    quarantine(
        name="a device is counted twice",
        old="        if device in extra.broke or device in extra.forgiven:\n            return False",
        new="        if False:\n            return False",
        breaks="attempts without end where there is one device",
    ),
    quarantine(
        name="a poison task costs devices their good name",
        old="            kept = {i: m for i, m in marks.items() if m[1] != kind}\n",
        new="            kept = dict(marks)\n",
        breaks="a broken handler has devices suspected",
    ),
    quarantine(
        name="a suspected device costs an attempt",
        old="            extra.forgiven += (device,)  # it stays",
        new="            extra.forgiven += ()  # it stays",
        breaks="a device on which different tasks fail costs them an attempt",
    ),
    quarantine(
        name="a sick device is not to blame",
        old="        if not worker.health.fit:\n            extra.forgiven += (device,)\n            return False\n",
        new="",
        breaks="what breaks on a sick device is charged",
    ),
    quarantine(
        name="suspects without comparison",
        old=" and any(w.device_key != device for w in self._state.fleet.sessions.values())",
        new="",
        breaks="the only device is taken out of work for its tasks' faults",
    ),
    quarantine(
        name="an old check is passed for a new one",
        old="max(worker.checks_asked, worker.health.checks_passed) + 1",
        new="worker.checks_asked + 1",
        breaks="a master that was restarted asks for checks that were passed before",
    ),
    health(
        name="what is gone was never there",
        old="            if reason.gravity >= Gravity.SICK and code not in self._findings:\n",
        new="            if False:\n",
        breaks="a device that was lost comes back without a check",
    ),
    health(
        name="no engine is not unusable",
        old="any(reason.gravity >= Gravity.NO_ENGINE for reason in self.reasons)",
        new="any(reason.gravity > Gravity.NO_ENGINE for reason in self.reasons)",
        breaks="a worker whose engine can't start gets work once the breaker has tripped",
    ),
    health(
        name="no engine bars the device",
        old="any(reason.gravity is Gravity.UNUSABLE for reason in self.reasons)",
        new="any(reason.gravity >= Gravity.NO_ENGINE for reason in self.reasons)",
        breaks="a worker whose engine can't start stops to try, for ever",
    ),
    reset(
        name="no reset is needed",
        old="        if self.needed is None:\n            self.needed = code, message\n",
        new="        pass\n",
        breaks="a device that needs a reset returns without one",
    ),
    reset(
        name="nothing wanted is a reset",
        old="        if (self._wanted and wanted is False) or new < 0:\n",
        new="        if wanted is False or new < 0:\n",
        breaks="a device that needs a reset returns without one",
    ),
    reset(
        name="what is not known is not wanted",
        old="(self._wanted and wanted is False)",
        new="(self._wanted and not wanted)",
        breaks="a device that needs a reset is back with the next process of its worker",
    ),
    reset(
        name="the next process does not know of a reset that is needed",
        old="            new.replace(self.path)\n",
        new="",
        breaks="a device that needs a reset is back with the next process of its worker",
    ),
    reset(
        name="a restart of the host is no reset",
        old='            if values["boot_id"] == _boot_id():\n',
        new='            if values["boot_id"]:\n',
        breaks="a device stays out after its host was restarted",
    ),
    reset(
        name="a reset doesn't show in the count of errors",
        old=" or new < 0:\n",
        new=":\n",
        breaks="a device that was reset stays out for ever",
    ),
    start(
        name="a rejected start is no error",
        old="        self._error = error\n",
        new="        pass\n",
        breaks="a worker whose handlers can't be imported keeps its leases",
    ),
    start(
        name="one kill makes a worker sick",
        old="        if not killed or self._kills >= KILLS_MAX:\n",
        new="        if True:\n",
        breaks="a worker whose engine is killed from outside while it starts gives its leases back",
    ),
    start(
        name="a start may take for ever",
        old=" > READY_S else",
        new=" > 1e9 else",
        breaks="a worker whose handlers hang in their import keeps its leases",
    ),
    health(
        name="a lost device is checked",
        old="return self.state is State.SICK and not self._blocked() and now_s >= self.next_check_s",
        new="return self.state is State.SICK and now_s >= self.next_check_s",
        breaks="a check while the driver still says that the device is gone",
    ),
    health(
        name="checks without patience",
        old="        self._setbacks += 1\n",
        new="",
        breaks="a broken device is checked every second for ever",
    ),
    health(
        name="a check that is void counts",
        old="        if self._checking and gravity >= Gravity.SICK:\n",
        new="        if False:\n",
        breaks="a device that fell sick while it was checked is taken for well",
    ),
    told(
        name="a lost worker's device keeps its health",
        module="multigpu_master.telemetry.device_metrics",
        old="w.health if w.session else None",
        new="w.health",
        breaks="metrics call a GPU healthy, and sum its watts, whose worker is gone",
    ),
    told(
        name="operators see a lost worker's last figures",
        module="multigpu_master.wire.workers",
        old="    if worker.session:  # the last",
        new="    if True:  # the last",
        breaks="a lost worker is shown as healthy, and its watts in the fleet's sum",
    ),
)

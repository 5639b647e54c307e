"""Sick devices, poison tasks, and the circuit breaker.

Every heartbeat has the device's health. While a device is sick or recovering, or has not passed a check that the master
requested, its worker is quarantined: it gets no leases. A heartbeat ends the quarantine if it reports a fit device
(healthy or degraded) and no requested check is open.

An engine may break because of the task or because of the device. Two observations distinguish the causes:
- a task that broke engines on two different healthy devices is condemned: it ends as a dead letter, and for a while
  tasks of its kind and model make no device suspect;
- a device on which SUSPECT_AT_TASKS different tasks broke the engine, none of them condemned, is suspected: the master
  requests a check from its worker, and each of these tasks gets another attempt. This needs another connected device
  to compare with.
A device that is not fit when an engine breaks on it is blamed for that: the task gets another attempt. A device that
is reported as sick or recovering, for any reason but the requested check, is also blamed for the engines that broke on
it before, including those for which it was suspected.

The breaker counts the devices that were found sick or suspect within a window. If they are more than a share of the
devices that are or were connected within it, the breaker trips, because they probably have a common cause (a driver, a
power supply, a bad release); the device that trips it is not quarantined. Until an operator resets the breaker, only
devices that can't run any task are quarantined.
"""

from dataclasses import dataclass, field

from multigpu_master.core import events as ev
from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Task, Worker
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.info import Health

# A device is suspected when this many different tasks broke its engine.
SUSPECT_AT_TASKS = 3
# A task is condemned when it broke engines on this many different devices.
CONDEMN_AT_DEVICES = 2
# Codes of health reasons by which a worker only repeats that the master has asked for a check.
CODES_OF_ASKED_CHECKS = ("tasks_fail", "check_requested")
# Limit of the entries in `_condemned`.
KINDS_MAX = 1024


@dataclass(slots=True)
class Breaker:
    """See the module. Times in seconds."""

    share: float
    window_s: float
    tripped_s: float = 0.0  # 0.0: it has not tripped
    found_sick_at: dict[str, float] = field(default_factory=dict)  # by device_key: when it was last sick or suspect

    def count(self, now: float) -> int:
        """The number of devices found sick or suspect within the window."""
        return sum(at_s > now - self.window_s for at_s in self.found_sick_at.values())

    def limit(self, devices: int) -> int:
        """How many of these devices may be found sick or suspect within the window; at least one."""
        return max(1, int(self.share * devices))


class Quarantine:
    def __init__(self, ledger: Ledger, fleet: Fleet, commands: Commands) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._commands = commands
        self.breaker = Breaker(ledger.limits.breaker_share, ledger.limits.breaker_window_s)
        # Tasks that broke an engine on a device, by device_key and task_id: when they did, and their (kind, model).
        self._marks: dict[str, dict[int, tuple[float, tuple[str, str]]]] = {}
        self._suspected: dict[str, list[int]] = {}  # by device_key: the task_ids for which it was suspected last
        # When a task of this (kind, model) was condemned last.
        self._condemned: dict[tuple[str, str], float] = {}

    # --- what a worker reports ---------------------------------------------------------------------------------------

    def apply_health(self, worker: Worker, health: Health, now: float, *, first: bool) -> None:
        """Applies the health in a heartbeat. `first`: it is the session's first, so the number of the last check that
        the worker passed was not known before.
        """
        own_findings = any(reason.code not in CODES_OF_ASKED_CHECKS for reason in health.reasons)
        worker.health = health
        if worker.requested_check and not worker.check_open:
            # The check was passed. A restarted worker reports checks_passed = 0 until it passes another check: with the
            # old requested_check, the passed check would then count as open.
            worker.requested_check = 0
            self._commands.worker_changed(worker, save=True)
        if first and self._is_suspected(worker):
            self._ask_check(worker, at_once=False)
        if not health.fit and own_findings:
            self._blame(worker.device_key)
        self._judge(worker, now)

    def request_check(self, event: ev.CheckDevice, now: float) -> None:
        """Requests a check for an operator, and quarantines the worker. The breaker does not count this quarantine."""
        worker = self._fleet.workers[event.worker_id]
        self._ask_check(worker, at_once=True)
        if not worker.quarantined:
            self._set(worker, quarantined=True)

    def _judge(self, worker: Worker, now: float) -> None:
        sick = worker.check_open or not worker.health.fit
        if not sick:
            if worker.quarantined:
                self._set(worker, quarantined=False)
        elif not worker.quarantined and (self._count_and_admit(worker, now) or worker.health.unusable):
            self._set(worker, quarantined=True)

    def _set(self, worker: Worker, *, quarantined: bool) -> None:
        worker.quarantined = quarantined
        self._fleet.eligibility_changed(worker)
        self._commands.worker_changed(worker, save=True)

    # --- the breaker -------------------------------------------------------------------------------------------------

    def device_count(self, now: float) -> int:
        """How many devices are connected, or were within the window: after a partition or a restart of the master, they
        reconnect one by one.
        """
        since_s = now - self.breaker.window_s
        return len({w.device_key for w in self._fleet.workers.values() if w.session or w.heard_s > since_s})

    def _count_and_admit(self, worker: Worker, now: float) -> bool:
        """Counts the worker's device as sick or suspect, and trips the breaker if the count exceeds its limit. Returns
        whether the breaker permits the quarantine of the worker.
        """
        breaker = self.breaker
        if breaker.tripped_s:
            return False
        since_s = now - breaker.window_s
        breaker.found_sick_at = {key: at_s for key, at_s in breaker.found_sick_at.items() if at_s > since_s}
        breaker.found_sick_at[worker.device_key] = now
        count, devices = breaker.count(now), self.device_count(now)
        most = breaker.limit(devices)
        if count <= most:
            return True
        breaker.tripped_s = now
        message = (
            f"{count} of {devices} devices were found sick or suspect within {breaker.window_s:g} s, and "
            f"at most {most} are quarantined automatically: look for a common cause (driver, power, cooling, a new "
            "release), then run mgpuctl breaker reset"
        )
        self._commands.add(ev.BreakerChanged(now, message))
        return False

    def restore_breaker(self, event: ev.RestoreBreaker, now: float) -> None:
        self.breaker.tripped_s = event.tripped_s

    def reset_breaker(self, event: ev.ResetBreaker, now: float) -> None:
        self.breaker.tripped_s = 0.0
        self.breaker.found_sick_at.clear()
        self._commands.add(ev.BreakerChanged(0.0))
        for worker in [worker for worker in self._fleet.sessions.values() if worker.health_reported]:
            self._judge(worker, now)

    # --- sick device or poison task? ---------------------------------------------------------------------------------

    def broke_engine(self, lease: Lease, now: float) -> bool:
        """Records that an attempt, whose lease is released, broke its engine. Returns whether its task is condemned."""
        task, worker = lease.task, lease.worker
        extra, device = task.ensure_extra(), worker.device_key
        if device in extra.broke_on_devices or device in extra.blamed_devices:
            return False  # another attempt on the same device is no new evidence
        if not worker.health.fit:
            extra.blamed_devices += (device,)
            return False
        extra.broke_on_devices += (device,)
        key = (task.spec.kind, task.spec.model)
        if len(extra.broke_on_devices) >= CONDEMN_AT_DEVICES:
            self._condemn(key, now)
            return True
        window_s = self.breaker.window_s
        if now - self._condemned.get(key, -window_s) < window_s:
            return False
        marks = {i: mark for i, mark in self._marks.get(device, {}).items() if mark[0] > now - window_s}
        marks[task.task_id] = (now, key)
        if len(marks) > SUSPECT_AT_TASKS:  # there was no other device to compare with
            del marks[next(iter(marks))]
        self._marks = {
            key: value for key, value in self._marks.items() if any(mark[0] > now - window_s for mark in value.values())
        }
        self._marks[device] = marks
        if len(marks) >= SUSPECT_AT_TASKS and any(w.device_key != device for w in self._fleet.sessions.values()):
            self._suspect(device, now)
        return False

    def _condemn(self, key: tuple[str, str], now: float) -> None:
        """Records that tasks of this kind and model break engines: for a while they make no device suspect."""
        self._condemned.pop(key, None)
        self._condemned[key] = now
        if len(self._condemned) > KINDS_MAX:
            del self._condemned[next(iter(self._condemned))]
        for device, marks in list(self._marks.items()):
            kept = {i: m for i, m in marks.items() if m[1] != key}
            if kept:
                self._marks[device] = kept
            else:
                del self._marks[device]

    def _suspect(self, device: str, now: float) -> None:
        """Requests a check of a device, and gives the tasks that broke its engine another attempt."""
        tasks = self._pop_marked_tasks(device)
        self._suspected[device] = [task.task_id for task in tasks]
        for task in tasks:
            # The device stays in broke_on_devices: if the task breaks an engine on another device, it is condemned.
            task.ensure_extra().blamed_devices += (device,)
        for worker in list(self._fleet.sessions.values()):
            if worker.device_key == device and worker.health_reported:  # other workers: at their first heartbeat
                self._ask_check(worker, at_once=False)
                self._judge(worker, now)

    def _is_suspected(self, worker: Worker) -> bool:
        """Whether another worker of the device has yet to pass a check because tasks broke the device's engine."""
        return any(
            other is not worker
            and other.device_key == worker.device_key
            and other.check_open
            and not other.check_at_once
            for other in self._fleet.sessions.values()
        )

    def _ask_check(self, worker: Worker, *, at_once: bool) -> None:
        worker.check_at_once = at_once
        worker.requested_check = max(worker.requested_check, worker.health.checks_passed) + 1
        self._commands.send_desired_state(worker)
        self._commands.worker_changed(worker, save=True)

    def _pop_marked_tasks(self, device: str) -> list[Task]:
        """Removes a device's marks. Returns their tasks, except those that the core has forgotten."""
        tasks = [self._ledger.tasks.get(task_id) for task_id in self._marks.pop(device, {})]
        return [task for task in tasks if task is not None]

    def _blame(self, device: str) -> None:
        """Gives each task with a mark on the sick device one more attempt, and removes the device from broke_on_devices
        of these tasks and of the tasks that had made it suspect.
        """
        tasks = self._pop_marked_tasks(device)
        for task in tasks:
            task.ensure_extra().blamed_devices += (device,)
        suspected = [self._ledger.tasks.get(task_id) for task_id in self._suspected.pop(device, ())]
        for task in [*tasks, *[task for task in suspected if task is not None]]:
            extra = task.ensure_extra()
            extra.broke_on_devices = tuple(each for each in extra.broke_on_devices if each != device)

"""Adds up the device time and energy that tasks have used, for each spec. `pop_sums` hands the sums to the journal."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from multigpu_master.core.model import Task
from multigpu_master.core.spec import Spec


@dataclass(slots=True)
class UsageSums:
    """The sums of one spec; the fields are those of multigpu.v1.Usage."""

    succeeded: int = 0
    failed_attempts: int = 0
    device_s: float = 0.0
    measured_s: float = 0.0
    joules: float = 0.0
    uncertainty_joules: float = 0.0

    def add(self, other: "UsageSums") -> None:
        self.succeeded += other.succeeded
        self.failed_attempts += other.failed_attempts
        self.device_s += other.device_s
        self.measured_s += other.measured_s
        self.joules += other.joules
        self.uncertainty_joules += other.uncertainty_joules


class Usage:
    def __init__(self) -> None:
        self._by_spec: dict[Spec, UsageSums] = {}

    def add_succeeded(self, tasks: Sequence[Task], device_s: float) -> None:
        """Adds tasks that ran together. Each has a part of the device time, in proportion to its units."""
        unit_s = device_s / max(1, sum([task.units for task in tasks]))
        for spec, same in groupby(tasks, attrgetter("spec")):
            group = list(same)
            own_s = unit_s * sum([task.units for task in group])
            used = self._of(spec)
            used.succeeded += len(group)
            used.device_s += own_s
            energies = [o.energy for task in group if (o := task.outcome) is not None and o.energy is not None]
            if energies:  # either all tasks that ran together were measured, or none
                used.measured_s += own_s
                used.joules += sum([energy.joules for energy in energies])
                used.uncertainty_joules += sum([energy.joules * energy.uncertainty for energy in energies])

    def add_rank_s(self, task: Task, device_s: float) -> None:
        """Adds the device time of a rank that has succeeded before the last rank of its gang."""
        self._of(task.spec).device_s += device_s

    def add_measured_s(self, task: Task, device_s: float) -> None:
        """Notes that energy was measured during this device time, which `add_rank_s` has added."""
        self._of(task.spec).measured_s += device_s

    def add_failed(self, tasks: Sequence[Task], device_s: float) -> None:
        """Adds failed attempts that ran together. Each has a part of the device time, as in `add_succeeded`."""
        unit_s = device_s / max(1, sum([task.units for task in tasks]))
        for task in tasks:
            used = self._of(task.spec)
            used.failed_attempts += 1
            used.device_s += unit_s * task.units

    def _of(self, spec: Spec) -> UsageSums:
        used = self._by_spec.get(spec)
        if used is None:
            used = self._by_spec[spec] = UsageSums()
        return used

    def pop_sums(self) -> dict[Spec, UsageSums]:
        """Returns the sums since the last call, by spec."""
        sums, self._by_spec = self._by_spec, {}
        return sums

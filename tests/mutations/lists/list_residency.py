"""Mutations of residency.py and load_reservations.py: which models are loaded where."""

from functools import partial

from tests.mutations.mutation import Mutation

residency = partial(Mutation, module="multigpu_master.core.workers.residency", checker="models", seeds=300)
reservations = partial(Mutation, module="multigpu_master.core.workers.load_reservations", checker="models", seeds=300)
pytest_reservations = partial(reservations, checker="pytest")
pytest_residency = partial(Mutation, module="multigpu_master.core.workers.residency", checker="pytest")

RESIDENCY = (
    residency("models in use are not counted", "others <= 0 or others + mine <= self.limit_bytes\n", "True\n"),
    residency("the limit is not kept by a byte", "mine <= self.limit_bytes", "mine <= self.limit_bytes + 100"),
    residency("unwanted models get leases", "        if model in self.unwanted:\n            return Block.UNWANTED\n"),
    residency(
        "no pause between loads",
        "if idle or not (self.cooling_down or self.loading_since_s):\n            return",
        "return",
    ),
    residency("the pause between loads is halved", "now + took_s", "now + took_s / 2"),
    residency("models to be unloaded are not tracked", "self.replaced_by[other] = model", seeds=1000),
    residency(
        "ended leases stay in use",
        "del self.lease_counts[model]\n            self.invalidate()\n",
        "self.invalidate()\n",
    ),
    pytest_residency("a model is gone after one heartbeat without it", "GONE_BEATS = 2", "GONE_BEATS = 1"),
    pytest_residency("a worker's expected model size is ignored", "guess = offered.expected_bytes or", "guess ="),
    pytest_residency(
        "the name stands for any version",
        " for model_id, m in self.offered.items() if m.current or not m.version}",
        " for model_id, m in self.offered.items()}",
    ),
    pytest_reservations(
        "models that retire go on taking leases",
        "self.reserved_model, self.retiring = model, dict.fromkeys(retiring)",
        "self.reserved_model, self.retiring = model, {}",
        module="multigpu_master.core.workers.residency",
    ),
    reservations("a reservation is for ever", "worker.residency.end_reservation()"),
    pytest_reservations(
        "a worker that is free is not reserved",
        "            self._reserve_for_next(worker)\n\n        self._timers",
        "\n        self._timers",
    ),
    reservations(
        "a worker is reserved without a cooldown",
        "residency.reserved_model or residency.cooling_down or",
        "residency.reserved_model or",
    ),
    pytest_reservations("a cooldown is never over", "worker.residency.cooling_down = False"),
    pytest_reservations("pinned models make room", "m not in pinned and m not in important", "m not in important"),
    pytest_reservations("important models make room", "m not in pinned and m not in important", "m not in pinned"),
)

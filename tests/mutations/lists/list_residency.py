"""Mutations of residency.py and load_reservations.py: which models are loaded where."""

from functools import partial

from tests.mutations.mutation import Mutation

residency = partial(Mutation, module="multigpu_master.core.workers.residency", checker="models", seeds=300)
reservations = partial(Mutation, module="multigpu_master.core.workers.load_reservations", checker="models", seeds=300)
pytest_reservations = partial(reservations, checker="pytest")
pytest_residency = partial(Mutation, module="multigpu_master.core.workers.residency", checker="pytest", seeds=1)

RESIDENCY = (
    residency(
        name="models in use are not counted",
        old="        return others <= 0 or others + mine <= self.limit_bytes\n",
        new="        return True\n",
    ),
    residency(
        name="the limit is not kept by a byte",
        old="others + mine <= self.limit_bytes",
        new="others + mine <= self.limit_bytes + 100",
    ),
    residency(
        name="unwanted models get leases",
        old="        if model in self.unwanted:\n            return Block.UNWANTED\n",
    ),
    residency(
        name="no pause between loads",
        old="        if idle or not (self.resting or self.began_s):\n            return None\n",
        new="        return None\n",
    ),
    residency(
        name="the pause between loads is halved",
        old="self.rest_until_s = max(self.rest_until_s, now + took_s)",
        new="self.rest_until_s = max(self.rest_until_s, now + took_s / 2)",
    ),
    residency(
        name="models to be unloaded are not tracked",
        old="            self.going[other] = model\n",
        seeds=1000,
    ),
    residency(
        name="ended leases stay in use",
        old="            del self.uses[model]\n            self.changed()\n",
        new="            self.changed()\n",
    ),
    pytest_residency(
        name="a model is gone after one heartbeat without it",
        old="GONE_BEATS = 2",
        new="GONE_BEATS = 1",
    ),
    pytest_residency(
        name="a worker's expected model size is ignored",
        old="guess = offered.expected_bytes or offered.files_bytes",
        new="guess = offered.files_bytes",
    ),
    pytest_residency(
        name="the name stands for any version",
        old=" for model_id, m in self.offered.items() if m.current or not m.version}",
        new=" for model_id, m in self.offered.items()}",
    ),
    pytest_reservations(
        name="models that retire go on taking leases",
        module="multigpu_master.core.workers.residency",
        old="self.room_for, self.retiring = model, dict.fromkeys(retiring)",
        new="self.room_for, self.retiring = model, {}",
    ),
    reservations(
        name="a reservation is for ever",
        old="            worker.residency.end_reservation()\n",
        new="            pass\n",
    ),
    pytest_reservations(
        name="a rest is never over",
        old="            worker.residency.resting = False\n",
        new="            pass\n",
    ),
    pytest_reservations(
        name="pinned models make room",
        old="m not in pinned and m not in important",
        new="m not in important",
    ),
    pytest_reservations(
        name="important models make room",
        old="m not in pinned and m not in important",
        new="m not in pinned",
    ),
)

"""Mutations of which models are loaded where: residency.py, load_reservations.py, and what they are told."""

from functools import partial

from tests.mutations.mutation import Mutation

residency = partial(Mutation, module="multigpu_master.core.workers.residency", checker="models", seeds=300)
reservations = partial(Mutation, module="multigpu_master.core.workers.load_reservations", checker="models", seeds=300)
stories = partial(Mutation, module="multigpu_master.core.workers.residency", checker="stories", seeds=1)

RESIDENCY = (
    residency(
        name="models in use are not counted",
        old="        return others <= 0 or others + mine <= self.limit_bytes\n",
        new="        return True\n",
        breaks="a model is given to a worker that can't make room for it",
    ),
    residency(
        name="the limit is not kept by a byte",
        old="others + mine <= self.limit_bytes",
        new="others + mine <= self.limit_bytes + 100",
        breaks="a worker is given more models than fit",
    ),
    residency(
        name="unwanted models get leases",
        old="        if model in self.unwanted:\n            return Block.UNWANTED\n",
        new="",
        breaks="a model that an operator unloads never goes",
    ),
    residency(
        name="no rest between loadings",
        old="        if idle or not (self.resting or self.began_s):\n            return None\n",
        new="        return None\n",
        breaks="a busy worker does nothing but load",
    ),
    residency(
        name="a rest is half as long",
        old="self.rest_until_s = max(self.rest_until_s, now + took_s)",
        new="self.rest_until_s = max(self.rest_until_s, now + took_s / 2)",
        breaks="more than half of a busy worker's time goes into loading",
    ),
    residency(
        name="what will be unloaded is counted on",
        old="            self.going[other] = model\n",
        new="",
        breaks="tasks are given to a worker for a model that it is about to unload",
        seeds=1000,
    ),
    residency(
        name="ended leases stay in use",
        old="            del self.uses[model]\n            self.changed()\n",
        new="            self.changed()\n",
        breaks="room is never free again",
    ),
    stories(
        name="gone after one word",
        old="GONE_BEATS = 2",
        new="GONE_BEATS = 1",
        breaks="a heartbeat that was on its way ends an unloading that has not begun",
    ),
    stories(
        name="a worker's guess is not heard",
        old="guess = offered.expected_bytes or offered.files_bytes",
        new="guess = offered.files_bytes",
        breaks="a model is given to a worker that expects to have no room for it",
    ),
    stories(
        name="the name stands for any version",
        old=" for model_id, m in self.offered.items() if m.current or not m.version}",
        new=" for model_id, m in self.offered.items()}",
        breaks="a pinned name doesn't follow the current version",
    ),
    reservations(
        name="models that retire go on taking leases",
        module="multigpu_master.core.workers.residency",
        old="self.room_for, self.retiring = model, dict.fromkeys(retiring)",
        new="self.room_for, self.retiring = model, {}",
        breaks="room for a model that has a reservation is never free",
        checker="stories",
        seeds=1,
    ),
    reservations(
        name="a reservation is for ever",
        old="            worker.residency.end_reservation()\n",
        new="            pass\n",
        breaks="models that made room never come back",
    ),
    reservations(
        name="a rest is never over",
        old="            worker.residency.resting = False\n",
        new="            pass\n",
        breaks="a worker that has loaded once never makes room again",
        checker="stories",
        seeds=1,
    ),
    reservations(
        name="pinned models make room",
        old="m not in pinned and m not in important",
        new="m not in important",
        breaks="what an operator has loaded goes",
        checker="stories",
        seeds=1,
    ),
    reservations(
        name="important models make room",
        old="m not in pinned and m not in important",
        new="m not in pinned",
        breaks="a task of less importance ends the place of a more important one's model",
        checker="stories",
        seeds=1,
    ),
)

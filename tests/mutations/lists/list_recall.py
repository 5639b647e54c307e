"""Mutations of leases that are recalled from windows: core/placement/recall.py."""

from functools import partial

from tests.mutations.mutation import Mutation

recall = partial(Mutation, module="multigpu_master.core.placement.recall")
recall_story = partial(recall, checker="stories")

RECALL = (
    recall(
        name="what waits in a window stays there",
        old="            self._recall_for_slots(now)\n",
    ),
    recall(
        name="the urgent wait for what was sent ahead",
        old="            self._recall_for_urgent(now)\n",
    ),
    recall_story(
        name="tasks from before the clock was set back are as young as can be",
        old="if 0 <= now - head.submit_s < LOOK_S:",
        new="if now - head.submit_s < LOOK_S:",
    ),
    recall(
        name="what runs is recalled",
        old="if lease.running or lease.recalled == worker.session:",
        new="if lease.recalled == worker.session:",
    ),
    recall_story(
        name="what waits behind a cancelled call stays there",
        old="len(w.leases) > w.slots}",
        new="len(w.leases) > w.info.slots}",
    ),
    recall(
        name="adopted leases are not looked at",
        module="multigpu_master.core.workers.sessions",
        old="        self._recalls.granted(worker, now)\n        revoked",
        new="        revoked",
        seeds=20000,
    ),
    recall(
        name="nobody looks at windows again",
        old="        self._arm(now)\n        for worker",
        new="        for worker",
    ),
    recall_story(
        name="what a paused queue has leased is recalled",
        old="return not (queue.paused or ",
        new="return not (",
    ),
    recall_story(
        name="one free worker gets it all",
        old="            share = len(waiting) // (len(free) + 1)\n",
        new="            share = len(waiting)\n",
    ),
)

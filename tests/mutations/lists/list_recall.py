"""Mutations of leases that are recalled from windows: core/placement/recall.py."""

from functools import partial

from tests.mutations.mutation import Mutation

recall = partial(Mutation, module="multigpu_master.core.placement.recall")

RECALL = (
    recall(
        name="what waits in a window stays there",
        old="            self._recall_for_slots(now)\n",
        new="",
        breaks="a task waits behind a long one while a worker has nothing to do",
    ),
    recall(
        name="the urgent wait for what was sent ahead",
        old="            self._recall_for_urgent(now)\n",
        new="",
        breaks="an urgent task begins after less urgent ones that only wait in a window",
    ),
    recall(
        name="tasks from before the clock was set back are as young as can be",
        old="if 0 <= now - head.submit_s < LOOK_S:",
        new="if now - head.submit_s < LOOK_S:",
        breaks="an urgent task waits for the clock to catch up",
        checker="stories",
        seeds=1,
    ),
    recall(
        name="what runs is recalled",
        old="if lease.running or lease.recalled == worker.session:",
        new="if lease.recalled == worker.session:",
        breaks="workers are asked for what they can't return, and what waits is not",
    ),
    recall(
        name="what waits behind a cancelled call stays there",
        old="len(w.leases) > w.slots}",
        new="len(w.leases) > w.info.slots}",
        breaks="a task waits until the engine of a cancelled call is ended, while a worker has nothing to do",
        checker="stories",
        seeds=1,
    ),
    recall(
        name="adopted leases are not looked at",
        module="multigpu_master.core.workers.sessions",
        old="        self._recalls.granted(worker, now)\n        revoked",
        new="        revoked",
        breaks="what a worker brings back waits behind a long task of its own",
        seeds=20000,
    ),
    recall(
        name="nobody looks at windows again",
        old="        self._arm(now)\n        for worker",
        new="        for worker",
        breaks="a lease that was too young to be recalled never is",
    ),
    recall(
        name="what a paused queue has leased is recalled",
        old="return not (queue.paused or ",
        new="return not (",
        breaks="a pause takes tasks from workers that would have run them",
        checker="stories",
        seeds=1,
    ),
    recall(
        name="one free worker gets it all",
        old="            share = len(waiting) // (len(free) + 1)\n",
        new="            share = len(waiting)\n",
        breaks="windows change hands, and one worker after the other is idle",
        checker="stories",
        seeds=1,
    ),
)

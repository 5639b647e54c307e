"""Mutations of who gets what: dispatch.py, placement.py, lanes.py."""

from functools import partial

from tests.mutations.mutation import Mutation

dispatch = partial(Mutation, module="multigpu_master.core.dispatch")
placement = partial(Mutation, module="multigpu_master.core.placement")
lanes = partial(Mutation, module="multigpu_master.core.lanes")

PLACEMENT = (
    dispatch(
        name="dispatch while the fleet is awaited",
        old="if ledger.held(now) or ledger.clogged():",
        new="if ledger.clogged():",
        breaks="a new master runs what workers are about to bring back",
    ),
    dispatch(
        name="dispatch while the journal can't follow",
        old="if ledger.held(now) or ledger.clogged():",
        new="if ledger.held(now):",
        breaks="P10: outcomes pile up without end",
    ),
    dispatch(
        name="paused queues dispatch",
        old="None if lane.queue.paused else placement.choose(strategy, lane)",
        new="placement.choose(strategy, lane)",
        breaks="a paused queue dispatches",
    ),
    dispatch(
        name="frames don't count up",
        old="            worker.frame += 1\n",
        new="",
        breaks="the worker can't say what it has seen",
    ),
    dispatch(
        name="a lease names the frame before its own",
        old="task.attempts, now, worker.frame + 1, cost_s)",
        new="task.attempts, now, worker.frame, cost_s)",
        breaks="a lease on its way is taken for lost",
    ),
    dispatch(
        name="attempts are not counted",
        old="        task.attempts += 1\n",
        new="",
        breaks="P4: attempts without end",
    ),
    dispatch(
        name="lease_ids are given twice",
        old="        ledger.next_id += 1\n",
        new="",
        breaks="P2: the fencing token fences nothing",
    ),
    dispatch(
        name="the next lane of a lot is not tried",
        old="                lanes.offer_next(lane.crowd, worker if strategy.pinned else None)\n",
        new="                pass\n",
        breaks="tasks wait behind a task of their kind that has been given away",
    ),
    dispatch(
        name="all lots wait for changes of members",
        old="        elif lanes.lots and (freed or moved):\n",
        new="        elif False:\n",
        breaks="tasks wait although a worker has room again",
    ),
    dispatch(
        name="a worker that was freed is not tried for its own keys",
        old="in [w for w in (list(lots) if moved else (None, *freed)) if w in lots]:",
        new="in [w for w in (list(lots) if moved else (None,)) if w in lots]:",
        breaks="tasks of a pinned key wait although their worker has room",
    ),
    dispatch(
        name="averages that move change nothing",
        old="moved = self._averages != fleet.averages",
        new="moved = False",
        breaks="tasks wait for a loading that has become worth it",
        checker="stories",
        seeds=1,
    ),
    dispatch(
        name="a worker that loads a model is not looked at again",
        old="                self._unpark_loading()\n",
        new="                pass\n",
        breaks="tasks wait although a worker is loading their model",
        seeds=20000,
    ),
    dispatch(
        name="a worker that comes is not tried",
        old="ledger.retry_all or self._membership != fleet.membership",
        new="ledger.retry_all",
        breaks="what waits is not offered to a fleet that has changed",
    ),
    placement(
        name="full windows get more",
        old="if not worker.accepting or worker.full:",
        new="if not worker.accepting:",
        breaks="P10: a worker holds more than it may",
    ),
    placement(
        name="workers that take nothing get work",
        old="if not worker.accepting or worker.full:",
        new="if worker.full:",
        breaks="a cordoned, draining or lost worker gets work",
    ),
    placement(
        name="device memory is promised twice",
        old="    free -= worker.leased_memory_bytes\n",
        new="",
        breaks="tasks are given memory that was given to others",
    ),
    placement(
        name="device memory ignored",
        old="        if short_of_memory(worker, self._shape) is not None:\n            return\n",
        new="",
        breaks="a task is given to a device without the memory for it",
    ),
    placement(
        name="exclusions of a strategy ignored",
        old="        if self.strategy.excludes(self._shape, worker, self._fleet) is not None:\n            return\n",
        new="",
        breaks="a strategy's exclusions don't exclude",
        seeds=2000,
    ),
    placement(
        name="stale ranks count",
        old="            if heap[0][2] != worker.version:\n",
        new="            if False:\n",
        breaks="a worker is chosen by what it was",
    ),
    placement(
        name="the worst worker first",
        old="        heappush(heap, (score, worker.last_dispatch,",
        new="        heappush(heap, (-score, worker.last_dispatch,",
        breaks="strategies are followed backwards",
        checker="stories",
        seeds=1,
    ),
    placement(
        name="rankings forget the newest change",
        old="            for worker in fleet.changes[self._cursor - fleet.changes_base :]:\n",
        new="            for worker in fleet.changes[self._cursor - fleet.changes_base : -1]:\n",
        breaks="the worker that changed last is not ranked",
    ),
    placement(
        name="rankings outlive the fleet that they rank",
        old="anew = self._members != fleet.membership or self._averages != fleet.averages",
        new="anew = self._members == -1 or self._averages != fleet.averages",
        breaks="workers that came, went or changed keep their old rank",
    ),
    placement(
        name="rankings outlive the averages",
        old="anew = self._members != fleet.membership or self._averages != fleet.averages",
        new="anew = self._members != fleet.membership",
        breaks="ranks go by averages that have moved",
        seeds=2000,
    ),
    placement(
        name="workers set aside never come back",
        old="            self._bring_back(queued)\n",
        new="            pass\n",
        breaks="a worker that was not worth it once is never worth it again",
        seeds=5000,
    ),
    placement(
        name="workers set aside come back for their number alone",
        old="        if self._resident != self._fleet.resident_workers(self._shape):\n",
        new="        if False:\n",
        breaks="a worker stays aside although nobody has the model any more",
        checker="stories",
        seeds=1,
    ),
    placement(
        name="workers come back for one task too many",
        old="        while aside and aside[0][0] <= queued:\n",
        new="        while aside and aside[0][0] < queued:\n",
        breaks="tasks that are enough for a loading wait for one more",
        seeds=5000,
    ),
    placement(
        name="what is enough is halved once too often",
        old="        while enough < QUEUED_MAX and enough - too_few > 1:\n",
        new="        while False:\n",
        breaks="tasks that are enough for a loading wait for more",
        seeds=5000,
    ),
    placement(
        name="nobody waits for a crowd to grow",
        old="        crowd.waits_to_grow = worker is None and ranking.has_room()\n",
        new="",
        breaks="tasks that were too few for a loading wait when they are enough",
        checker="stories",
        seeds=1,
    ),
    placement(
        name="pins outlive their workers",
        old="                del self._pins[key]\n",
        new="                pass\n",
        breaks="keys of a lost worker wait for it",
    ),
    placement(
        name="pins outlive the fleet",
        old="        if self._pins_members != self._fleet.membership:\n",
        new="        if self._pins_members == -1:\n",
        breaks="keys of a lost worker wait for it",
    ),
    placement(
        name="who comes takes no keys",
        old="            elif came:\n",
        new="            elif False:\n",
        breaks="a worker that comes does not get the keys that are its own",
        seeds=2000,
    ),
    placement(
        name="pinned windows are never full",
        old="            if worker is None or worker.full or short_of_memory(worker, lane.shape) is not None:\n",
        new="            if worker is None or short_of_memory(worker, lane.shape) is not None:\n",
        breaks="P10: a worker holds more than it may",
    ),
    lanes(
        name="priority ignored",
        old="        heappush(self._heap, (lane.priority, head.task_id, lane.ticket, lane))\n",
        new="        heappush(self._heap, (0, head.task_id, lane.ticket, lane))\n",
        breaks="tasks of a lower priority go first",
    ),
    lanes(
        name="what comes back goes to the very front",
        old="while tasks and len(older) < SORTED_IN and tasks[0].task_id < task.task_id:",
        new="while False:",
        breaks="a task that comes back goes before older ones",
    ),
    lanes(
        name="what comes back goes to the end",
        old="            tasks.appendleft(task)\n            tasks.extendleft(reversed(older))\n",
        new="            tasks.extendleft(reversed(older))\n            tasks.append(task)\n",
        breaks="a task that comes back waits behind younger ones",
    ),
    lanes(
        name="what comes back is not offered",
        old="            tasks.extendleft(reversed(older))\n        self.offer(lane)\n",
        new="            tasks.extendleft(reversed(older))\n",
        breaks="P7: a lane with tasks is not tried",
    ),
    lanes(
        name="a hollow entry is filled twice",
        old="        if not task.in_lane:\n            task.in_lane = True\n            older",
        new="        if True:\n            task.in_lane = True\n            older",
        breaks="a task stands in its lane twice",
        seeds=5000,
    ),
    lanes(
        name="offered and parked",
        old="        self.parked.pop(lane, None)\n        head = lane.head()\n",
        new="        head = lane.head()\n",
        breaks="a lane is tried although it is set aside",
    ),
    lanes(
        name="a change of members leaves some parked",
        old="        for lane in list(self.parked):\n            self.offer(lane)\n",
        new="        for lane in list(self.parked)[:1]:\n            self.offer(lane)\n",
        breaks="a lane is not tried when everything may have changed",
    ),
    lanes(
        name="hollow entries are dispatched",
        old="            if task.waiting:\n                return task\n            task.in_lane = False\n",
        new="            if True:\n                return task\n            task.in_lane = False\n",
        breaks="a task that was cancelled is given to a worker",
    ),
    lanes(
        name="a lane keeps its place when its head has gone",
        old="                if head.task_id != task_id:\n",
        new="                if False:\n",
        breaks="the place of an older task that left is used by a younger one",
        seeds=2000,
    ),
    lanes(
        name="a taken task is still counted",
        old='        """Takes the head off the lane that came first."""\n'
        "        lane.tasks.popleft().in_lane = False\n        lane.live -= 1\n",
        new='        """Takes the head off the lane that came first."""\n'
        "        lane.tasks.popleft().in_lane = False\n",
        breaks="the lane counts a task that is leased",
    ),
    lanes(
        name="a crowd counts what was taken",
        old='        """Takes the head off the lane that came first."""\n'
        "        lane.tasks.popleft().in_lane = False\n        lane.live -= 1\n        lane.crowd.live -= 1\n",
        new='        """Takes the head off the lane that came first."""\n'
        "        lane.tasks.popleft().in_lane = False\n        lane.live -= 1\n",
        breaks="a model is loaded for tasks that are gone",
    ),
    lanes(
        name="a crowd counts what has left",
        old="        lane.live -= 1\n        lane.crowd.live -= 1\n        if lane.live == 0:\n",
        new="        lane.live -= 1\n        if lane.live == 0:\n",
        breaks="a model is loaded for tasks that are gone",
    ),
    lanes(
        name="hollow lanes are never rebuilt",
        old="        elif len(lane.tasks) > 2 * lane.live + HOLLOW_MIN:\n            lane.keep_if",
        new="        elif False:\n            lane.keep_if",
        breaks="P10: cancelled tasks stay in memory",
        checker="stories",
        seeds=1,
    ),
    lanes(
        name="an emptied lane is not forgotten",
        old="        if self.by_key.pop(lane.key(), None) is not None:\n",
        new="        if False:\n",
        breaks="P10: lanes in which nothing waits stay in memory",
    ),
)

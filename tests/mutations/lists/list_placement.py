"""Mutations of which task goes to which worker: core/placement/."""

from functools import partial

from tests.mutations.mutation import Mutation

dispatch = partial(Mutation, module="multigpu_master.core.placement.dispatch")
dispatch_story = partial(dispatch, checker="pytest")
ranking = partial(Mutation, module="multigpu_master.core.placement.ranking")
wait_lists = partial(Mutation, module="multigpu_master.core.placement.wait_lists")
placement = partial(Mutation, module="multigpu_master.core.placement.placement")
obstacles = partial(Mutation, module="multigpu_master.core.placement.obstacles")
resource_classes = partial(Mutation, module="multigpu_master.core.placement.resource_classes")
recall = partial(Mutation, module="multigpu_master.core.placement.recall")
recall_story = partial(recall, checker="pytest")

PLACEMENT = (
    ranking(
        name="a ranking keeps what has changed",
        old="                if pushed.get(worker, worker.version) != worker.version:\n",
        new="                if pushed.get(worker, worker.version) < worker.version - 1:\n",
    ),
    dispatch(
        name="dispatch while the fleet is awaited",
        old="if state.hold.active(now) or state.ledger.clogged():",
        new="if state.ledger.clogged():",
    ),
    dispatch(
        name="dispatch while the journal can't follow",
        old="if state.hold.active(now) or state.ledger.clogged():",
        new="if state.hold.active(now):",
        breaks="P10: outcomes pile up without end",
    ),
    dispatch(
        name="paused queues dispatch",
        old="None if queue.paused else state.placement.choose(strategy, resource_class)",
        new="state.placement.choose(strategy, resource_class)",
    ),
    dispatch(
        name="frames don't count up",
        old="            worker.frame += 1\n",
    ),
    dispatch(
        name="a lease names the frame before its own",
        old="task.attempts, now, worker.frame + 1, cost_s)",
        new="task.attempts, now, worker.frame, cost_s)",
    ),
    dispatch(
        name="attempts are not counted",
        old="            task.attempts += 1\n",
        breaks="P4: attempts without end",
    ),
    dispatch(
        name="the next class of a wait list is not tried",
        old="                classes.granted(resource_class)\n        for worker",
        new="                pass\n        for worker",
    ),
    dispatch(
        name="wait lists wait for changes of members",
        old="        elif classes.parked and (freed or moved):\n",
        new="        elif False:\n",
    ),
    wait_lists(
        name="a window that has room again is not noticed",
        old="        for wait_list in list(self.windows.values()):\n",
        new="        for wait_list in ():\n",
    ),
    wait_lists(
        name="a worker that was freed is not tried for its own keys",
        old="            if (wait_list := self.pins.get(worker)) is not None:\n",
        new="            if False:\n",
    ),
    dispatch(
        name="whatever a class waits for, it is a window",
        old="elif pin is None and fleet.open.keys().isdisjoint(able.keys()):",
        new="elif pin is None:",
        seeds=5000,
    ),
    dispatch_story(
        name="paused classes are parked like others",
        old="            classes.pause(resource_class)\n            return\n",
        new="            pass\n",
    ),
    wait_lists(
        name="a class that waits for something else leaves none offered",
        old="            self.offer_first(before)  # what",
        new="            pass  # what",
        seeds=5000,
    ),
    wait_lists(
        name="a class that ends takes the offer of its wait list with it",
        old="        if offered and wait_list is not None:\n",
        new="        if False:\n",
        checker="pytest",
    ),
    wait_lists(
        name="a class goes on past an older one of its wait list",
        old="            if entry < first:\n",
        new="            if True:\n",
    ),
    placement(
        name="the worst of few workers is chosen",
        old="                if best is None or rank < first:\n",
        new="                if best is None or rank > first:\n",
    ),
    dispatch_story(
        name="changed averages do not trigger dispatch",
        old="moved = self._averages != fleet.averages",
        new="moved = False",
    ),
    dispatch_story(
        name="a task goes back to where it failed",
        old="        if not is_one_of(worker, avoided):\n",
        new="        if not extra.broke or not is_one_of(worker, avoided):\n",
    ),
    dispatch_story(
        name="a retry loads its model anywhere",
        old=(
            "        if other"
            " and (extra.broke or backlog_suffices(fleet, strategy, backlog.base, other, backlog.size + 1)):\n"
        ),
        new="        if other:\n",
    ),
    dispatch(
        name="a worker that loads a model is not looked at again",
        old="                self._offer_loading(loads)\n",
        new="                pass\n",
        seeds=20000,
    ),
    dispatch(
        name="a worker that comes is not tried",
        old="        if self._membership != fleet.membership:\n",
        new="        if False:\n",
    ),
    ranking(
        name="full windows get leases",
        old="if not worker.accepting or worker.full:",
        new="if not worker.accepting:",
        breaks="P10: a worker holds more than it may",
    ),
    ranking(
        name="workers that take nothing get work",
        old="if not worker.accepting or worker.full:",
        new="if worker.full:",
    ),
    obstacles(
        name="device memory is promised twice",
        old="    free -= worker.leased_memory_bytes\n",
    ),
    ranking(
        name="device memory ignored",
        old="        if short_of_memory(worker, self._shape) is not None:\n            return\n",
    ),
    ranking(
        name="exclusions of a strategy ignored",
        old="        if self.strategy.excludes(self._shape, worker, self._fleet) is not None:\n            return\n",
        seeds=2000,
    ),
    ranking(
        name="stale ranks count",
        old="            if heap[0][2] != worker.version:\n",
        new="            if False:\n",
    ),
    ranking(
        name="the ranking is reversed",
        old="        heappush(heap, (score, worker.last_dispatch,",
        new="        heappush(heap, (-score, worker.last_dispatch,",
        checker="pytest",
    ),
    ranking(
        name="rankings forget the newest change",
        old="            for worker in fleet.changes[self._cursor - fleet.changes_base :]:\n",
        new="            for worker in fleet.changes[self._cursor - fleet.changes_base : -1]:\n",
    ),
    ranking(
        name="rankings outlive the fleet that they rank",
        old="anew = self._members != fleet.membership or self._averages != fleet.averages",
        new="anew = self._members == -1 or self._averages != fleet.averages",
    ),
    ranking(
        name="rankings outlive the averages",
        old="anew = self._members != fleet.membership or self._averages != fleet.averages",
        new="anew = self._members != fleet.membership",
        seeds=2000,
    ),
    ranking(
        name="workers set aside never come back",
        old="            self._bring_back(queued)\n",
        new="            pass\n",
        seeds=5000,
    ),
    ranking(
        name="workers set aside return only for the backlog",
        old="        if self._resident != self._fleet.resident_workers(self._shape):\n",
        new="        if False:\n",
        checker="pytest",
    ),
    ranking(
        name="workers come back for one task too many",
        old="        while aside and aside[0][0] <= queued:\n",
        new="        while aside and aside[0][0] < queued:\n",
        seeds=5000,
    ),
    placement(
        name="nobody waits for a backlog to grow",
        old="        backlog.waits_to_grow = worker is None and ranking.has_room()\n",
        checker="pytest",
    ),
    dispatch(
        name="classes that one event left over wait for another",
        old="                    self.unfinished_s = now\n",
    ),
    dispatch_story(
        name="backlogs that may grow wait with all of their shape",
        old="        elif pin is None and resource_class.backlog.waits_to_grow:\n",
        new="        elif False:\n",
    ),
    wait_lists(
        name="requirements that nothing has any more count",
        old="                self._backlogs_of[queue] -= 1\n",
        checker="pytest",
    ),
    placement(
        name="pins outlive their workers",
        old="                del self._pins[key]\n",
        new="                pass\n",
    ),
    placement(
        name="pins outlive the fleet",
        old="        if self._pins_members != self._fleet.membership:\n",
        new="        if self._pins_members == -1:\n",
    ),
    placement(
        name="a new worker takes no partition keys",
        old="            elif joined:\n",
        new="            elif False:\n",
        seeds=2000,
    ),
    placement(
        name="pinned windows are never full",
        old=(
            "            if worker is None or worker.full or short_of_memory(worker"
            ", resource_class.shape) is not None:\n"
        ),
        new="            if worker is None or short_of_memory(worker, resource_class.shape) is not None:\n",
        breaks="P10: a worker holds more than it may",
    ),
    wait_lists(
        name="priority ignored",
        old="        return resource_class.priority, head.task_id, self._tickets, resource_class\n",
        new="        return 0, head.task_id, self._tickets, resource_class\n",
    ),
    resource_classes(
        name="a requeued task goes before older tasks",
        old="while len(older) < SORTED_IN and (head := self.head()) is not None and head.task_id < task.task_id:",
        new="while False:",
    ),
    resource_classes(
        name="a requeued task goes to the end",
        old="            self._prepend(each)\n",
        new="            (self.append if each is task else self._prepend)(each)\n",
    ),
    wait_lists(
        name="a requeued task's class is not offered",
        old="        resource_class.put_back(task)\n        self.offer(resource_class)\n",
        new="        resource_class.put_back(task)\n",
        breaks="P7: a class with tasks is not tried",
    ),
    resource_classes(
        name="a hollow entry is filled twice",
        old="            return  # its hollow entry is filled again\n",
        new="            pass  # its hollow entry is filled again\n",
        seeds=5000,
    ),
    wait_lists(
        name="an offered class stays parked",
        old="        self.parked.pop(resource_class, None)\n        heappush(self._heap",
        new="        heappush(self._heap",
    ),
    wait_lists(
        name="a change of members leaves some parked",
        old="        for resource_class in self.parked:\n",
        new="        for resource_class in list(self.parked)[:1]:\n",
    ),
    resource_classes(
        name="hollow entries are dispatched",
        old="                if task.waiting:\n                    return task\n",
        new="                if True:\n                    return task\n",
    ),
    wait_lists(
        name="a class keeps its place when its head has gone",
        old="            if head.task_id != task_id:\n",
        new="            if False:\n",
        seeds=2000,
    ),
    wait_lists(
        name="a taken task is still counted",
        old=".stretch = None\n        resource_class.size -= 1\n",
        new=".stretch = None\n",
    ),
    wait_lists(
        name="a backlog counts what was taken",
        old=".stretch = None\n        resource_class.size -= 1\n        resource_class.backlog.size -= 1\n",
        new=".stretch = None\n        resource_class.size -= 1\n",
    ),
    wait_lists(
        name="a backlog counts what has left",
        old=(
            "        resource_class.size -= 1\n"
            "        resource_class.backlog.size -= 1\n"
            "        if resource_class.size == 0:\n"
        ),
        new="        resource_class.size -= 1\n        if resource_class.size == 0:\n",
    ),
    resource_classes(
        name="hollow stretches are never rebuilt",
        old="        if 2 * stretch.left > len(tasks):\n",
        new="        if False:\n",
        breaks="P10: cancelled tasks stay in memory",
        checker="pytest",
    ),
    wait_lists(
        name="an emptied class is not forgotten",
        old="        if self.by_key.pop(resource_class.key(), None) is not None:\n",
        new="        if False:\n",
        breaks="P10: classes in which nothing waits stay in memory",
    ),
    recall(
        name="leases are not recalled for free slots",
        old="            self._recall_for_slots(now)\n",
    ),
    recall(
        name="leases are not recalled for urgent tasks",
        old="            self._recall_for_urgent(now)\n",
    ),
    recall_story(
        name="tasks from before the clock was set back are as young as can be",
        old="if 0 <= now - head.submit_s < LOOK_S:",
        new="if now - head.submit_s < LOOK_S:",
    ),
    recall(
        name="running leases are recalled",
        old="if lease.running or lease.recalled == worker.session:",
        new="if lease.recalled == worker.session:",
    ),
    recall_story(
        name="leases behind a cancelled call are not recalled",
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
        name="the recall timer is not armed again",
        old="        self._arm(now)\n        for worker",
        new="        for worker",
    ),
    recall_story(
        name="leases of paused queues are recalled",
        old="return not (queue.paused or ",
        new="return not (",
    ),
    recall_story(
        name="one free worker gets all recalled leases",
        old="            share = len(waiting) // (len(free) + 1)\n",
        new="            share = len(waiting)\n",
    ),
)

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
        "a ranking keeps what has changed",
        "                if pushed.get(worker, worker.version) != worker.version:\n",
        "                if pushed.get(worker, worker.version) < worker.version - 1:\n",
    ),
    dispatch("dispatch while the fleet is awaited", "if state.hold.active(now) or", "if"),
    dispatch(
        "P10: dispatch while the journal can't follow",
        "if state.hold.active(now) or state.ledger.clogged():",
        "if state.hold.active(now):",
    ),
    dispatch(
        "paused queues dispatch",
        "None if queue.paused else state.placement.choose(strategy, resource_class)",
        "state.placement.choose(strategy, resource_class)",
    ),
    dispatch("frames don't count up", "worker.frame += 1"),
    dispatch("a lease names the frame before its own", "now, worker.frame + 1, cost_s)", "now, worker.frame, cost_s)"),
    dispatch("P4: attempts are not counted", "task.attempts += 1"),
    dispatch(
        "the next class of a wait list is not tried",
        "                classes.granted(resource_class)\n        for worker",
        "                pass\n        for worker",
    ),
    dispatch("wait lists wait for changes of members", "elif classes.parked and (freed or moved):\n", "elif False:\n"),
    wait_lists("a window that has room again is not noticed", "in list(self.windows.values()):\n", "in ():\n"),
    wait_lists(
        "a worker that was freed is not tried for its own keys",
        "if (wait_list := self.pinned_windows.get(worker)) is not None:",
    ),
    dispatch(
        "whatever a class waits for, it is a window",
        "elif pin is None and fleet.open.keys().isdisjoint(able.keys()):",
        "elif pin is None:",
        seeds=5000,
    ),
    dispatch_story(
        "paused classes are parked like others", "            classes.pause(resource_class)\n            return\n"
    ),
    wait_lists("a class that waits for something else leaves none offered", "self.offer_first(before)", seeds=5000),
    wait_lists(
        "a class that ends takes the offer of its wait list with it",
        "if offered and wait_list is not None:",
        checker="pytest",
    ),
    wait_lists("a class goes on past an older one of its wait list", "if entry < first:\n", "if True:\n"),
    placement("the worst of few workers is chosen", "best is None or rank < first:", "best is None or rank > first:"),
    dispatch_story("changed averages do not trigger dispatch", "self._averages != fleet.averages", "False"),
    dispatch_story(
        "a task goes back to where it failed",
        "        if not is_one_of(worker, avoided):\n",
        "        if not extra.broke or not is_one_of(worker, avoided):\n",
    ),
    dispatch_story(
        "a retry loads its model anywhere",
        "        if other"
        " and (extra.broke or backlog_suffices(fleet, strategy, backlog.base, other, backlog.size + 1)):\n",
        "        if other:\n",
    ),
    dispatch("a worker that loads a model is not looked at again", "self._offer_loading(loads)", seeds=20000),
    dispatch("a worker that comes is not tried", "if self._membership != fleet.membership:"),
    ranking("P10: full windows get leases", "if not worker.accepting or worker.full:", "if not worker.accepting:"),
    ranking("workers that take nothing get work", "if not worker.accepting or worker.full:", "if worker.full:"),
    obstacles("device memory is promised twice", "free -= worker.leased_memory_bytes"),
    ranking(
        "device memory ignored", "        if short_of_memory(worker, self._shape) is not None:\n            return\n"
    ),
    ranking(
        "exclusions of a strategy ignored",
        "        if self.strategy.excludes(self._shape, worker, self._fleet) is not None:\n            return\n",
        seeds=2000,
    ),
    ranking("stale ranks count", "if heap[0][2] != worker.version:"),
    ranking("the ranking is reversed", "score, worker.last_dispatch", "-score, worker.last_dispatch", checker="pytest"),
    ranking(
        "rankings forget the newest change",
        "            for worker in fleet.changes[self._cursor - fleet.changes_base :]:\n",
        "            for worker in fleet.changes[self._cursor - fleet.changes_base : -1]:\n",
    ),
    ranking("rankings outlive the fleet that they rank", "self._members != fleet.membership", "self._members == -1"),
    ranking(
        "rankings outlive the averages",
        "anew = self._members != fleet.membership or self._averages != fleet.averages",
        "anew = self._members != fleet.membership",
        seeds=2000,
    ),
    ranking("workers set aside never come back", "self._bring_back(queued)", seeds=5000),
    ranking(
        "workers set aside return only for the backlog",
        "if self._resident != self._fleet.resident_workers(self._shape):",
        checker="pytest",
    ),
    ranking("workers come back for one task too many", "aside[0][0] <= queued:", "aside[0][0] < queued:", seeds=5000),
    placement(
        "nobody waits for a backlog to grow",
        "backlog.waits_to_grow = worker is None and ranking.has_room()",
        checker="pytest",
    ),
    dispatch("classes that one event left over wait for another", "self.unfinished_s = now"),
    dispatch_story(
        "backlogs that may grow wait with all of their shape",
        "        elif pin is None and resource_class.backlog.waits_to_grow:\n",
        "        elif False:\n",
    ),
    wait_lists("requirements that nothing has any more count", "self._backlogs_of[queue] -= 1", checker="pytest"),
    placement("pins outlive their workers", "del self._pins[key]"),
    placement("pins outlive the fleet", "self._pins_members != self._fleet.membership:", "self._pins_members == -1:"),
    placement("a new worker takes no partition keys", "elif joined:\n", "elif False:\n", seeds=2000),
    placement("P10: pinned windows are never full", "if worker is None or worker.full or", "if worker is None or"),
    wait_lists("priority ignored", "return resource_class.priority, head.task_id", "return 0, head.task_id"),
    resource_classes(
        "a requeued task goes before older tasks",
        "while len(older) < SORTED_IN and (head := self.head()) is not None and head.task_id < task.task_id:",
        "while False:",
    ),
    resource_classes(
        "a requeued task goes to the end",
        "            self._prepend(each)\n",
        "            (self.append if each is task else self._prepend)(each)\n",
    ),
    wait_lists(
        "P7: a class with tasks is not tried",
        "        resource_class.put_back(task)\n        self.offer(resource_class)\n",
        "        resource_class.put_back(task)\n",
    ),
    resource_classes("a hollow entry is filled twice", "return  # its hollow", "pass  # its hollow", seeds=5000),
    wait_lists(
        "an offered class stays parked",
        "        self.parked.pop(resource_class, None)\n        heappush(self._heap",
        "        heappush(self._heap",
    ),
    wait_lists("a change of members leaves some parked", "in self.parked:\n", "in list(self.parked)[:1]:\n"),
    resource_classes("hollow entries are dispatched", "                if task.waiting:", "                if True:"),
    wait_lists("a class keeps its place when its head has gone", "if head.task_id != task_id:", seeds=2000),
    wait_lists("a taken task is still counted", ".stretch = None\n        resource_class.size -= 1", ".stretch = None"),
    wait_lists(
        "a backlog counts what was taken",
        ".stretch = None\n        resource_class.size -= 1\n        resource_class.backlog.size -= 1\n",
        ".stretch = None\n        resource_class.size -= 1\n",
    ),
    wait_lists(
        "a backlog counts what has left",
        "        resource_class.size -= 1\n"
        "        resource_class.backlog.size -= 1\n"
        "        if resource_class.size == 0:\n",
        "        resource_class.size -= 1\n        if resource_class.size == 0:\n",
    ),
    resource_classes("P10: cancelled tasks stay in memory", "if 2 * stretch.left > len(tasks):", checker="pytest"),
    wait_lists(
        "P10: classes in which nothing waits stay in memory",
        "if self.by_key.pop(resource_class.key(), None) is not None:",
    ),
    recall("leases are not recalled for free slots", "self._recall_for_slots(now)"),
    recall("leases are not recalled for urgent tasks", "self._recall_for_urgent(now)"),
    recall_story("tasks from before the clock was set back are as young as can be", "if 0 <= now", "if now"),
    recall("running leases are recalled", "if lease.running or lease.recalled", "if lease.recalled"),
    recall_story(
        "leases behind a cancelled call are not recalled", "len(w.leases) > w.slots}", "len(w.leases) > w.info.slots}"
    ),
    recall(
        "adopted leases are not looked at",
        "        self._recalls.granted(worker, now)\n        revoked",
        "        revoked",
        module="multigpu_master.core.workers.sessions",
        seeds=20000,
    ),
    recall("the recall timer is not armed again", "        self._arm(now)\n        for worker", "        for worker"),
    recall_story("leases of paused queues are recalled", "return not (queue.paused or ", "return not ("),
    recall_story("one free worker gets all recalled leases", "len(waiting) // (len(free) + 1)\n", "len(waiting)\n"),
)

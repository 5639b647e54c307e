"""Mutations of which task goes to which worker: core/placement/."""

from functools import partial

from tests.mutations.mutation import Mutation

dispatch = partial(Mutation, module="multigpu_master.core.placement.dispatch")
scheduler = partial(Mutation, module="multigpu_master.core.scheduler")
dispatch_story = partial(dispatch, checker="pytest")
candidates = partial(Mutation, module="multigpu_master.core.placement.candidates")
candidates_story = partial(candidates, checker="pytest")
pins = partial(Mutation, module="multigpu_master.core.placement.pins")
obstacles = partial(Mutation, module="multigpu_master.core.placement.candidates")
classes = partial(Mutation, module="multigpu_master.core.placement.resource_classes")
classes_story = partial(classes, checker="pytest")
recall = partial(Mutation, module="multigpu_master.core.placement.recall")
recall_story = partial(recall, checker="pytest")

PLACEMENT = (
    scheduler("dispatch while the fleet is awaited", "not self.hold.active(now) and", ""),
    scheduler("P10: dispatch while the journal can't follow", "not self.ledger.clogged() and", ""),
    dispatch("dispatch numbers don't count up", "worker.dispatches_sent += 1"),
    dispatch(
        "a lease names the dispatch before its own",
        "            lease = Lease(ids.issue(), task, worker, task.attempts, now, worker.dispatches_sent + 1,",
        "            lease = Lease(ids.issue(), task, worker, task.attempts, now, worker.dispatches_sent,",
    ),
    dispatch("P4: attempts are not counted", "            task.attempts += 1\n"),
    dispatch("blocked backlogs wait for changes of members", "elif classes.blocked:\n", "elif False:\n"),
    dispatch_story(
        "the last worker with a model loses it, and no other loads it",
        "if self._resident != fleet.resident_changes:",
        "if False:",
    ),
    dispatch_story(
        "changed averages do not trigger dispatch",
        "(fleet.eligibility_changes, fleet.estimates_changes):",
        "(fleet.eligibility_changes, self._estimates):",
    ),
    dispatch_story(
        "a task goes back to where it failed",
        "        if not is_one_of(worker, avoided):\n",
        "        if not extra.broke_on_devices or not is_one_of(worker, avoided):\n",
    ),
    dispatch_story(
        "a retry loads its model anywhere",
        "        if other and (\n"
        "            extra.broke_on_devices or"
        " backlog_suffices(fleet, strategy, backlog.shape, other, backlog.size + 1)\n        ):\n",
        "        if other:\n",
    ),
    dispatch(
        "a worker that loads a model is not looked at again",
        "                self._drop_candidates()\n                classes.unblock_all(only_too_few_tasks=True)",
        "                self._drop_candidates()",
        seeds=20000,
    ),
    dispatch(
        "candidates outlive the event",
        "        self._drop_candidates()\n        self._unblock_changed()",
        "        self._unblock_changed()",
    ),
    dispatch(
        "only changed workers are compared after others gained room, too",
        "        self._drop_candidates()  # a reservation",
        "        self._candidates.clear()  # a reservation",
        checker="pytest",
    ),
    dispatch(
        "a worker that comes is not tried",
        "if (self._eligibility, self._estimates) != (fleet.eligibility_changes,",
        "if (0, self._estimates) != (0,",
    ),
    dispatch("backlogs outlive the pins", "            classes.repin()\n"),
    dispatch("backlogs that one event left over wait for another", "self.stopped_at_s = now"),
    dispatch("P10: pinned windows are never full", "or pin.full or", "or"),
    obstacles("device memory is promised twice", "free -= worker.leased_memory_bytes"),
    candidates(
        "P10: full windows get leases", "                if worker in fleet.with_room:\n", "                if True:\n"
    ),
    candidates(
        "workers get leases without room, or tasks that they can't run",
        "            if worker in with_room and worker in eligible:\n",
        "            if worker in with_room:\n",
    ),
    candidates(
        "a worker keeps its place",
        "if place is None or place.change_count != worker.change_count:",
        "if place is None:",
    ),
    dispatch_story(
        "places outlive the averages",
        "            self._places.clear()\n            classes.unblock_all()",
        "            classes.unblock_all()",
    ),
    candidates("device memory ignored", "if insufficient_free_bytes(worker, shape) is not None or ", "if "),
    candidates(
        "exclusions of a strategy ignored", " or strategy.excludes(shape, worker, fleet) is not None:", ":", seeds=2000
    ),
    candidates("a worker keeps its score", "if heap[0].change_count != worker.change_count:"),
    candidates_story(
        "the worst worker is chosen",
        "return Place(score, worker.newest_lease_number,",
        "return Place(-score, worker.newest_lease_number,",
    ),
    candidates_story("no backlog waits to grow", "backlog.too_few_tasks = True"),
    candidates(
        "a backlog of one task less suffices", "worker, backlog.size):", "worker, backlog.size + 1):", seeds=5000
    ),
    pins("pins outlive their workers", "del self._pins[key]"),
    pins(
        "pins outlive the fleet",
        "self._eligibility_changes != self._fleet.eligibility_changes:",
        "self._eligibility_changes == -1:",
    ),
    pins("a new worker takes no partition keys", "elif joined:\n", "elif False:\n", seeds=2000),
    classes("priority ignored", "= resource_class.priority, head.task_id", "= 0, head.task_id"),
    classes(
        "paused queues dispatch",
        "            if not resource_class.queue.paused:\n"
        "                self._join_backlog(resource_class)\n"
        "            return\n",
        "            self._join_backlog(resource_class)\n            return\n",
    ),
    classes(
        "a queue that is paused goes on",
        "        self._regroup([c for c in self.by_key.values() if queue in",
        "        self._regroup([c for c in () if queue in",
    ),
    classes_story("requirements that nothing has any more count", "shapes[shape] -= 1"),
    classes(
        "a requeued task goes before older tasks",
        "while len(older) < SEARCHED_MAX and (head := self.head()) is not None and head.task_id < task.task_id:",
        "while False:",
    ),
    classes(
        "a requeued task goes to the end",
        "self.tasks.extendleft([task, *reversed(older)])",
        "self.tasks.extendleft(reversed(older)); self.tasks.append(task)",
    ),
    classes("P7: a requeued task does not move its class", "if head.task_id != resource_class.position[1] or", "if"),
    classes(
        "a backlog is not moved with its first class",
        "                self.ready.update(backlog)\n            return\n",
        "                pass\n            return\n",
        seeds=5000,
    ),
    classes(
        "an unblocked backlog is not ready",
        "        del self.blocked[backlog]\n        self.ready.update(backlog)\n",
        "        del self.blocked[backlog]\n",
    ),
    classes(
        "a blocked backlog is ready",
        "        self.ready.remove(backlog)\n        self.blocked[",
        "        self.blocked[",
    ),
    classes("a growing backlog stays blocked", "        if backlog.too_few_tasks and", "        if False and"),
    classes("an item that moved keeps its place", "if item.entry_number == entry_number:", "if True:"),
    classes("tasks that ended are dispatched", "            if tasks[0].waiting:", "            if True:"),
    classes("an ending task stays the first", "if self.tasks[0] is ending:"),
    classes_story(
        "P10: ended tasks stay in memory", "elif len(self.tasks) > 2 * self.size + STALE_MIN:", "elif False:"
    ),
    classes(
        "a backlog counts what was taken or left",
        "                backlog.size -= 1\n                self._reposition",
        "                self._reposition",
    ),
    classes("P10: classes in which nothing waits stay in memory", "del self.by_key[resource_class.key]"),
    classes("P10: empty backlogs stay in memory", "del self.backlogs[backlog.key]"),
    classes(
        "a change of one worker unblocks too little",
        "if not workers.keys().isdisjoint(changed)]",
        "if not workers.keys().isdisjoint(changed)][:1]",
    ),
    recall("leases are not recalled for free slots", "self._recall_for_slots(workers, now)"),
    recall("leases are not recalled for urgent tasks", "self._recall_for_urgent(over_slots, now)"),
    recall_story(
        "leases as urgent as the waiting task are recalled",
        "leases = [x for x in waiting if x.task.spec.priority > priority]",
        "leases = waiting",
    ),
    recall_story("P12: all leases are read again for each backlog", "less_urgent[worker] = leases[needed:]"),
    recall("running leases are recalled", "if lease.running or lease.recalled_in", "if lease.recalled_in"),
    recall_story(
        "leases behind a cancelled call are not recalled",
        "    return len(worker.leases) > worker.usable_slots or",
        "    return len(worker.leases) > worker.info.slots or",
    ),
    recall_story(
        "leases whose model is being loaded are not recalled",
        " or (bool(worker.leases) and bool(worker.residency.loading_since_s))",
        "",
    ),
    recall_story(
        "leases are recalled for workers that must load the model, too",
        "return not loading and fleet.load_s(worker, shape) == 0.0",
        "return not loading",
    ),
    recall_story("leases are recalled for workers that load the model themselves", "return not loading and", "return"),
    recall(
        "adopted leases are not looked at",
        "        self._recalls.watch(worker, now)\n        revoked",
        "        revoked",
        module="multigpu_master.core.workers.sessions",
        seeds=20000,
    ),
    recall("the recall timer is not armed again", "        self._arm(now)\n        over_slots", "        over_slots"),
    recall_story(
        "only some workers of a large fleet are checked",
        "            del self._to_check[worker]\n",
        "            pass\n",
    ),
    recall_story(
        "leases of paused queues are recalled",
        "queue.paused or ledger.strategy_of(queue).pinned or",
        "ledger.strategy_of(queue).pinned or",
    ),
    recall_story("one free worker gets all recalled leases", "len(waiting) // (len(free) + 1)\n", "len(waiting)\n"),
)

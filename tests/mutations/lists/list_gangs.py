"""Mutations of tasks that several workers run: core/placement/gangs.py, and what other modules know of them."""

from functools import partial

from tests.mutations.mutation import Mutation

CORE = "multigpu_master.core"
TESTS = "tests/core/test_gangs.py"
gangs = partial(Mutation, module=f"{CORE}.placement.gangs", checker="gangs")
ROOM = "worker/models/test_loader.py::test_models_make_room_for_a_rank_of_a_gang"
loader = partial(Mutation, module="multigpu_worker.models.loader", checker=ROOM)
worker = partial(Mutation, module="multigpu_worker.dispatcher", checker=ROOM)
obstacles = partial(Mutation, module=f"{CORE}.placement.candidates", checker="gangs")
dispatch = partial(Mutation, module=f"{CORE}.placement.dispatch", checker="gangs")
ledger = partial(Mutation, module=f"{CORE}.ledger", checker="gangs")
fleet = partial(Mutation, module=f"{CORE}.workers.fleet", checker="gangs")
sessions = partial(Mutation, module=f"{CORE}.workers.sessions", checker="gangs")
model = partial(Mutation, module=f"{CORE}.model", checker="gangs")
attempts = partial(Mutation, module=f"{CORE}.attempts", checker="gangs")
admission = partial(Mutation, module=f"{CORE}.admission", checker="gangs")

GANGS = (
    gangs(
        "a gang begins beside other tasks of its workers",
        "return not (worker.leases or worker.occupied_slots) and insufficient_free_bytes",
        "return insufficient_free_bytes",
    ),
    gangs(
        "a gang waits while other models are in use",
        "        if for_rank:\n",
        "        if False:\n",
        module=f"{CORE}.workers.residency",
        checker="pytest",
    ),
    gangs(
        "a gang begins with a rank less",
        "if len(idle) >= shape.world_size_min:",
        "if len(idle) >= shape.world_size_min - 1:",
    ),
    gangs(
        "two gangs reserve the same workers",
        "and (worker.leases_limit is None or worker in reserved_here)",
        "",
        checker="gangs in seeds",
    ),
    gangs("two gangs have a reservation", "and self._key in (None, backlog.key):", "and True:"),
    gangs(
        "a gang begins without the memory that it needs",
        " and insufficient_free_bytes(worker, shape) is None",
        "",
    ),
    gangs(
        "workers without memory are reserved",
        " if w.leases or w.occupied_slots or w in idle or w in reserved_here]",
        "]",
    ),
    gangs(
        "an elastic gang waits for all", "if len(idle) >= shape.world_size_min:", "if len(idle) >= shape.world_size:"
    ),
    gangs(
        "an elastic gang begins with the fewest",
        "choose_workers(idle, min(len(idle), shape.world_size), shape)",
        "choose_workers(idle, shape.world_size_min, shape)",
    ),
    gangs(
        "an elastic gang takes more than it may",
        "choose_workers(idle, min(len(idle), shape.world_size), shape)",
        "choose_workers(idle, 99, shape)",
    ),
    gangs(
        "an elastic gang reserves the most that it may",
        "        size = backlog.shape.world_size_min\n",
        "        size = backlog.shape.world_size\n",
    ),
    gangs(
        "a gang that grows gives its workers to another",
        " and not self._earlier_task_could_use(task, gang_workers):",
        ":",
        checker="pytest",
    ),
    gangs(
        "a gang whose memory is still reported does not grow",
        "if worker in gang_workers or _is_idle(worker, shape))",
        "if _is_idle(worker, shape))",
        checker="pytest",
    ),
    gangs(
        "a gang begins again though it has no more workers",
        "len(_free_devices(able, shape, gang_workers)) > len(gang.leases)",
        "True",
    ),
    gangs(
        "a gang is interrupted to grow though its own workers are drained",
        "able = self._able(strategy, shape, gang_workers, gang_workers)",
        "able = self._able(strategy, shape, gang_workers, gang_workers) + [w for w in gang_workers if not w.accepting]",
    ),
    gangs(
        "a gang begins again though a rank has ended", "gang is None or gang.succeeded or len", "gang is None or len"
    ),
    gangs(
        "a gang that has all its ranks begins again",
        " or len(gang.leases) == task.spec.world_size:",
        ":",
    ),
    gangs(
        "two ranks share a device",
        "first.setdefault(worker.device_key, worker)",
        "first.setdefault(worker.worker_id, worker)",
    ),
    gangs("ranks are never spread", "if shape.spread_ranks:", "if False:"),
    gangs("NVLink does not matter", "for group_of in (host, nvlink_group):", "for group_of in (host,):"),
    gangs(
        "an elastic gang grows by a worker of its device", "return one_per_device(worker for", "return list(worker for"
    ),
    gangs(
        "an elastic gang never grows",
        "            self._attempts.interrupt(lease, TO_GROW, now)",
        "            pass",
    ),
    attempts(
        "a gang that grows is charged",
        "        self.requeue_uncharged(lease, now, 0.0)\n\n    def interrupt_all",
        "        self._requeue(lease.task, now, 0.0)\n\n    def interrupt_all",
    ),
    sessions(
        "a gang grows without a checkpoint",
        "if self._observe(lease, h, now):",
        "if self._observe(lease, h, now) or not lease.rank:",
    ),
    obstacles(
        "models that will be unloaded take memory from a gang",
        "    if shape.world_size > 1:  # a rank",
        "    if False:  # a rank",
    ),
    obstacles("a gang's own model is unloaded for it", " if model.model != own]", "]"),
    gangs("busy workers are not reserved", "            self._reserve(backlog, task, able, now)", "            pass"),
    gangs("waiting leases of reserved workers are not recalled", "            self._commands.recall(worker, waiting)"),
    gangs(
        "leases that run are recalled",
        "if not x.running and x.recalled_in != worker.session]",
        "]",
        checker="gangs in seeds",
    ),
    gangs("a reservation lasts for ever", "lambda at_s: self._expire(number, at_s)", "lambda at_s: None"),
    gangs(
        "long tasks postpone a gang for ever",
        "RESERVED_S * 2.0**expired",
        "RESERVED_S",
        checker="core/test_gangs.py::test_a_gang_begins_beside_tasks_that_run_for_longer_than_a_reservation",
    ),
    gangs(
        "a gang without workers does not pause",
        "            self._attempts.pause(task, now, RESERVED_S)",
        "            self._ledger.classes.put_back(self._ledger.class_of(task), task)",
    ),
    gangs(
        "the reservation of a gang that ended stays", "if self._key not in self._ledger.classes.backlogs:", "if False:"
    ),
    gangs("reserved workers idle", "limit = worker.usable_slots if old and worker not in old else 0", "limit = 0"),
    gangs(
        "small tasks postpone a gang for ever",
        "limit = worker.usable_slots if old and worker not in old else 0",
        "limit = worker.usable_slots",
    ),
    gangs(
        "back-fill goes on while another back-fill runs",
        "return any(lease_id < self._first_id for lease_id in worker.leases)",
        "return bool(worker.leases)",
    ),
    gangs(
        "a gang whose workers are idle is not tried",
        "self.reserved_idle = not any(worker.leases for worker in self._reserved)",
        "self.reserved_idle = False",
    ),
    gangs("the workers of a gang get other tasks", "        lease.worker.leases_limit = 0\n"),
    gangs(
        "ranks are spread over hosts",
        "    return [worker for worker in workers if group_of(worker) == best]",
        "    return workers",
    ),
    gangs("a gang takes the host with the most workers", "best = min(fits", "best = max(fits"),
    gangs(
        "tasks that waited for reserved workers stay blocked",
        "        if new:  # tasks that waited",
        "        if False:  # tasks that waited",
        checker="gangs in seeds",
        seeds=20_000,
    ),
    gangs(
        "other tasks stay blocked after a reservation",
        "        self._ledger.classes.unblock_all()\n\n    def _end_worker_reservation",
        "\n    def _end_worker_reservation",
        checker="gangs in seeds",
        seeds=20_000,
    ),
    dispatch(
        "a reserved worker that is done does not wake its gang",
        " or w.leases_limit is not None]",
        "]",
    ),
    dispatch(
        "a gang waits while all workers are reserved",
        "while (with_room or gangs.reserved_idle) and",
        "while with_room and",
    ),
    dispatch(
        "a gang gets ids that were not begun",
        "enough_ids = self._ids.end - self._ids.next_id >= backlog.shape.world_size",
        "enough_ids = True",
        checker="gangs in seeds",
        seeds=20_000,
    ),
    ledger(
        "a rank that ends leaves the others behind",
        "            self._fleet.remove_lease(lease)\n            if lease is not ended:",
        "            if lease is ended:\n                self._fleet.remove_lease(lease)\n            if False:",
    ),
    ledger(
        "the other ranks are not told",
        "                self._commands.revoke(lease.worker.session, [lease.lease_id], "
        "RANK_ENDED.format(rank=ended.rank))",
        "                pass",
    ),
    ledger("a task keeps the lease of a gang that ended", "        ended.task.lease = None\n"),
    ledger(
        "a rank that succeeded is revoked",
        "            if lease.lease_id not in lease.worker.leases:  # its rank has succeeded\n"
        "                continue\n",
        "            lease.worker.leases.setdefault(lease.lease_id, lease)\n",
    ),
    ledger(
        "ranks but the first are not granted",
        "        for lease in leases[1:]:\n            self._fleet.add_lease(lease.worker, lease, now)\n",
    ),
    fleet("the worker of a rank stays closed", "            worker.leases_limit = None\n"),
    fleet(
        "workers without an address take ranks",
        "if shape.world_size > 1 and not worker.info.store_address:",
        "if False:",
    ),
    sessions("a gang ends with its first rank", "if gang.succeeded < len(gang.leases):", "if False:"),
    sessions(
        "a gang has the result of its last rank",
        "        task.outcome, task.lease = first, lease\n",
        "        task.outcome, task.lease = outcome, lease\n",
    ),
    sessions("the device time of a rank is lost", "            self._usage.add_rank_s(lease.task, device_s)\n"),
    sessions("a finished rank holds its worker", "            self._fleet.subtract_leases(lease.worker, [lease])\n"),
    sessions(
        "the queue timeout ends a gang whose rank 0 has ended",
        "                lease.running, lease.running_since_s = True, outcome.start_s or outcome.dispatch_s\n",
        "                pass\n",
    ),
    sessions(
        "a part of a gang is adopted", "        if task.spec.world_size > 1:  # it runs", "        if False:  # it runs"
    ),
    sessions(
        "a worker that reconnects with a rank keeps leases that it had lost",
        "elif not runs_rank and self._adopt(",
        "elif self._adopt(",
    ),
    sessions(
        "a restart loses a gang's checkpoint",
        "                self._ledger.keep_checkpoint(task, held.checkpoint)\n",
        "                pass\n",
    ),
    sessions("a gang has the log of its last rank", "        lease.log = gang.leases[0].log\n"),
    sessions(
        "a rank's partial outputs are the task's",
        "if lease is None or lease.rank:",
        "if lease is None:",
    ),
    model(
        "a reserved worker has room",
        "        if self.leases_limit is not None and len(self.leases) >= self.leases_limit:\n"
        "            return True\n",
    ),
    model(
        "gangs share a class with single tasks",
        "spec.memory_bytes, partition, *ranks)",
        "spec.memory_bytes, partition)",
    ),
    attempts("a lost host is charged to a gang", "if lease.running and lease.gang is None:", "if lease.running:"),
    admission(
        "a gang for which there are too few workers waits",
        "fleet.placeable(shape):\n        return None",
        "fleet.device_count(shape):\n        return None",
    ),
    worker(
        "a rank begins beside other models", "first.exclusive and not self._loader.nothing_else_loaded(model)", "False"
    ),
    loader("models stay beside a rank", " or (self._exclusive and not resident.leases)\n", "\n"),
    loader(
        "pinned models do not come back after a rank",
        "exclusive = self._exclusive or self._holds_exclusive()",
        "exclusive = self._holds_exclusive()",
    ),
)

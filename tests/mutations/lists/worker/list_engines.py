"""Mutations of the worker's pure parts: blame, limits, health, residency, routes, pace, energy, kept sizes, MPS."""

from functools import partial

from tests.mutations.mutation import Mutation

worker = partial(Mutation, checker="worker", seeds=1)
charge = partial(worker, module="multigpu_worker.processes.blame.charge")
evidence = partial(worker, module="multigpu_worker.processes.blame.evidence")
limits = partial(worker, module="multigpu_worker.processes.blame.limits")
health = partial(worker, module="multigpu_worker.device.health")
energy = partial(worker, module="multigpu_worker.device.energy")
residency = partial(worker, module="multigpu_worker.models.residency")
routes = partial(worker, module="multigpu_worker.models.routes")
sizes = partial(worker, module="multigpu_worker.models.measured_sizes")
estimates = partial(worker, module="multigpu_worker.models.memory_estimates")
claims = partial(worker, module="multigpu_worker.mps.claims")

ENGINES = (
    charge(
        name="one of several suspects is charged",
        old="    if len(everyone) == 1:\n",
        new="    if everyone:\n",
        breaks="a task is charged for the death that another one caused",
    ),
    charge(
        name="a batch is not halved",
        old="max(1, len(leases) // 2)",
        new="len(leases)",
        breaks="the task that ends its engine is never found",
    ),
    charge(
        name="suspects run beside others",
        old="    for lease in suspects.alone:\n        lease.together_max = 1\n",
        new="",
        breaks="slots die together again and again",
    ),
    charge(
        name="a prepared batch is no suspect",
        old="    if violation is None and prepared in batches:\n",
        new="    if False:\n",
        breaks="a payload that ends its engine while it is prepared is charged to what ran",
    ),
    charge(
        name="a violation accuses every slot",
        old="accused_of(state, batch) not in violation.slots",
        new="not violation.slots",
        breaks="tasks beside a run timeout become suspects",
    ),
    charge(
        name="deaths without a cause are unlimited",
        old="            if lease.deaths >= deaths_max:\n",
        new="            if lease.deaths > 10 * deaths_max:\n",
        breaks="a task that ends idle engines is tried for ever",
    ),
    evidence(
        name="MPS rejections are charged",
        old="if not caused_elsewhere(error.message)}",
        new="}",
        breaks="a task is charged for the state of the MPS server",
    ),
    evidence(
        name="all failures after a lost context are charged",
        old="if not self._context_errors or not one_by_one or self._ran_at_xid(lease_id):",
        new="if True:",
        breaks="tasks that found the context lost are charged",
    ),
    evidence(
        name="a fault of another worker is charged",
        old="            if not death.fault.ours:\n",
        new="            if False:\n",
        breaks="a task is charged for the MPS fault of another worker",
    ),
    evidence(
        name="a kill is charged to the only lease",
        old="            if death.killed or len(inside) != 1:\n",
        new="            if len(inside) != 1:\n",
        breaks="a task is charged for an operator's kill",
    ),
    limits(
        name="run timeouts are not enforced",
        old="        if timeout_s == 0 or now_ns - state.started_ns < timeout_s * 1e9:\n",
        new="        if timeout_s == 0 or now_ns - state.started_ns < 2 * timeout_s * 1e9:\n",
        breaks="a task runs for longer than its run timeout",
    ),
    limits(
        name="progress reports are ignored",
        old="standstill.state != state:",
        new="standstill.state.lease_id != state.lease_id:",
        breaks="a task that reports progress is ended",
    ),
    limits(
        name="one cancelled lease ends its batch",
        old="        if any(instant is None or",
        new="        if all(instant is None or",
        breaks="a batch ends although other leases are wanted",
    ),
    limits(
        name="only the first slot that stands still is accused",
        old=">= self.progress_timeout_s / 2:",
        new=">= self.progress_timeout_s:",
        breaks="slots that stopped together are not suspect together",
    ),
    health(
        name="faults end without a check",
        old="            if reason.gravity >= Gravity.SICK and code not in self._findings:\n",
        new="            if False:\n",
        breaks="a lost device returns unchecked",
    ),
    health(
        name="a fault during a check is overlooked",
        old="        if self._checking and gravity >= Gravity.SICK:\n",
        new="        if False:\n",
        breaks="a device that fails during its check is fit",
    ),
    health(
        name="checks are not delayed",
        old="        self._setbacks += 1\n",
        new="",
        breaks="a broken device is checked every second for ever",
    ),
    energy(
        name="a restarted counter is subtracted",
        old=" or now_ns <= times[-1] or grown < 0:",
        new=" or now_ns <= times[-1]:",
        breaks="energies are negative after a driver's reload",
    ),
    energy(
        name="concurrent batches each count all energy",
        old="        grown /= max(1, running)\n",
        new="",
        breaks="energies add up to more than the device used",
    ),
    energy(
        name="readings are unlimited",
        old="        if len(times) >= READINGS_MAX:\n",
        new="        if False:\n",
        breaks="the memory of a busy worker grows without end",
    ),
    residency(
        name="pinned models make room by the worker",
        old="r.state is ModelState.READY and not r.pinned), key",
        new="r.state is ModelState.READY), key",
        breaks="a pinned model is unloaded",
    ),
    residency(
        name="small models overtake a large one",
        old="        break  # later models wait until this one is loaded\n",
        new="        continue\n",
        breaks="a large model waits for ever",
    ),
    residency(
        name="models are unloaded in vain",
        old="    if lacking_bytes > 0:  # models",
        new="    if False:  # models",
        breaks="models are unloaded although the waiting one does not fit",
    ),
    residency(
        name="failed loads are retried at once",
        old="and now_s >= r.retry_at]",
        new="]",
        breaks="a broken model is loaded again and again",
    ),
    residency(
        name="models in use retire at once",
        old=">= PATIENCE_S and served_s >= max(PATIENCE_S, wanted.load_s)",
        new=">= 0",
        breaks="two models replace each other all the time",
    ),
    routes(
        name="names move before the new version is ready",
        old="                and self.residents[key].state is not ModelState.READY\n",
        new="                and False\n",
        breaks="tasks wait while a changed model loads",
    ),
    routes(
        name="a broken default is replaced by another model",
        old="(not name if listed else in_memory)",
        new="(False if listed else in_memory)",
        breaks="tasks without a model name silently run on another model",
    ),
    sizes(
        name="sizes do not depend on the device",
        old="[FORMAT, self._made_with, values]",
        new="[FORMAT, values]",
        breaks="a size measured on one device is used on another",
    ),
    sizes(
        name="kept sizes are unlimited",
        old="        if len(paths) > KEPT_MAX:\n",
        new="        if False:\n",
        breaks="the folder of sizes grows without end",
    ),
    estimates(
        name="the cache does not shrink to the limit",
        old="        if limit_bytes:\n",
        new="        if False:\n",
        breaks="a language model that would fit is rejected",
    ),
    claims(
        name="claims of dead workers stay",
        old="                    path.unlink(missing_ok=True)\n                    continue\n",
        new="                    pass\n",
        breaks="a GPU is full of workers that have died",
    ),
    Mutation(
        name="generate tokenises any prompt",
        module="multigpu_worker.engines.generate.payload",
        old="    if len(text) > CHARACTERS_PER_TOKEN_MAX * context:\n",
        new="    if False:\n",
        breaks="a prompt of 20 MB takes gigabytes",
        checker="worker/generate/test_generate_parts.py::test_characters_beyond_the_context_are_not_tokenised",
    ),
)

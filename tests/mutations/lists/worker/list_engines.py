"""Mutations of the worker's pure parts: blame, limits, health, residency, routes, pace, energy, kept sizes, MPS."""

from functools import partial

from tests.mutations.mutation import Mutation

worker = partial(Mutation, checker="worker")
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
    charge("a task is charged for the death that another one caused", "    if len(everyone) == 1:", "    if everyone:"),
    charge("the task that ends its engine is never found", "max(1, len(leases) // 2)", "len(leases)"),
    charge("slots die together again and again", "    for lease in suspects.alone:\n        lease.together_max = 1\n"),
    charge(
        "a payload that ends its engine while it is prepared is charged to what ran",
        "if violation is None and prepared in batches:",
    ),
    charge("tasks beside a run timeout become suspects", "accused_of(state, batch) not in", "not"),
    charge(
        "a task that ends idle engines is tried for ever",
        "            if lease.deaths >= deaths_max:\n",
        "            if lease.deaths > 10 * deaths_max:\n",
    ),
    evidence("a task is charged for the state of the MPS server", "if not caused_elsewhere(error.message)}", "}"),
    evidence(
        "tasks that found the context lost are charged",
        "if not self._context_errors or not one_by_one or self._ran_at_xid(lease_id):",
        "if True:",
    ),
    evidence("a task is charged for the MPS fault of another worker", "if not death.fault.ours:"),
    evidence("a task is charged for an operator's kill", "if death.killed or len(inside) != 1", "if len(inside) != 1"),
    limits("a task runs for longer than its run timeout", "timeout_s * 1e9:\n", "2 * timeout_s * 1e9:\n"),
    limits(
        "a task that reports progress is ended",
        "standstill.state != state:",
        "standstill.state.lease_id != state.lease_id:",
    ),
    limits("a batch ends although other leases are wanted", "if any(instant is None or", "if all(instant is None or"),
    limits(
        "slots that stopped together are not suspect together", "self.progress_timeout_s / 2", "self.progress_timeout_s"
    ),
    health("a lost device returns unchecked", "if reason.gravity >= Gravity.SICK and code not in self._findings:"),
    health("a device that fails during its check is fit", "if self._checking and gravity >= Gravity.SICK:"),
    health("a broken device is checked every second for ever", "self._setbacks += 1"),
    energy("energies are negative after a driver's reload", "now_ns <= times[-1] or grown < 0", "now_ns <= times[-1]"),
    energy("energies add up to more than the device used", "grown /= max(1, running)"),
    energy("the memory of a busy worker grows without end", "if len(times) >= READINGS_MAX:"),
    residency("a pinned model is unloaded", "is ModelState.READY and not r.pinned), key", "is ModelState.READY), key"),
    residency("a large model waits for ever", "break  # later models wait until this one is loaded\n", "continue\n"),
    residency("models are unloaded although the waiting one does not fit", "    if lacking_bytes > 0", "    if False"),
    residency("a broken model is loaded again and again", "and now_s >= r.retry_at]", "]"),
    residency(
        "two models replace each other all the time", "PATIENCE_S and served_s >= max(PATIENCE_S, wanted.load_s)", "0"
    ),
    routes("tasks wait while a changed model loads", "self.residents[key].state is not ModelState.READY\n", "False\n"),
    routes("tasks without a model name silently run on another model", "not name if listed", "False if listed"),
    sizes("a size measured on one device is used on another", "[FORMAT, self._made_with, values]", "[FORMAT, values]"),
    sizes("the folder of sizes grows without end", "if len(paths) > KEPT_MAX:"),
    estimates("a language model that would fit is rejected", "if limit_bytes:"),
    claims(
        "a GPU is full of workers that have died",
        "                    path.unlink(missing_ok=True)\n                    continue\n",
    ),
    Mutation(
        "a prompt of 20 MB takes gigabytes",
        "if len(text) > CHARACTERS_PER_TOKEN_MAX * context:",
        module="multigpu_worker.engines.generate.payload",
        checker="worker/generate/test_generate_parts.py::test_characters_beyond_the_context_are_not_tokenised",
    ),
)

"""The scenario language: one core on a clock that moves by command.

    worker NAME [kinds=a,b] [models=m,n] [labels=k:v] [slots=N] [window=N] [memory=BYTES]    a session begins
    heartbeat NAME [used=BYTES] [util=SHARE] [resident=m,n]
    submit N [kind=K] [model=M] [queue=Q] [priority=P] [key=K] [units=U] [memory=BYTES] [labels=k:v] [wait=yes]
    finish NAME [N] [took=SECONDS]     it reports its N oldest leases as succeeded, each after that time
    fail NAME [N]                      ... as failed
    lose NAME | cordon NAME | uncordon NAME | drain NAME [SECONDS]
    strategy NAME [queue=Q]            by a name or an alias; `-`: the queue follows the fleet again
    pause Q | resume Q
    pass SECONDS
    explain TASK
    held                               which tasks each worker holds

Tasks are called 1, 2, 3 ... in order of submission.
"""

from multigpu_master.core import events as ev
from multigpu_master.core.model import Task, TaskError
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, Resident, Telemetry, WorkerInfo
from multigpu_master.strategies.registry import canonical_name, load_strategies


def ranges(numbers: list[int]) -> str:
    """1 2 3 5 as 1-3 5."""
    words: list[str] = []
    for i, n in enumerate(numbers):
        if i and n == numbers[i - 1] + 1:
            words[-1] = f"{words[-1].split('-')[0]}-{n}"
        else:
            words.append(str(n))
    return " ".join(words)


class Stage:
    """See the module."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.core = Core(load_strategies(), Limits(session_timeout_s=1e9), 1, lambda: 0.0)
        self.tasks: list[Task] = []
        self._sessions = 0

    def run(self, line: str) -> list[str]:
        """Runs one command; returns what is to be shown."""
        name, *words = line.split()
        options = dict(w.split("=", 1) for w in words if "=" in w)
        answer = getattr(self, f"do_{name}")(*[w for w in words if "=" not in w], **options)
        return answer if isinstance(answer, list) else []

    def _handle(self, event: ev.Event) -> list[str]:
        lines = []
        for command in self.core.handle(event, self.now):
            match command:
                case ev.Dispatch():
                    worker = self.core.fleet.sessions[command.session].worker_id
                    lines.append(f"{worker} gets {ranges([self._name(x.task) for x in command.leases])}")
                case ev.Settled():
                    lines += [
                        f"{self._name(t)} {t.outcome.state.name}" for t in command.tasks
                        if t.outcome is not None and t.outcome.state.name != "SUCCEEDED"
                    ]  # fmt: skip
                    lines += self._handle(ev.SettlesDone(command.tasks))
                case ev.Submitted():
                    rejected = [r.message for r in command.results if isinstance(r, ev.Rejection)]
                    lines += [f"rejected: {rejected[0]}"] if rejected else []
                case ev.Revoke():
                    lines.append(f"revoked: {command.reason}")
                case _:
                    pass
        return lines

    def _name(self, task: Task) -> int:
        return self.tasks.index(task) + 1

    # --- workers -----------------------------------------------------------------------------------------------------

    def do_worker(
        self, name: str, kinds: str = "run", models: str = "", labels: str = "", slots: str = "1", window: str = "64",
        memory: str = "1000", broken: str = "",
    ) -> list[str]:  # fmt: skip
        offered = tuple(models.split(",")) if models else ()
        found = tuple(Model(name=m, error="its weights are cut off") for m in broken.split(",") if m)
        info = WorkerInfo(
            worker_id=name, capabilities=tuple(Capability(kind=k, models=offered) for k in kinds.split(",")),
            labels=dict(pairs(labels)), slots=int(slots), window_tasks=int(window), memory_total_bytes=int(memory),
            models=found,
        )  # fmt: skip
        self._sessions += 1
        return self._handle(ev.Hello(self._sessions, info))

    def do_heartbeat(self, name: str, used: str = "", util: str = "", resident: str = "") -> list[str]:
        worker = self.core.fleet.workers[name]
        telemetry = Telemetry(
            memory_total_bytes=worker.info.memory_total_bytes if used else None,
            memory_used_bytes=int(used) if used else None, utilization=float(util) if util else None,
        )  # fmt: skip
        held = [
            ev.HeldLease(x.lease_id, x.task.task_id, x.attempt, granted_by_this_journal=True)
            for x in worker.leases.values()
        ]
        models = tuple(Resident(model=name) for name in resident.split(",")) if resident else ()
        return self._handle(ev.Heartbeat(worker.session, held, worker.dispatches_sent, telemetry, models))

    def _report(self, name: str, n: str, took_s: float, *, succeed: bool) -> list[str]:
        worker = self.core.fleet.workers[name]
        lines = []
        for lease in list(worker.leases.values())[: int(n)]:
            self.now += took_s
            reports = ev.Reports(worker.session, start_s=self.now - took_s, finish_s=self.now)
            if succeed:
                reports.succeeded, reports.results = [lease.lease_id], [b""]
            else:
                reports.failures = [ev.Failure(lease.lease_id, TaskError("ValueError", "no good"))]
            lines += self._handle(reports)
        return lines

    def do_finish(self, name: str, n: str = "1", took: str = "0.1") -> list[str]:
        return self._report(name, n, float(took), succeed=True)

    def do_fail(self, name: str, n: str = "1", took: str = "0.1") -> list[str]:
        return self._report(name, n, float(took), succeed=False)

    def do_lose(self, name: str) -> list[str]:
        return self._handle(ev.SessionClosed(self.core.fleet.workers[name].session))

    def do_cordon(self, name: str) -> list[str]:
        return self._handle(ev.Cordon(name, "a look at its fan"))

    def do_uncordon(self, name: str) -> list[str]:
        return self._handle(ev.Uncordon(name))

    def do_drain(self, name: str, seconds: str = "") -> list[str]:
        return self._handle(ev.Drain(name, self.now + float(seconds) if seconds else None))

    # --- tasks -------------------------------------------------------------------------------------------------------

    def do_submit(
        self, n: str, kind: str = "run", model: str = "", queue: str = "default", priority: str = "3", key: str = "",
        units: str = "1", memory: str = "0", labels: str = "", wait: str = "",
    ) -> list[str]:  # fmt: skip
        spec = Spec(
            kind=kind, model=model, queue=queue, priority=int(priority), memory_bytes=int(memory),
            labels=pairs(labels), wait_for_worker=bool(wait),
        )  # fmt: skip
        fresh = [Task(spec, "", b"", key, int(units)) for _ in range(int(n))]
        self.tasks += fresh
        return self._handle(ev.Submit(spec, fresh))

    def do_explain(self, task: str) -> list[str]:
        e = explain(self.core, self.tasks[int(task) - 1], self.now)
        lines = [f"{e.summary}", f"{e.strategy} ranks by: {e.score_meaning}"]
        for c in e.candidates:
            place = f"#{c.rank} {c.score:.4g}" if c.rank else f"excluded: {'; '.join(c.excluded_by)}"
            lines.append(f"  {c.worker.worker_id} {place}")
        return lines

    def do_held(self) -> list[str]:
        return [
            f"{w.worker_id} holds {ranges([self._name(x.task) for x in w.leases.values()]) or 'nothing'}"
            for w in self.core.fleet.workers.values()
        ]

    # --- rules -------------------------------------------------------------------------------------------------------

    def do_strategy(self, name: str, queue: str = "") -> list[str]:
        strategy = "" if name == "-" else canonical_name(name, self.core.ledger.strategies)
        if strategy is None:
            return [f"no strategy {name!r}"]
        lines = self._handle(ev.SetStrategy(strategy, queue))
        return [f"the strategy is {strategy or self.core.ledger.strategy}", *lines]

    def do_pause(self, queue: str) -> list[str]:
        return self._handle(ev.ConfigureQueue(queue, paused=True))

    def do_resume(self, queue: str) -> list[str]:
        return self._handle(ev.ConfigureQueue(queue, paused=False))

    def do_pass(self, seconds: str) -> list[str]:
        self.now += float(seconds)
        return self._handle(ev.Tick())


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """a:b,c:d as pairs."""
    return tuple((k, v) for k, _, v in (p.partition(":") for p in text.split(","))) if text else ()

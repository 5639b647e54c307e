"""Events, which the core handles, and commands, which it returns. A message of the protocol with many items is one
event or command, which has a sequence of the items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from multigpu_master.core.model import Cordon as WorkerCordon
from multigpu_master.core.model import Energy, Lease, Payload, Task, TaskError, Worker
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import (
    HEALTHY,
    Capability,
    EngineReport,
    Health,
    Model,
    Resident,
    Telemetry,
    WorkerInfo,
)

# Rejected clients should wait this long before they try again.
RETRY_DELAY_S = 1.0


@dataclass(slots=True)
class Rejection:
    """Why a task was not accepted. `code` is a google.rpc.Code."""

    code: int
    message: str
    retry_delay_s: float | None = None


# --- events: clients -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StreamOpened:
    """A Run stream began. Its number is above zero and unique."""

    stream: int


@dataclass(slots=True)
class StreamClosed:
    stream: int


@dataclass(slots=True)
class Submit:
    """New tasks of one spec. Answered by `Submitted`. `stream` gets their outcomes; 0: no stream does."""

    spec: Spec
    tasks: Sequence[Task]
    stream: int = 0


@dataclass(slots=True)
class Cancel:
    """Ends tasks. Answered by `Cancelled`."""

    tasks: Sequence[Task]
    reason: str = ""
    withdrawn: bool = False  # the client withdraws the tasks, so their request_ids become free


# --- events: the journal ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SubmitFailed:
    """The journal could not write these tasks: the core forgets them, as if they had never been submitted. It sets the
    task_id of each unsettled task to 0, so that a caller that holds the task can see this.
    """

    tasks: Sequence[Task]


@dataclass(slots=True)
class SettlesDone:
    """The core may forget these settled tasks. The journal has written their outcomes, or never will, because it has
    rejected the tasks, or had no room for the outcomes when it was closed.
    """

    tasks: Sequence[Task]


@dataclass(slots=True)
class IdsRenewed:
    """The answer to RenewIds: the journal has reserved the ids from `first_id` to the end of that id's epoch
    (EPOCH_IDS, model.py), all of them unused.
    """

    first_id: int


@dataclass(slots=True)
class Recover:
    """The unsettled tasks of the journal, when the master starts. So that workers can report the leases that they hold,
    nothing is dispatched until all workers that were connected when the previous master ended have reconnected, or
    until hold_until_s.
    """

    tasks: Sequence[Task]
    hold_until_s: float = 0.0


# --- events: workers -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HeldLease:
    """A lease that a worker reports as held."""

    lease_id: int
    task_id: int
    attempt: int
    running: bool = False
    # The progress that the task has reported.
    fraction: float = 0.0  # the share that is done, 0 to 1
    steps: int = 0
    note: str = ""
    checkpoint: bytes = b""
    log: str = ""  # the last lines that the attempt has written; "": unchanged
    granted_by_this_journal: bool = False  # in a hello: a master of this journal granted it to this worker


@dataclass(slots=True)
class Hello:
    """A session begins. Ends any other session of the same worker. Answered by `Welcome`. The master adopts or revokes
    each of the leases. It always revokes leases of another journal: those whose lease_id or task_id is not below
    `ids_end`, and those whose `granted_by_this_journal` is False.
    """

    session: int
    info: WorkerInfo
    leases: Sequence[HeldLease] = ()
    ids_end: int = 1 << 53
    token_id: str = ""  # of the token with which the worker opened the session; "": without a token


@dataclass(slots=True)
class Catalog:
    """The capabilities and models that a worker offers now; they replace those of its hello."""

    capabilities: tuple[Capability, ...]
    models: tuple[Model, ...]


@dataclass(slots=True)
class Heartbeat:
    session: int
    leases: Sequence[HeldLease]
    last_dispatch_number: int  # the highest Dispatch.number that the worker has received in this session
    telemetry: Telemetry
    models: tuple[Resident, ...] = ()
    stopping: bool = False
    health: Health = HEALTHY
    engine: EngineReport = field(default_factory=EngineReport)
    catalog: Catalog | None = None  # None: unchanged
    occupied_slots: int = 0  # slots in which cancelled calls still run


@dataclass(slots=True)
class Failure:
    """A lease whose task did not succeed: its attempt failed, or the worker returned the task."""

    lease_id: int
    error: TaskError
    returned: bool = False
    broke_engine: bool = False  # the attempt broke its engine, through a fault of the task or of the device


@dataclass(slots=True)
class Reports:
    """A worker's report on leases that ran together: the successes, with a result each, and the failures. start_s and
    finish_s are in seconds since 1970, by the worker's clock; 0.0: unknown.
    """

    session: int
    succeeded: Sequence[int] = ()  # lease_ids
    results: Sequence[Payload] = ()
    content_type: str = ""
    failures: Sequence[Failure] = ()
    start_s: float = 0.0
    finish_s: float = 0.0
    energy: Sequence[Energy] = ()  # for each of `succeeded`; empty: not measured
    device_s: float = 0.0  # device time of these leases, in seconds
    logs: Mapping[int, str] = field(default_factory=dict)  # lease_id -> last lines, where there are any
    by_master: bool = False  # the master itself reports leases that it could not send: no sign of life of the worker


@dataclass(slots=True)
class PartialOutput:
    lease_id: int
    index: int  # in the order of all partial outputs of the task, from 0
    data: bytes
    content_type: str = ""
    checkpoint: bytes = b""  # that the task saved before this output


@dataclass(slots=True)
class Partials:
    session: int
    partials: Sequence[PartialOutput]


@dataclass(slots=True)
class SessionClosed:
    session: int


# --- events: operators and time --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cordon:
    worker_id: str
    reason: str = ""


@dataclass(slots=True)
class Uncordon:
    worker_id: str


@dataclass(slots=True)
class Drain:
    worker_id: str
    deadline_s: float | None = None


@dataclass(slots=True)
class Forget:
    worker_id: str


@dataclass(slots=True)
class CheckDevice:
    """A connected worker must check its device, and gets no leases until the check has passed."""

    worker_id: str


@dataclass(slots=True)
class RegisterWorker:
    """A worker that the previous master knew; it is lost until its hello. Fields without a comment: see Worker."""

    info: WorkerInfo
    cordon: WorkerCordon | None = None
    expected: bool = False  # it was connected when the previous master ended
    quarantined: bool = False
    requested_check: int = 0
    pinned_models: tuple[str, ...] = ()
    check_at_once: bool = False


@dataclass(slots=True)
class LoadModel:
    """A connected worker must load a model that it offers, and keep it loaded."""

    worker_id: str
    model: str


@dataclass(slots=True)
class UnloadModel:
    """A worker must unload a model once the model has no leases. A name without version: all its versions."""

    worker_id: str
    model: str


@dataclass(slots=True)
class SetStrategy:
    name: str  # a canonical name; "" (only if queue is set): the queue follows the fleet's strategy
    queue: str = ""


@dataclass(slots=True)
class ConfigureQueue:
    """Changes the rules of a queue. None: unchanged."""

    queue: str
    paused: bool | None = None
    tasks_max: int | None = None
    bytes_max: int | None = None


@dataclass(slots=True)
class RestoreBreaker:
    """The circuit breaker had tripped before the master started."""

    tripped_s: float  # when, in seconds since 1970


@dataclass(slots=True)
class ResetBreaker:
    """An operator resets the circuit breaker: sick devices are quarantined again."""


@dataclass(slots=True)
class Tick:
    """Time has passed."""


Event = (
    StreamOpened | StreamClosed | Submit | Cancel | SubmitFailed | SettlesDone | IdsRenewed | Recover
    | Hello | Heartbeat | Reports | Partials | SessionClosed
    | Cordon | Uncordon | Drain | Forget | CheckDevice | RegisterWorker | SetStrategy | ConfigureQueue
    | LoadModel | UnloadModel | RestoreBreaker | ResetBreaker | Tick
)  # fmt: skip


# --- commands --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submitted:
    """The answer to Submit. `results`: for each task, in order, the task itself, the known task with its request_id, or
    why it was rejected. `fresh`: the new tasks; durable ones go to the journal before they are acknowledged. `pending`:
    by how many this event raises the number of outcomes that the stream waits for.
    """

    results: list[Task | Rejection]
    fresh: list[Task]
    pending: int = 0


@dataclass(slots=True)
class Cancelled:
    """The answer to Cancel: the tasks that this event ended."""

    tasks: list[Task]


@dataclass(slots=True)
class Settled:
    """These tasks ended: write the durable ones to the journal, and send their outcomes to the streams."""

    tasks: list[Task]


@dataclass(slots=True)
class RejectUnwritten:
    """The journal could not write these tasks: reject them on the streams that follow them."""

    tasks: list[Task]


@dataclass(slots=True)
class RenewIds:
    """Half of the ids are used: reserve another range in the journal. Answered by IdsRenewed."""


@dataclass(slots=True)
class Welcome:
    session: int
    adopted: list[int]  # the lease_ids that the worker keeps


@dataclass(slots=True)
class Dispatch:
    """Send these leases to the worker."""

    session: int
    number: int  # of this dispatch in the session, from 1; heartbeats acknowledge it
    leases: list[Lease]


@dataclass(slots=True)
class Revoke:
    session: int
    lease_ids: list[int]
    reason: str


@dataclass(slots=True)
class Recall:
    """Ask the worker to return those of these leases that it has not begun."""

    session: int
    lease_ids: list[int]


@dataclass(slots=True)
class SendDesiredState:
    """Send the worker its whole desired state, which is read from the Worker when the command is executed."""

    session: int


@dataclass(slots=True)
class EndSession:
    session: int
    reason: str
    taken_over: bool = False  # by another session of the same worker


@dataclass(slots=True)
class ForwardPartials:
    """New partial outputs of a task: (index, data, content_type), for the task's streams."""

    task: Task
    partials: list[tuple[int, bytes, str]] = field(default_factory=list)


@dataclass(slots=True)
class WorkerChanged:
    """A worker's visible state changed. `save`: also write the worker's settings to the journal. `gone`: the worker was
    forgotten.
    """

    worker: Worker
    save: bool = False
    gone: bool = False


@dataclass(slots=True)
class BreakerChanged:
    """The circuit breaker tripped, with a message for the operator, or was reset. The journal keeps tripped_s."""

    tripped_s: float  # when, in seconds since 1970; 0.0: it was reset
    message: str = ""


Command = (
    Submitted | Cancelled | Settled | RejectUnwritten | RenewIds | Welcome | Dispatch | Revoke | Recall
    | SendDesiredState | EndSession | ForwardPartials | WorkerChanged | BreakerChanged
)  # fmt: skip


# --- the commands of an event ----------------------------------------------------------------------------------------


class Commands:
    """The commands of the current event, in the order in which they are executed. If the event settled tasks, one
    Settled with all of them comes last; only RenewIds may follow it. Call `pop_all` at the end of the event.
    """

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._settled: list[Task] = []

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def worker_changed(self, worker: Worker, *, save: bool = False, gone: bool = False) -> None:
        self._commands.append(WorkerChanged(worker, save, gone))

    def send_desired_state(self, worker: Worker) -> None:
        """Sends the worker, if it is connected, its complete desired state."""
        if worker.session:
            self._commands.append(SendDesiredState(worker.session))

    def revoke(self, session: int, lease_ids: list[int], reason: str) -> None:
        if lease_ids:
            self._commands.append(Revoke(session, lease_ids, reason))

    def recall(self, worker: Worker, leases: Sequence[Lease]) -> None:
        """Asks the worker to return those of these leases that it has not begun."""
        for lease in leases:
            lease.recalled_in = worker.session
        if leases:
            self._commands.append(Recall(worker.session, [lease.lease_id for lease in leases]))

    def settled(self, tasks: Iterable[Task]) -> None:
        self._settled += tasks

    def pop_all(self) -> list[Command]:
        commands, self._commands = self._commands, []
        if self._settled:
            commands.append(Settled(self._settled))
            self._settled = []
        return commands

"""Reads a history and says what is wrong with it. Shares no code with the product: it knows only what was promised.

The records it reads (streams.py has those of watches, partial outputs and cancellations):

- submit     by, life, request_id, digest    a client is about to hand a task over; digest: SHA-1 of its payload
- ack        by, request_id, task_id         the master said that the task is its own now, and, if durable, on its disk;
             (settled)                       or, by its outcome, that it will be there in a moment
- outcome    by, life, task_id, request_id, state, result, attempts, worker_id, partials
                                             a client was given the end of a task
- gone       request_id, task_id             the master doesn't know this ephemeral task any more
- got        task_id, result                 the end of a task, asked for by name when all was over
- execution  task_id, attempt, pid, parent_pid, digest
                                             a handler began, by its own word; its result is digest:attempt:pid
- worker     name, pid                       a worker was started
- kill       target ("master", "worker", "engine", "client", "watcher"), pid
- failpoint  name, process, pid              a process ended itself with SIGKILL at that place
- rejection    code, message                   a call ended with an error that no kill explains
- fault      line                            a daemon logged what only a bug explains
- zero       queued, leased                  what the master counted when all was over

`by` is the way of a client: submit, run, cancel, map, stream are durable; ephemeral (by map) and lend (by Submit and
Get) are not. Outcomes also come by watch and replay. A client that was killed begins another life and knows nothing of
the one before: "once" means once in a life. The one watch lives on in its cursor.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos.records import streams
from tests.chaos.records.book import Book, Record


@dataclass(slots=True)
class Findings:
    """Promises that were broken, and figures that say how much was tested."""

    broken: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)


def check(records: Iterable[Record]) -> Findings:
    """Checks a whole history."""
    book = Book(records)
    broken = book.broken
    twice = _watched(book)
    lost = _acknowledged(book)
    _executed(book)
    _answered(book)
    streams.check(book)
    for r in book["got"]:
        seen = book.watched.get(r["task_id"])
        if seen is not None and seen["result"] != r["result"]:
            broken.append(f"task {r['task_id']}: its outcome was {seen['result']} and is now {r['result']}")
    broken += [f"rejected: {r['code']} {r['message']}" for r in book["rejection"]]
    broken += [f"a daemon's fault: {r['line']}" for r in book["fault"]]
    if not book["zero"]:
        broken.append("it was not checked whether the queue reached zero")
    broken += [f"the queue did not reach zero: {r}" for r in book["zero"] if r["queued"] or r["leased"]]
    return Findings(broken, {"lost": lost, "delivered twice": twice, **_figures(book)})


def _figures(book: Book) -> dict[str, int]:
    executions = len(book["execution"])
    watched = {r["request_id"] for r in book.watched.values()}
    return {
        "submitted": len(book.digests),
        "acknowledged": len({r["request_id"] for r in book["ack"]}),
        "outcomes": len(book.watched),
        # Each is a broken promise, unless the master died right after it delivered the outcome.
        "outcomes lost with their master": len({r for r in book.digests if book.durable(r)} - watched),
        "cancelled": sum(r["state"] == "CANCELLED" for r in book.watched.values()),
        "partial outputs": len(book["partial"]),
        "ephemeral tasks gone with their master": len(book["gone"]),
        "executions": executions,
        "executed again": executions - len({r["task_id"] for r in book["execution"]}),
    }


def _watched(book: Book) -> int:
    """The outcomes that Watch gave: each exactly once, however often the stream broke. How many came again."""
    requests: dict[str, int] = {}
    twice = 0
    for r in book["outcome"]:
        if r["by"] != "watch":
            continue
        if r["task_id"] in book.watched:
            twice += 1
            book.broken.append(f"task {r['task_id']}: its outcome was delivered twice by one watch")
        book.watched[r["task_id"]] = r
        if requests.setdefault(r["request_id"], r["task_id"]) != r["task_id"]:
            first = requests[r["request_id"]]
            book.broken.append(f"request {r['request_id']} became two tasks: {first} and {r['task_id']}")
        if not book.durable(r["request_id"]):
            book.broken.append(f"task {r['task_id']}: {r['request_id']} is ephemeral, and was on the disk")
    return twice


def _acknowledged(book: Book) -> int:
    """Nothing acknowledged is lost, and a request stays the task that it was acknowledged as. How many were lost."""
    ids: dict[str, tuple[int, float]] = {}
    lost = 0
    for r in book["ack"]:
        request_id, task_id, at_s = r["request_id"], r["task_id"], r["at_s"]
        if r.get("settled") and book.unsafe(at_s):
            continue  # an outcome is delivered before it is on the disk, and a client that died may ask again
        first, first_s = ids.setdefault(request_id, (task_id, at_s))
        # An ephemeral one is another task to another master.
        excused = not book.durable(request_id) and (book.unsafe(first_s) or book.master_died(first_s, at_s))
        if first != task_id and not excused:
            book.broken.append(f"request {request_id} was acknowledged as task {first} and then as {task_id}")
    for request_id, (task_id, _) in ids.items():
        if request_id not in book.digests:
            book.broken.append(f"request {request_id} was acknowledged, but nobody submitted it")
        if not book.durable(request_id):
            continue
        if task_id not in book.watched:
            lost += 1
            book.broken.append(f"request {request_id}, acknowledged as task {task_id}, has no outcome: it was lost")
        elif book.watched[task_id]["request_id"] != request_id:
            book.broken.append(f"task {task_id} was acknowledged for {request_id}, and ended as another's")
    # Nobody tells a stream of partial outputs that its task was taken; its end does.
    unheard = {r for r, way in book.ways.items() if way != "stream"} - {r["request_id"] for r in book["ack"]}
    book.broken += [f"request {r} was submitted and never acknowledged" for r in sorted(unheard)]
    return lost


def _executed(book: Book) -> None:
    """Every result is right, and is of an execution that took place: by that worker, as that attempt, by that lease.

    A report that came too late would show as a result of another attempt, or of another worker, than the master granted
    last; one that was taken twice would show as a second outcome.
    """
    names = {r["pid"]: r["name"] for r in book["worker"]}
    executions = {(r["task_id"], r["attempt"], r["pid"]): r for r in book["execution"]}
    unwanted = {r["request_id"] for r in book["cancel"]}
    broken = book.broken
    for r in book["outcome"]:
        task_id, digest = r["task_id"], book.digests.get(r["request_id"])
        if digest is None:
            broken.append(f"task {task_id} ended, but nobody submitted {r['request_id']}")
            continue
        if r["state"] == "CANCELLED" and r["request_id"] in unwanted:
            continue
        if r["state"] != "SUCCEEDED":
            broken.append(f"task {task_id} ended {r['state']}, though nothing is wrong with it: {r.get('error')}")
            continue
        value, attempt, pid = [*r["result"].split(":"), "-1", "-1"][:3]
        if value != digest:
            broken.append(f"task {task_id} of {r['request_id']} has the wrong result {value}")
        if int(attempt) != r["attempts"]:
            broken.append(
                f"task {task_id}: the result of attempt {attempt} was taken while {r['attempts']} was granted"
            )
        execution = executions.get((task_id, int(attempt), int(pid)))
        if execution is None:
            broken.append(f"task {task_id}: a result of attempt {attempt} in process {pid}, which never ran it")
        elif names.get(execution["parent_pid"]) != r["worker_id"]:
            broken.append(
                f"task {task_id}: run by {names.get(execution['parent_pid'])}, credited to {r['worker_id']!r}"
            )


def _answered(book: Book) -> None:
    """A client's own call gives each input one outcome in each life. It may be another execution's than the one that
    stayed, but only if the master died after it was given and before it was safe.
    """
    given: set[tuple[str, int, str]] = set()
    answered: set[str] = {r["request_id"] for r in book["gone"]}
    for r in book["outcome"]:
        if r["by"] in ("watch", "replay"):
            continue
        key = (r["by"], r["life"], r["request_id"])
        if key in given:
            book.broken.append(f"request {r['request_id']} was answered twice in one life of a client")
        given.add(key)
        answered.add(r["request_id"])
        stayed = book.watched.get(r["task_id"])
        if stayed is not None and stayed["result"] != r["result"] and not book.unsafe(r["at_s"]):
            book.broken.append(
                f"task {r['task_id']}: {r['result']} was given, {stayed['result']} stayed, no master died"
            )
    asked = {r for r, way in book.ways.items() if way in ("run", "map", "ephemeral", "lend")}
    book.broken += [f"request {r} was never answered" for r in sorted(asked - answered)]
    # An ephemeral task lives as long as its master, and no shorter.
    acks_s: dict[int, float] = {r["task_id"]: r["at_s"] for r in book["ack"]}
    for r in book["gone"]:
        if not book.master_died(acks_s.get(r["task_id"], 0.0) - 1.0, r["at_s"]):
            book.broken.append(f"ephemeral task {r['task_id']} is gone, and no master died since it was taken")

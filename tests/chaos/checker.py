"""Reads a history and says what is wrong with it. Shares no code with the product: it knows only what was promised.

The records it reads:

- submit     request_id, payload             a task is about to be handed over for the first time
- ack        request_id, task_id             the master said that the task is on its disk
- outcome    by ("watch" or "map"), task_id, request_id, state, result, attempts, worker_id
                                             a client was given the end of a task
- got        task_id, result                 the end of a task, asked for by name when all was over
- execution  task_id, attempt, pid, parent_pid, payload
                                             a handler began, by its own word
- worker     name, pid                       a worker was started
- kill       target ("master", "worker", "engine"; "pause" for one that was stopped for a while), pid
- stale      reports, requeued                what a master had refused as too late, and taken from lost workers, so far
- refusal    code, message                   a call ended with an error that no kill explains
- fault      line                             a daemon logged what only a bug explains
- zero       queued, leased                  what the master counted when all was over
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(slots=True)
class Findings:
    """What the checker found: promises that were broken, and figures for whoever wants to know how hard it was."""

    broken: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)


def check(records: Iterable[Record]) -> Findings:
    """Checks a whole history."""
    by_what: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_what[record["what"]].append(record)
    broken: list[str] = []
    payloads = {r["request_id"]: r["payload"] for r in by_what["submit"]}
    watched = _watched(by_what["outcome"], broken)
    _acknowledged(by_what["ack"], payloads, watched, broken)
    _executed(by_what, payloads, broken)
    _mapped(by_what, payloads, watched, broken)
    for r in by_what["got"]:
        seen = watched.get(r["task_id"])
        if seen is not None and seen["result"] != r["result"]:
            broken.append(f"task {r['task_id']}: its outcome was {seen['result']} and is now {r['result']}")
    broken += [f"refused: {r['code']} {r['message']}" for r in by_what["refusal"]]
    broken += [f"a daemon's fault: {r['line']}" for r in by_what["fault"]]
    if not by_what["zero"]:
        broken.append("nobody looked whether the queue reached zero")
    broken += [f"the queue did not reach zero: {r}" for r in by_what["zero"] if r["queued"] or r["leased"]]
    figures = {f"{target} kills": 0 for target in ("master", "worker", "engine", "pause")}
    for r in by_what["kill"]:
        figures[f"{r['target']} kills"] += 1
    executions = len(by_what["execution"])
    figures |= {
        "submitted": len(payloads),
        "acknowledged": len({r["request_id"] for r in by_what["ack"]}),
        "outcomes": len(watched),
        "executions": executions,
        "stale reports refused": sum(r["reports"] for r in by_what["stale"]),
        "leases requeued": sum(r["requeued"] for r in by_what["stale"]),
        "executed again": executions - len({r["task_id"] for r in by_what["execution"]}),
    }
    return Findings(broken, figures)


def _watched(outcomes: list[Record], broken: list[str]) -> dict[int, Record]:
    """The outcomes that Watch gave, by task: each exactly once, however often the stream broke."""
    watched: dict[int, Record] = {}
    requests: dict[str, int] = {}
    for r in outcomes:
        if r["by"] != "watch":
            continue
        if r["task_id"] in watched:
            broken.append(f"task {r['task_id']}: its outcome was delivered twice by one watch")
        watched[r["task_id"]] = r
        if requests.setdefault(r["request_id"], r["task_id"]) != r["task_id"]:
            broken.append(f"request {r['request_id']} became two tasks: {requests[r['request_id']]} and {r['task_id']}")
    return watched


def _acknowledged(acks: list[Record], payloads: dict[str, str], watched: dict[int, Record], broken: list[str]) -> None:
    """Nothing acknowledged is lost, and a request stays the task that it was acknowledged as."""
    ids: dict[str, int] = {}
    for r in acks:
        request_id, task_id = r["request_id"], r["task_id"]
        if ids.setdefault(request_id, task_id) != task_id:
            broken.append(f"request {request_id} was acknowledged as task {ids[request_id]} and then as {task_id}")
    for request_id, task_id in ids.items():
        if request_id not in payloads:
            broken.append(f"request {request_id} was acknowledged, but nobody submitted it")
        if task_id not in watched:
            broken.append(f"request {request_id}, acknowledged as task {task_id}, has no outcome: it was lost")
        elif watched[task_id]["request_id"] != request_id:
            broken.append(f"task {task_id} was acknowledged for {request_id}, and ended as {watched[task_id]}")
    broken += [f"request {r} was submitted and never acknowledged" for r in payloads.keys() - ids.keys()]


def _executed(by_what: dict[str, list[Record]], payloads: dict[str, str], broken: list[str]) -> None:
    """Every result is right, and is of an execution that took place: by that worker, as that attempt, by that lease.

    A report that came too late would show as a result of another attempt, or of another worker, than the master granted
    last; one that was taken twice would show as a second outcome.
    """
    names = {r["pid"]: r["name"] for r in by_what["worker"]}
    executions = {(r["task_id"], r["attempt"], r["pid"]): r for r in by_what["execution"]}
    for r in by_what["outcome"]:
        task_id, payload = r["task_id"], payloads.get(r["request_id"])
        if payload is None:
            broken.append(f"task {task_id} ended, but nobody submitted {r['request_id']}")
            continue
        if r["state"] != "SUCCEEDED":
            broken.append(f"task {task_id} ended {r['state']}, though nothing is wrong with it: {r.get('error')}")
            continue
        value, attempt, pid = r["result"].rsplit(":", 2)
        if value != payload[::-1]:
            broken.append(f"task {task_id} of {payload} has the wrong result {value}")
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


def _mapped(
    by_what: dict[str, list[Record]], payloads: dict[str, str], watched: dict[int, Record], broken: list[str]
) -> None:
    """The client's own call gave each input one outcome. It may be another execution's than the one that stayed, but
    only if the master was killed after it was given, and before it was safe.
    """
    kills = [r["at_s"] for r in by_what["kill"] if r["target"] == "master"]
    given: set[str] = set()
    for r in by_what["outcome"]:
        if r["by"] != "map":
            continue
        if r["request_id"] in given:
            broken.append(f"request {r['request_id']} was answered twice by one map")
        given.add(r["request_id"])
        stayed = watched.get(r["task_id"])
        if stayed is not None and stayed["result"] != r["result"] and not any(k >= r["at_s"] - 1.0 for k in kills):
            broken.append(f"task {r['task_id']}: {r['result']} was given, {stayed['result']} stayed, no master died")
    asked = {r["request_id"] for r in by_what["submit"] if r.get("by") == "map"}
    broken += [f"request {r} was never answered by its map" for r in asked - given]

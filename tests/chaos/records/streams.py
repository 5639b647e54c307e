"""The part of the checker that reads streams: watches and their cursors, partial outputs, and cancellations.

Further records:

- watching       by, life, cursor            a watch begins, or continues from this cursor
- cursor         by, cursor                  the watch has recorded all outcomes up to this cursor
- partial        life, request_id, index, data
                                             the next partial output of a task, as its stream delivered it
- streamed       life, request_id, parts     that stream has ended with success, after this many partial outputs
- cancel         request_id                  a client is about to cancel a task
- cancel answer  answer ("cancelled", "settled", "unknown"), request_id, task_id
"""

import hashlib
from collections import defaultdict

from tests.chaos.records.book import Book, Record


def check(book: Book) -> None:
    """Checks the records of streams."""
    _replayed(book)
    _partials(book)
    _cancelled(book)


def _replayed(book: Book) -> None:
    """A watch that begins at the oldest outcome after the run (the replay) sees the same outcomes, in the same order,
    as the watch during the run. So the latter had no gap where it was interrupted.
    """
    watched = [r for r in book["outcome"] if r["by"] == "watch"]
    replayed = [r for r in book["outcome"] if r["by"] == "replay"]
    if not any(r["by"] == "replay" for r in book["watching"]):
        book.broken.append("nobody read the outcomes again when all was over")
        return
    for position, (seen, again) in enumerate(zip(watched, replayed, strict=False)):
        for what in ("task_id", "state", "result", "partials"):
            if seen[what] != again[what]:
                book.broken.append(
                    f"outcome {position} of the watch is task {seen['task_id']} with {what} {seen[what]}, and of a "
                    f"later reading task {again['task_id']} with {again[what]}"
                )
                return
    if len(watched) != len(replayed):
        book.broken.append(f"the watch saw {len(watched)} outcomes, a later reading {len(replayed)}")


def _partials(book: Book) -> None:
    """In each life of a client, partial outputs come in order, without gap or repetition, and equal the outcome's."""
    streams: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for r in book["partial"]:
        streams[r["life"], r["request_id"]].append(r)
    ended = {(r["life"], r["request_id"]): r["parts"] for r in book["streamed"]}
    outcomes = {r["request_id"]: r for r in book.watched.values()}
    for (life, request_id), parts in streams.items():
        data = [r["data"] for r in parts]
        where = f"the stream of {request_id} in life {life}"
        if not _in_order(data, book.digests.get(request_id, "")):
            book.broken.append(f"{where} gave {data}: that has a gap, a repetition, or another's data")
        outcome = outcomes.get(request_id)
        if outcome is not None and data != outcome["partials"][: len(data)]:
            book.broken.append(f"{where} gave {data}, its outcome has {outcome['partials']}")
    for (life, request_id), count in ended.items():
        outcome = outcomes.get(request_id)
        if outcome is not None and (len(outcome["partials"]), len(streams[life, request_id])) != (count, count):
            book.broken.append(f"the stream of {request_id} ended after {count} parts; its outcome has another number")
    asked = {r for r, way in book.ways.items() if way == "stream"}
    book.broken += [
        f"the stream of {r} never came to its end" for r in sorted(asked - {request_id for _, request_id in ended})
    ]
    ended_s = {r["request_id"]: r["at_s"] for r in book["streamed"]}
    for request_id in asked:
        if request_id not in outcomes:
            if request_id in ended_s and book.unsafe(ended_s[request_id]):
                continue  # the end of the stream was delivered before the outcome was on disk
            book.broken.append(f"request {request_id}, of a stream that ended, has no outcome: it was lost")
        elif not _in_order(outcomes[request_id]["partials"], book.digests[request_id]):
            book.broken.append(f"the outcome of {request_id} has partial outputs {outcomes[request_id]['partials']}")


def _in_order(data: list[str], digest: str) -> bool:
    """Whether these are the outputs 0, 1, 2 … of the task with that payload, which are "<payload>/<index>"."""
    for index, part in enumerate(data):
        payload, _, number = part.rpartition("/")
        if number != str(index) or hashlib.sha1(payload.encode()).hexdigest() != digest:
            return False
    return True


def _cancelled(book: Book) -> None:
    """A task that was cancelled before it ended stays cancelled, whichever process dies."""
    for r in book["cancel answer"]:
        outcome = book.watched.get(r["task_id"])
        if r["answer"] == "unknown":
            book.broken.append(f"task {r['task_id']} was acknowledged, and unknown when it was to be cancelled")
        elif outcome is None:
            continue  # checker.py counts it as lost
        elif r["answer"] == "cancelled" and outcome["state"] != "CANCELLED":
            book.broken.append(f"task {r['task_id']} was cancelled, and ended {outcome['state']}")
    answered = {r["request_id"] for r in book["cancel answer"]}
    asked = {r["request_id"] for r in book["cancel"]}
    book.broken += [f"the withdrawal of {r} was never answered" for r in sorted(asked - answered)]

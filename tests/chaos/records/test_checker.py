"""The checker finds each kind of damage in an otherwise correct history."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.records.checker import check

Records = list[dict[str, Any]]

SUBMITTED, MAPPED, STREAMED, WITHDRAWN, LENT, EPHEMERAL, RUN = 1, 2, 3, 4, 5, 6, 7
WAYS = {
    SUBMITTED: "submit", MAPPED: "map", STREAMED: "stream", WITHDRAWN: "cancel", LENT: "lend", EPHEMERAL: "ephemeral",
    RUN: "run",
}  # fmt: skip


def digest_of(task_id: int) -> str:
    return hashlib.sha1(f"payload {task_id}".encode()).hexdigest()


def result_of(task_id: int, attempt: int = 1, pid: int = 100) -> str:
    return f"{digest_of(task_id)}:{attempt}:{pid}"


def sound() -> Records:
    """A task for each way of a client, all but the withdrawn one run once; the master was never killed."""
    records: Records = [
        {"what": "worker", "name": "w0", "pid": 10},
        {"what": "worker", "name": "w1", "pid": 11},
        {"what": "watching", "by": "watch", "life": 1, "cursor": ""},
    ]
    outcomes: Records = []
    for task_id, by in WAYS.items():
        name, digest = f"r{task_id}", digest_of(task_id)
        parts = [f"payload {task_id}/{i}" for i in range(3)] if by == "stream" else []
        end = {
            "task_id": task_id, "request_id": name, "state": "SUCCEEDED", "result": result_of(task_id), "attempts": 1,
            "worker_id": "w0", "partials": parts, "life": 1,
        }  # fmt: skip
        records.append({"what": "submit", "by": by, "life": 1, "request_id": name, "digest": digest})
        if by != "stream":
            records.append({"what": "ack", "by": by, "request_id": name, "task_id": task_id})
        if by == "cancel":
            end |= {"state": "CANCELLED", "result": "", "worker_id": "", "attempts": 0}
            records.append({"what": "cancel", "request_id": name})
            records.append({"what": "cancel answer", "answer": "cancelled", "request_id": name, "task_id": task_id})
        else:
            run = {"task_id": task_id, "attempt": 1, "pid": 100, "parent_pid": 10, "digest": digest}
            records.append({"what": "execution", **run})
        for index, data in enumerate(parts):
            records.append({"what": "partial", "life": 1, "request_id": name, "index": index, "data": data})
        if by == "stream":
            records.append({"what": "streamed", "life": 1, "request_id": name, "parts": len(parts)})
        if by in ("run", "map", "ephemeral", "lend"):
            records.append({"what": "outcome", "by": by, **end})
        if by not in ("ephemeral", "lend"):
            outcomes.append({"what": "outcome", **end})
            records.append({"what": "outcome", "by": "watch", **end})
            records.append({"what": "got", "task_id": task_id, "result": end["result"]})
    records.append({"what": "watching", "by": "replay", "life": 1, "cursor": ""})
    records += [{**outcome, "by": "replay"} for outcome in outcomes]
    records.append({"what": "zero", "queued": 0, "leased": 0})
    for at_s, record in enumerate(records):
        record["at_s"] = float(at_s)
    return records


def find(records: Records, what: str, **fields: Any) -> dict[str, Any]:
    return next(r for r in records if r["what"] == what and all(r.get(k) == v for k, v in fields.items()))


def remove(what: str, **fields: Any) -> Callable[[Records], None]:
    return lambda records: records.remove(find(records, what, **fields))


def repeat(what: str, **fields: Any) -> Callable[[Records], None]:
    return lambda records: records.append(dict(find(records, what, **fields)))


def change(what: str, new: dict[str, Any], **fields: Any) -> Callable[[Records], None]:
    return lambda records: find(records, what, **fields).update(new)


def add(**record: Any) -> Callable[[Records], None]:
    return lambda records: records.append({"at_s": 99.0, **record})


def test_a_sound_history_is_found_sound() -> None:
    findings = check(sound())
    assert not findings.broken
    assert findings.figures["lost"] == findings.figures["delivered twice"] == 0
    assert (findings.figures["outcomes"], findings.figures["executions"]) == (5, 6)


WATCH: dict[str, Any] = {"by": "watch", "task_id": SUBMITTED}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("outcome", **WATCH), "it was lost"),
        (repeat("outcome", **WATCH), "delivered twice"),
        (repeat("outcome", by="map", task_id=MAPPED), "answered twice"),
        (remove("outcome", by="map", task_id=MAPPED), "never answered"),
        (remove("ack", task_id=SUBMITTED), "never acknowledged"),
        (add(what="ack", request_id="r1", task_id=2), "and then as 2"),
        (add(what="ack", request_id="other", task_id=2), "nobody submitted it"),
        (add(what="submit", by="submit", life=2, request_id="r1", digest="d"), "two payloads"),
        (change("outcome", {"result": "wrong:1:100"}, **WATCH), "wrong result"),
        (change("outcome", {"attempts": 2}, **WATCH), "while 2 was granted"),
        (change("outcome", {"worker_id": "w1"}, **WATCH), "credited to 'w1'"),
        (change("outcome", {"state": "DEAD_LETTERED"}, **WATCH), "ended DEAD_LETTERED"),
        (change("outcome", {"state": "CANCELLED", "result": ""}, **WATCH), "ended CANCELLED"),
        (change("outcome", {"request_id": "r2"}, **WATCH), "became two tasks"),
        (change("outcome", {"result": result_of(1, pid=101)}, **WATCH), "never ran it"),
        (remove("execution", task_id=SUBMITTED), "never ran it"),
        (change("got", {"result": result_of(1, pid=101)}, task_id=SUBMITTED), "is now"),
        (change("zero", {"queued": 1}), "did not reach zero"),
        (remove("zero"), "it was not checked"),
        (add(what="fault", line="master.log: Traceback"), "a daemon's fault"),
        (add(what="rejection", code="INTERNAL", message="fault"), "rejected: INTERNAL fault"),
        # What is in memory only.
        (change("outcome", {"by": "watch"}, by="ephemeral"), "was on the disk"),
        (remove("outcome", by="ephemeral"), "r6 was never answered"),
        (repeat("outcome", by="ephemeral"), "answered twice"),
        (change("outcome", {"what": "gone"}, by="lend"), "no master died since"),
        (add(what="ack", by="ephemeral", request_id="r6", task_id=60), "and then as 60"),
        (repeat("outcome", by="run"), "answered twice"),
        (remove("outcome", by="run"), "r7 was never answered"),
        # Watches.
        (remove("watching", by="replay"), "nobody read the outcomes again"),
        (remove("outcome", by="replay", task_id=MAPPED), "of a later reading task 3"),
        (remove("outcome", by="replay", task_id=RUN), "a later reading 4"),
        (change("outcome", {"result": "other"}, by="replay", task_id=MAPPED), "later reading task 2 with other"),
        # Partial outputs.
        (remove("partial", index=1), "a gap, a repetition"),
        (repeat("partial", index=2), "a gap, a repetition"),
        (change("partial", {"data": "payload 1/1"}, index=1), "another's data"),
        (remove("partial", index=2), "its outcome has another number"),
        (change("outcome", {"partials": []}, by="watch", task_id=STREAMED), "its outcome has []"),
        (remove("streamed"), "never came to its end"),
        # Cancellations.
        (change("outcome", {"state": "SUCCEEDED", "result": result_of(4)}, by="watch", task_id=4), "was cancelled"),
        (change("cancel answer", {"answer": "unknown"}), "unknown when it was to be cancelled"),
        (remove("cancel answer"), "never answered"),
    ],
)  # fmt: skip
def test_damage_is_found(damage: Callable[[Records], None], words: str) -> None:
    records = sound()
    damage(records)
    broken = check(records).broken
    assert any(words in line for line in broken), broken


def test_another_execution_may_stay_only_if_the_master_was_killed_just_then() -> None:
    twin = {"what": "execution", "task_id": 2, "attempt": 1, "pid": 101, "parent_pid": 11, "digest": digest_of(2)}
    given_s = find(sound(), "outcome", by="map", task_id=2)["at_s"]
    pause = {"at_s": given_s, "what": "pause", "target": "master", "pid": 1, "duration_s": 2.0}
    cut = {"at_s": given_s, "what": "network", "place": "clients", "how": "cut", "duration_s": 1.5}
    for after_s, standstills, sound_now in (
        (2.0, [], True),
        (3.0, [], False),
        (3.0, [pause], True),
        (3.5, [pause, cut], True),
        (4.5, [pause, cut], False),
        (3.0, [pause | {"target": "agent"}], False),
        (3.0, [cut | {"place": "w1"}], False),
    ):
        kill = {"at_s": given_s + after_s, "what": "kill", "target": "master", "pid": 1}
        records = [*sound(), *standstills, {"at_s": 97.0, **twin}, kill]
        for by in ("watch", "replay"):
            find(records, "outcome", by=by, task_id=2).update(result=result_of(2, pid=101), worker_id="w1")
        find(records, "got", task_id=2).update(result=result_of(2, pid=101))
        assert (not check(records).broken) is sound_now


def test_an_outcome_is_on_the_disk_a_moment_after_it_was_given() -> None:
    """A client that was given one, died, and asks again: the task may run again if the master died just then, too."""
    for by_its_outcome, kill_s, sound_now in ((True, 2.0, True), (True, 60.0, False), (False, 2.0, False)):
        records = sound()
        first = find(records, "ack", by="run")
        gone = {**first, "task_id": 77, "settled": by_its_outcome}
        death = {"at_s": first["at_s"] + kill_s, "what": "kill", "target": "master", "pid": 1}
        broken = check([*records[: records.index(first)], gone, *records[records.index(first) :], death]).broken
        assert (not broken) is sound_now, broken


def test_a_delivered_outcome_may_go_with_its_master_and_is_counted() -> None:
    """The end of a stream, or of a call that sends no acceptance, was the only acknowledgement of its task."""
    for by, task_id, delivered in (("stream", STREAMED, "streamed"), ("map", MAPPED, "ack")):
        for kill_s, sound_now in ((1.0, True), (60.0, False)):
            records = sound()
            if by == "map":
                find(records, "ack", by=by)["settled"] = True
            at_s = find(records, delivered, request_id=f"r{task_id}")["at_s"]
            records = [
                r for r in records
                if not (r.get("task_id") == task_id and (r["what"] == "got" or r.get("by") in ("watch", "replay")))
            ]  # fmt: skip
            findings = check([*records, {"at_s": at_s + kill_s, "what": "kill", "target": "master", "pid": 1}])
            assert (not findings.broken) is sound_now, findings.broken
            assert findings.figures["outcomes lost with their master"] == 1


def test_a_client_that_began_again_may_be_answered_again() -> None:
    records = sound()
    again = dict(find(records, "outcome", by="map", task_id=2), life=2)
    assert not check([*records, again]).broken


def test_an_ephemeral_task_may_go_with_its_master() -> None:
    records = sound()
    lent = find(records, "outcome", by="lend")
    lent["what"] = "gone"
    death = {"at_s": lent["at_s"] - 0.5, "what": "failpoint", "process": "master", "name": "commit", "pid": 1}
    assert not check([*records, death]).broken

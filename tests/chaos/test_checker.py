"""The checker is only worth what it can find: a sound history, damaged in every way that matters, one at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.checker import check

Records = list[dict[str, Any]]


def sound() -> Records:
    """Two tasks, one by Submit and one by map, each run once; the master was never killed."""
    records: Records = [{"what": "worker", "name": "w0", "pid": 10}, {"what": "worker", "name": "w1", "pid": 11}]
    for task_id, by in ((1, "submit"), (2, "map")):
        name, payload = f"r{task_id}", f"payload {task_id}"
        result = f"{payload[::-1]}:1:100"
        end = {"task_id": task_id, "request_id": name, "state": "SUCCEEDED", "result": result, "attempts": 1}
        records += [
            {"what": "submit", "by": by, "request_id": name, "payload": payload},
            {"what": "ack", "request_id": name, "task_id": task_id},
            {"what": "execution", "task_id": task_id, "attempt": 1, "pid": 100, "parent_pid": 10, "payload": payload},
            {"what": "outcome", "by": "watch", "worker_id": "w0", **end},
            {"what": "got", "task_id": task_id, "result": result},
        ]
        if by == "map":
            records.append({"what": "outcome", "by": "map", "worker_id": "w0", **end})
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


RIGHT = "1 daolyap"


def test_a_sound_history_is_found_sound() -> None:
    findings = check(sound())
    assert not findings.broken
    assert findings.figures["outcomes"] == findings.figures["executions"] == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("outcome", by="watch", task_id=1), "it was lost"),
        (repeat("outcome", by="watch", task_id=1), "delivered twice"),
        (repeat("outcome", by="map", task_id=2), "answered twice"),
        (remove("outcome", by="map", task_id=2), "never answered"),
        (remove("ack", task_id=1), "never acknowledged"),
        (add(what="ack", request_id="r1", task_id=2), "and then as 2"),
        (add(what="ack", request_id="other", task_id=2), "nobody submitted it"),
        (change("outcome", {"result": "wrong:1:100"}, by="watch", task_id=1), "wrong result"),
        (change("outcome", {"attempts": 2}, by="watch", task_id=1), "while 2 was granted"),
        (change("outcome", {"worker_id": "w1"}, by="watch", task_id=1), "credited to 'w1'"),
        (change("outcome", {"state": "DEAD_LETTERED"}, by="watch", task_id=1), "ended DEAD_LETTERED"),
        (change("outcome", {"request_id": "r2"}, by="watch", task_id=1), "became two tasks"),
        (change("outcome", {"result": f"{RIGHT}:1:101"}, by="watch", task_id=1), "never ran it"),
        (remove("execution", task_id=1), "never ran it"),
        (change("got", {"result": f"{RIGHT}:1:101"}, task_id=1), "is now"),
        (change("zero", {"queued": 1}), "did not reach zero"),
        (remove("zero"), "nobody looked"),
        (add(what="fault", line="master.log: Traceback"), "a daemon's fault"),
        (add(what="refusal", code="INTERNAL", message="fault"), "refused: INTERNAL fault"),
    ],
)
def test_damage_is_found(damage: Callable[[Records], None], words: str) -> None:
    records = sound()
    damage(records)
    broken = check(records).broken
    assert any(words in line for line in broken), broken


def test_another_execution_may_stay_only_if_the_master_was_killed_after_the_first_was_given() -> None:
    twin = {"what": "execution", "task_id": 2, "attempt": 1, "pid": 101, "parent_pid": 11, "payload": "payload 2"}
    for kill_s, sound_now in ((98.0, True), (0.0, False)):
        records = [*sound(), {"at_s": 97.0, **twin}, {"at_s": kill_s, "what": "kill", "target": "master", "pid": 1}]
        find(records, "outcome", by="watch", task_id=2).update(result="2 daolyap:1:101", worker_id="w1")
        find(records, "got", task_id=2).update(result="2 daolyap:1:101")
        assert (not check(records).broken) is sound_now

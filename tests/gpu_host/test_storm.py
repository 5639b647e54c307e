"""Random faults of all GPUs of a host at once: no task is lost or charged, and all GPUs recover.

STORM_SECONDS and STORM_SEED in the environment change its length and its faults. The delay before a check doubles with
every fault, and with it the duration of this test.
"""

import os
import random
import time
from pathlib import Path

import pytest
from multigpu.v1 import device_pb2, task_pb2

from tests.fleet import until
from tests.gpu_host.host import Host

RECOVERING = device_pb2.HEALTH_STATE_RECOVERING
SEED = int(os.environ.get("STORM_SEED", "1"))
SECONDS = float(os.environ.get("STORM_SECONDS", "1"))
# Hardware errors: they must cost no task an attempt.
XIDS = (48, 63, 74, 79, 94, 95, 119)
RESET_XIDS = (48, 74, 79, 95, 119)
# What the driver says until a reset. Its end is the sign of the reset.
SEEN = {"reset_required", "gpu_is_lost"}


def strike(host: Host, chance: random.Random, needing: dict[int, None], unclear: set[int]) -> str:
    """Inflict a random fault. `needing`: GPUs that need a reset and have shown no sign of one. `unclear`: those that
    showed one, or that a worker did not watch, as it closes NVML while its GPU is unusable.
    """
    gpus, i = host.gpus, chance.randrange(len(host.gpus))
    what = chance.choice(("xid", "xid", "lose", "return", "return", "hang", "answer", "ecc", "action", "heat"))
    if what == "xid":
        code = chance.choice(XIDS)
        gpus.xid(i, code)
        if code in RESET_XIDS and i not in unclear:
            needing[i] = None
        return f"{what} {code} of GPU {i}"
    if what == "lose":
        gpus.lose(i, chance.choice((79, None)))
        needing.pop(i, None)  # its return counts as a reset
        unclear.add(i)
    elif what == "return":
        gpus.return_(i, reset=bool(gpus.gpu(i).lost) and chance.random() < 0.5)
    elif what == "hang":
        gpus.hang(i)
    elif what == "answer":
        gpus.answer_(i)
    elif what == "ecc":
        gpus.ecc(i, uncorrected=1)
        if i not in unclear:
            needing[i] = None
    elif what == "action":
        gpus.recovery_action(i, chance.randrange(1, 8))
        needing.pop(i, None)
        unclear.add(i)
    elif what == "heat":
        gpus.heat(i, 95)
        gpus.throttle(i, chance.choice((0, 0x20, 0x40)))
    return f"{what} GPU {i}"


def wait_for_checks(host: Host, needing: dict[int, None]) -> None:
    """Wait until each of these GPUs was checked again. Lost ones and those with a recovery action are not checked."""
    checked = [i for i in needing if not (host.gpus.gpu(i).lost or host.gpus.gpu(i).recovery_action)]
    before = {i: host.fleet.workers[f"gpu{i}"].log().count('"RECOVERING"') for i in checked}
    for i in checked:
        until(
            lambda i=i: host.fleet.workers[f"gpu{i}"].log().count('"RECOVERING"') > before[i],  # type: ignore[misc]
            what=f"a check of gpu{i}",
        )
    until(lambda: all(w.health.state != RECOVERING for w in host.workers().values()), what="the end of the checks")


@pytest.mark.slow
def test_a_storm_costs_no_task_anything(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with Host(tmp_path, 3, "--canary-interval-s", "1") as host:
        task_ids: list[int] = []
        needing: dict[int, None] = {}
        unclear = set[int]()
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            print(time.time(), strike(host, chance, needing, unclear), flush=True)
            task_ids += host.submit("gpu.work", 4, seconds="0.1", attempts_max=1)
            time.sleep(chance.uniform(0, 0.3))
        for i in range(len(host.gpus)):
            host.gpus.answer_(i)
        names = {f"gpu{i}" for i in needing}
        print(f"without a reset: {sorted(names)}")
        until(lambda: names <= set(host.quarantined()), what="the quarantine of those that need a reset")
        wait_for_checks(host, needing)
        assert names <= set(host.quarantined()), "checks are passed only after a reset"
        for i in (i for i in needing if not host.gpus.gpu(i).lost):  # a worker does not start on a lost GPU
            host.fleet.workers[f"gpu{i}"].kill()
            host.start_worker(i)
        host.fleet.wait_for_workers()
        wait_for_checks(host, needing)
        assert names <= set(host.quarantined()), "a new process of the worker is no reset"
        for i in range(len(host.gpus)):
            host.gpus.recovery_action(i, 1)
        until(
            lambda: all(SEEN & set(host.codes(name)) for name in host.names),
            what="the driver's recovery action, or the loss, of each GPU",
        )
        for i in range(len(host.gpus)):
            host.gpus.return_(i, reset=True)
        until(lambda: not host.quarantined() and all(host.engines().values()), 300, "the recovery of all GPUs")
        print(f"{time.monotonic() - end_s:.1f} s after the storm all GPUs are back")
        outcomes = host.outcomes(task_ids, 120)
        wrong = [o for o in outcomes if (o.state, o.attempts) != (task_pb2.OUTCOME_STATE_SUCCEEDED, 1)]
        assert not wrong, wrong
        assert not host.fleet.faults()

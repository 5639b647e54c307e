"""Whatever befalls the GPUs of a host at once: no task is lost, none is charged, and all GPUs come back.

STORM_SECONDS and STORM_SEED in the environment make a longer one, or another. What a GPU waits before it is checked
again doubles with every blow, and so does this test's time with its length.
"""

import os
import random
import time
from pathlib import Path

from multigpu.v1 import task_pb2

from tests.fleet import until
from tests.gpu_host.host import Host

SEED = int(os.environ.get("STORM_SEED", "1"))
SECONDS = float(os.environ.get("STORM_SECONDS", "1"))
# What the driver tells of the hardware: it must cost no task an attempt.
XIDS = (48, 63, 74, 79, 94, 95, 119)
RESET_XIDS = (48, 74, 79, 95, 119)
LOOK_S = 5.0


def strike(host: Host, chance: random.Random, needing: dict[int, None]) -> str:
    """Something befalls one of the GPUs. `needing`: those that need a reset and show no sign that they had one."""
    gpus, i = host.gpus, chance.randrange(len(host.gpus))
    what = chance.choice(("xid", "xid", "lose", "return", "return", "hang", "answer", "ecc", "action", "heat"))
    if what == "xid":
        code = chance.choice(XIDS)
        gpus.xid(i, code)
        if code in RESET_XIDS:
            needing[i] = None
        return f"{what} {code} of GPU {i}"
    if what == "lose":
        gpus.lose(i, chance.choice((79, None)))
        needing.pop(i, None)  # its return is the sign
    elif what == "return":
        gpus.return_(i, reset=bool(gpus.gpu(i).lost) and chance.random() < 0.5)
        needing.pop(i, None)
    elif what == "hang":
        gpus.hang(i)
    elif what == "answer":
        gpus.answer_(i)
    elif what == "ecc":
        gpus.ecc(i, uncorrected=1)
    elif what == "action":
        gpus.recovery_action(i, chance.randrange(1, 8))
        needing.pop(i, None)
    elif what == "heat":
        gpus.heat(i, 95)
        gpus.throttle(i, chance.choice((0, 0x20, 0x40)))
    return f"{what} GPU {i}"


def test_a_storm_costs_no_task_anything(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with Host(tmp_path, 3, "--canary-interval-s", "1") as host:
        task_ids: list[int] = []
        needing: dict[int, None] = {}
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            print(time.time(), strike(host, chance, needing), flush=True)
            task_ids += host.submit("gpu.work", 4, seconds="0.1", attempts_max=1)
            time.sleep(chance.uniform(0, 0.3))
        for i in range(len(host.gpus)):
            host.gpus.answer_(i)
        names = {f"gpu{i}" for i in needing}
        print(f"without a reset: {sorted(names)}")
        until(lambda: names <= set(host.quarantined()), what="those that need a reset")
        time.sleep(LOOK_S)
        assert names <= set(host.quarantined()), "checks are passed only after a reset"
        killed = [i for i in needing if not host.gpus.gpu(i).lost]  # a worker does not start on a lost GPU
        for i in killed:
            host.fleet.workers[f"gpu{i}"].kill()
            host.start_worker(i)
        host.fleet.wait_for_workers()
        time.sleep(LOOK_S)
        assert names <= set(host.quarantined()), "a new process of the worker is no reset"
        for i in range(len(host.gpus)):
            host.gpus.return_(i, reset=True)
        until(lambda: not host.quarantined() and all(host.engines().values()), 300, "the return of all GPUs")
        print(f"{time.monotonic() - end_s:.1f} s after the storm all GPUs are back")
        outcomes = host.outcomes(task_ids, 120)
        wrong = [o for o in outcomes if (o.state, o.attempts) != (task_pb2.OUTCOME_STATE_SUCCEEDED, 1)]
        assert not wrong, wrong
        assert not host.fleet.faults()

"""The fleet's last hour, and the rates of queues."""

from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.telemetry.history import INTERVAL_S, POINTS, RATE_INTERVALS, History

from tests.core.stage import SPEC, Stage, lease_of, outcome_of

NIGHT = replace(SPEC, queue="night")


def settled(stage: Stage, history: History, spec: Spec, n: int) -> None:
    """Tasks that waited for 1 s, and ran for 2."""
    for task in stage.submit(n, spec):
        stage.report(lease_of(task), after_s=0)
        outcome = outcome_of(task)
        outcome.dispatch_s = outcome.start_s = task.submit_s + 1
        outcome.finish_s = task.submit_s + 3
        history.observe([task])


async def test_points_hold_what_happened_in_their_interval() -> None:
    stage = Stage()
    stage.worker()
    history = History(stage.core, lambda: stage.now)
    history.start()
    settled(stage, history, SPEC, 3)
    (left,) = stage.submit()
    stage.now += INTERVAL_S
    history.end_interval()
    stage.handle(ev.Cancel([left]))
    stage.now += INTERVAL_S
    history.end_interval()
    first, second = history.points
    assert (first.submitted, first.succeeded, first.unsuccessful, first.queued, first.leased) == (4, 3, 0, 0, 1)
    assert (first.queue_duration.seconds, first.run_duration.seconds) == (1, 2)
    assert (second.submitted, second.succeeded, second.unsuccessful, second.leased) == (0, 0, 1, 0)
    assert not second.HasField("run_duration")
    assert second.end_time.ToSeconds() - first.end_time.ToSeconds() == INTERVAL_S
    history.stop()


async def test_an_hour_is_kept_and_rates_are_of_the_last_minute() -> None:
    stage = Stage()
    stage.worker()
    history = History(stage.core, lambda: stage.now)
    history.start()
    for _ in range(POINTS + 5):
        settled(stage, history, NIGHT, 5)
        stage.now += INTERVAL_S
        history.end_interval()
    assert len(history.points) == POINTS
    night = stage.core.ledger.queues["night"]
    assert history.rates(night) == pytest.approx((0.5, 0.5))
    stage.submit(6, NIGHT)
    stage.now += INTERVAL_S
    history.end_interval()
    assert history.rates(night) == pytest.approx((25 / 60, 31 / 60))
    for _ in range(6):
        stage.now += INTERVAL_S
        history.end_interval()
    assert history.rates(night) == (0.0, 0.0)
    history.stop()


async def test_a_rate_begins_anew_when_its_queue_is_resumed() -> None:
    stage = Stage()
    stage.worker()
    history = History(stage.core, lambda: stage.now)
    history.start()
    settled(stage, history, NIGHT, 30)
    for _ in range(5):  # paused
        stage.now += INTERVAL_S
        history.end_interval()
    night = stage.core.ledger.queues["night"]
    history.restart_rates(night)
    stage.now += 2.0
    assert history.rates(night) == (0.0, 0.0)
    settled(stage, history, NIGHT, 4)
    assert history.rates(night) == pytest.approx((2.0, 2.0))
    stage.now += INTERVAL_S
    history.end_interval()
    assert history.rates(night) == pytest.approx((4 / 12, 4 / 12))
    for _ in range(6):
        stage.now += INTERVAL_S
        history.end_interval()
    assert history.rates(night) == (0.0, 0.0)
    history.stop()


async def test_a_queue_is_recent_for_a_minute_after_its_last_task() -> None:
    stage = Stage()
    stage.worker()
    history = History(stage.core, lambda: stage.now)
    history.start()
    settled(stage, history, NIGHT, 1)
    assert history.recent_queues() == {"night"}
    for _ in range(6):
        stage.now += INTERVAL_S
        history.end_interval()
    assert history.recent_queues() == {"night"}
    stage.now += INTERVAL_S
    history.end_interval()
    assert history.recent_queues() == set()
    history.stop()


async def test_a_queue_that_was_dropped_and_is_used_again_has_its_rate() -> None:
    stage = Stage()
    stage.worker()
    history = History(stage.core, lambda: stage.now)
    history.start()
    settled(stage, history, NIGHT, 100)
    for _ in range(7):
        stage.now += INTERVAL_S
        history.end_interval()
    stage.core.ledger.prune_queues()
    stage.now += INTERVAL_S
    history.end_interval()
    settled(stage, history, NIGHT, 60)
    stage.now += INTERVAL_S
    history.end_interval()
    assert history.rates(stage.core.ledger.queues["night"]) == (1.0, 1.0)
    assert history.recent_queues() == {"night"}
    history.stop()


async def test_workers_of_one_device_count_once() -> None:
    stage = Stage()
    for name in ("a", "b", "c"):
        device = "GPU-2" if name == "c" else "GPU-1"
        stage.join(WorkerInfo(worker_id=name, device_id=device, host="h", capabilities=(Capability(kind="run"),)))
        session = stage.core.fleet.workers[name].session
        stage.handle(ev.Heartbeat(session, [], 1 << 30, Telemetry(power_watts=100.0, utilization=0.5)))
    history = History(stage.core, lambda: stage.now)
    history.start()
    history.end_interval()
    (point,) = history.points
    assert (point.workers_active, point.power_watts, point.utilization) == (3, 200.0, 0.5)
    history.stop()


async def test_a_queue_that_was_gone_for_a_while_has_its_rate() -> None:
    stage = Stage()
    stage.worker()
    history = History(stage.core, lambda: stage.now)
    history.start()

    def end_interval() -> None:
        stage.now += INTERVAL_S
        history.end_interval()

    for _ in range(RATE_INTERVALS - 1):
        end_interval()
    settled(stage, history, NIGHT, 50)
    end_interval()
    queues = stage.core.ledger.queues
    night = queues.pop("night")
    end_interval()
    end_interval()
    queues["night"] = night
    settled(stage, history, NIGHT, 10)
    for _ in range(RATE_INTERVALS - 2):
        end_interval()
    assert history.rates(night)[0] == pytest.approx(10 / (RATE_INTERVALS * INTERVAL_S))

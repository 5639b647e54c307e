"""When a worker is given up for its silence, and when the silence may be the master's own."""

from multigpu_master.core import events as ev

from tests.core.stage import Stage


def test_a_master_that_is_away_between_two_looks_looks_again() -> None:
    stage = Stage()
    stage.worker()
    session = stage.sessions
    due_s = stage.core.next_timer_s()
    assert due_s is not None
    stage.handle(ev.Tick(), due_s - stage.now)  # the first look, in time: nothing heard so far
    stage.handle(ev.Tick(), 60.0)  # the second comes late, and what the worker said meanwhile is still unread
    assert session in stage.core.fleet.sessions
    stage.beat()
    stage.handle(ev.Tick(), 1.0)
    assert session in stage.core.fleet.sessions

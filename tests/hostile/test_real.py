"""A short siege of real daemons. The long one: `python -m tests.hostile`."""

from pathlib import Path

from multigpu.v1 import task_pb2

from tests.hostile.real_doors import besieged, mad_master


def test_real_daemons_stand_a_siege(tmp_path: Path) -> None:
    with besieged(tmp_path, seed=1) as siege:
        siege.batch(300)
        assert mad_master(siege.fleet, 40, seed=1) >= 40
        siege.well()


def test_an_engine_that_babbles_is_ended_and_told(tmp_path: Path) -> None:
    """A handler writes to its engine's socket: its task fails, in words, and the next one is served."""
    with besieged(tmp_path, seed=1) as siege:
        fleet = siege.fleet
        (task_id,) = fleet.submit("babble", b"hello agent, I am no frame\n" * 3, attempts_max=2)
        outcome = fleet.outcome(task_id, wait_s=30)
        assert outcome.state == task_pb2.OUTCOME_STATE_DEAD_LETTERED
        assert outcome.error.type == "EngineDied"
        (next_id,) = fleet.submit("echo", b"still there")
        assert fleet.outcome(next_id).result == b"still there"
        assert fleet.workers["w0"].events("the engine's words make no sense, so it is ended")

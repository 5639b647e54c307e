"""An engine of a real worker that writes to its own socket. The long runs: `python -m tests.hostile`."""

from pathlib import Path

from multigpu.v1 import task_pb2

from tests.fleet import Fleet

HANDLERS = Path(__file__).resolve().parent / "handlers"


def test_an_engine_that_writes_to_its_socket_is_ended(tmp_path: Path) -> None:
    """A handler writes to its engine's socket: its task fails with an explanation, and the next one succeeds."""
    with Fleet(tmp_path, workers=1, handlers=["babbling"], handlers_dir=HANDLERS) as fleet:
        (task_id,) = fleet.submit("babble", b"hello agent, I am no frame\n" * 3, attempts_max=2)
        outcome = fleet.outcome(task_id, wait_s=30)
        assert (outcome.state, outcome.error.type) == (task_pb2.OUTCOME_STATE_DEAD_LETTERED, "EngineDied")
        (next_id,) = fleet.submit("echo", b"still there")
        assert fleet.outcome(next_id).result == b"still there"
        assert fleet.workers["w0"].events("the engine sent a frame that makes no sense, so it is ended")

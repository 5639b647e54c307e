"""The simulator as a test: many small worlds, and what must occur in them."""

import random
import re
from typing import cast, get_args

import pytest
from multigpu_master.core import attempts
from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.spec import Spec
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.write_buffer import WriteBuffer

from tests.commands import run_module
from tests.sim import sim
from tests.sim.actors.engine import SimEngine
from tests.sim.faults import Faults
from tests.sim.invariants import attempts as sim_attempts
from tests.sim.journal import SimJournal, SimLoop
from tests.sim.run import silence_log
from tests.sim.sim import Simulation
from tests.sim.world import ViolationError, World

SEEDS = 500
SEEDS_ALL, SEEDS_GANGS = 5000, 1000
COVERAGE_SEEDS = 1500
BUSY = 891  # a seed with more tasks than its workers can soon run


def test_seeds_keep_every_promise() -> None:
    done = run_module("tests.sim", "--seeds", str(SEEDS))
    assert f"{SEEDS:,} seeds, 0 failed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(618913, id="a task that waits for the journal to begin ids waits for no window"),
        pytest.param(1100305, id="a dead letter goes with what replaces it"),
        pytest.param(1318047, id="a second client of a repaired request gets its new outcome"),
        pytest.param(14173, id="a class whose pin has moved is in one backlog"),
        pytest.param(223203429, id="the model of a full worker is gone: another loads it for fewer tasks"),
        pytest.param(1118619, id="a lease that one event revokes twice ended for the first reason"),
    ],
)
def test_a_seed_that_once_failed(seed: int) -> None:
    silence_log()
    Simulation(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "base"), [(SEEDS_ALL, 0), (SEEDS_GANGS, sim.ALL_GANGS)])
def test_random_seeds_keep_every_promise(seeds: int, base: int) -> None:
    """The output names each seed that fails; `python -m tests.sim --seed N --trace` repeats it."""
    first = base + random.SystemRandom().randrange(1_000_000, 1_000_000_000)
    done = run_module("tests.sim", "--seeds", str(seeds), "--first", str(first))
    assert f"{seeds:,} seeds, 0 failed" in done.stdout, done.stdout


def test_a_seed_reproduces_a_run() -> None:
    silence_log()
    first, second = Simulation(11, trace=True), Simulation(11, trace=True)
    assert first.run() == second.run()
    assert first.world.lines == second.world.lines
    assert len(first.world.lines) > 10


@pytest.mark.slow
def test_everything_that_can_occur_does() -> None:
    """Each kind of fault, event, command and outcome, and the consequences that some of them must have."""
    done = run_module("tests.sim", "--seeds", str(COVERAGE_SEEDS), "--coverage")
    assert done.returncode == 0, done.stdout
    counted = (re.fullmatch(r"(.+?) +([0-9,]+)", line) for line in done.stdout.splitlines())
    occurred = {found[1] for found in counted if found and found[2] != "0"}
    expected = [f"fault: {name}" for name in Faults.names]
    expected += [kind.__name__ for kind in (*get_args(ev.Event), *get_args(ev.Command))]
    expected += [f"outcome: {state.name}" for state in OutcomeState]
    expected += [
        "rejection: code 4",  # a deadline that has passed
        "rejection: code 8",  # something is full
        "rejection: code 9",  # nobody could ever run it
        "rejection: code 14",  # the journal has not begun new ids
        "fault: data lost",
        "fault: older copy",
        "cursor: accepted",
        "cursor: out of range",
        "journal: submits rejected",
        "outcome: sent again to a new client",
        "worker: taken over",
        "worker: went on from a checkpoint",
        "worker: yielded on after a resume",
        "worker: a task made its device sick",
        "core: adopted leases",
        "core: classes left for the next event",
        "core: requeued",
        "core: stale reports",
        "core: nothing dispatched for outcomes not written",
        "letter: requeued",
        "letter: discarded",
        "client: a failed task with another payload",
    ]
    missing = [what for what in expected if what not in occurred]
    assert not missing, f"never occurred in {COVERAGE_SEEDS} seeds: {missing}"


@pytest.mark.slow
def test_the_core_at_scale_settles_all() -> None:
    """The small form of `python -m benchmarks.load.core`, in a process that has the core's own limits."""
    done = run_module("benchmarks.load.core", "--workers-max", "10", "--tasks-max", "1000")
    assert done.returncode == 0, done.stdout
    assert "drained" in done.stdout


@pytest.mark.parametrize(
    ("seed", "most", "words"),
    [(40, 1 << 30, "made devices sick 6 times, and 5 is the most"), (177, -1, "is charged for devices that others")],
)
def test_a_task_that_makes_devices_sick_is_charged_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, seed: int, most: int, words: str
) -> None:
    """Without the rule, or with one that charges every task. The invariants of attempts follow the changed rule."""
    silence_log()
    Simulation(seed).run()
    for module in (attempts, sim_attempts):
        monkeypatch.setattr(module, "SICK_RETURNS_MAX", most)
    with pytest.raises(ViolationError, match=words):
        Simulation(seed).run()


def test_a_world_may_take_many_events_while_its_tasks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    silence_log()
    monkeypatch.setattr(sim, "EVENTS_MAX", 1000)
    assert Simulation(BUSY).run().events > 2 * sim.EVENTS_MAX


def test_a_world_in_which_no_task_ends_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    silence_log()
    monkeypatch.setattr(sim, "EVENTS_MAX", 1000)
    monkeypatch.setattr(SimEngine, "pump", lambda _engine: None)
    simulation = Simulation(BUSY)
    with pytest.raises(ViolationError, match="did not come to rest"):
        simulation.run()
    assert simulation.world.now < simulation.world.start + sim.REST_S


def test_a_client_that_joins_tasks_on_their_way_to_a_full_disk_gets_their_rejection() -> None:
    """The client submits, loses its stream and submits again while the first write waits for disk space."""
    silence_log()
    world = World(1)
    loop = SimLoop(world, lambda what: what())
    journal = SimJournal(world)
    gone: list[Task] = []

    def handle(event: ev.Event) -> None:
        if isinstance(event, ev.SubmitFailed):
            gone.extend(event.tasks)

    with loop.running():
        write_buffer = WriteBuffer(cast("SqliteJournal", journal), handle, lambda: None, pytest.fail)
    journal.open(lambda *commit: loop.call_soon_threadsafe(write_buffer.handle_commit, *commit))
    journal.disk_full = True
    task = Task(Spec(kind="sim", wire=b"spec"), "r1", b"payload", task_id=1)
    answered: list[list[Task]] = []
    write_buffer.defer([task])
    write_buffer.flush()
    write_buffer.append_submits([], lambda _error: answered.append(gone), (), urgent=False)
    world.after(3.0, lambda: setattr(journal, "disk_full", False))
    while world.now < world.start + 6.0 and world.step():
        pass
    assert answered == [[task]]

"""The simulated journal keeps the rules of the real one: both are given the same entries, on a disk that is full now
and then, and must hold the same rows and have answered each entry alike.

The real one writes to SQLite as it does in production. Only that its disk is full is simulated: its transactions then
fail where SQLite would say so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from multigpu_master.core.model import OutcomeState
from multigpu_master.errors import JournalError, JournalFullError
from multigpu_master.journal.protocol import Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import failures
from multigpu_master.journal.sqlite import journal as journal_sqlite
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.room import is_small_or_frees

from tests.sim.journal import SimJournal
from tests.sim.world import World
from tests.waiting import until

SEEDS = 6
PHASES = 40


class FillableJournal(SqliteJournal):
    """The real journal on a disk that can be made full."""

    disk_full = False

    def _commit(self, batch: Sequence[Entry], bytes_total: int) -> None:
        if self.disk_full and not all(map(is_small_or_frees, batch)):
            raise failures.full_error(self._path)
        super()._commit(batch, bytes_total)

    def _try_end_full(self) -> None:
        if not self.disk_full:
            super()._try_end_full()


class Both:
    """The two journals, and what each answered, by the number of the entry."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self.world = World(seed)
        self.sim = SimJournal(self.world)
        self.numbers: dict[int, int] = {}  # id of an entry -> its number
        self.entries: list[tuple[Entry, Entry]] = []
        self.answers: tuple[dict[int, bool], dict[int, bool]] = ({}, {})  # real, simulated: whether it was written
        self.open()

    def open(self) -> None:
        self.real = FillableJournal(self._path, size_max_bytes=1 << 30)
        list(self.real.open(self._callback(0)).tasks)
        self.sim.open(self._callback(1))

    def _callback(self, which: int) -> Callable[[Sequence[Entry], int, JournalError | None], None]:
        def answered(entries: Sequence[Entry], _cursor: int, error: JournalError | None) -> None:
            assert error is None or isinstance(error, JournalFullError)
            for entry in entries:
                number = self.numbers[id(entry)]
                assert number not in self.answers[which], "an entry is answered once"
                self.answers[which][number] = error is None

        return answered

    def append(self, entries: Iterable[Entry]) -> None:
        pairs = [(entry, deepcopy(entry)) for entry in entries]
        for pair in pairs:
            self.numbers[id(pair[0])] = self.numbers[id(pair[1])] = len(self.entries)
            self.entries.append(pair)
        self.real.append(*[real for real, _ in pairs])
        self.sim.append(*[sim for _, sim in pairs])

    def fill(self, *, full: bool) -> None:
        self.real.disk_full = self.sim.disk_full = full

    def settle_down(self) -> None:
        """Returns when both have written all that fits."""
        end_s = self.world.now + 3.0
        while self.world.now < end_s and self.world.step():
            pass
        until(
            lambda: (
                self.real._queue.empty()
                and self.real.writable != self.sim._full
                and self.answers[0].keys() == self.answers[1].keys()
            )
        )

    def compare(self) -> None:
        assert self.answers[0] == self.answers[1]
        for mine, its in self.entries:
            assert mine == its, "the same is left of an entry"
        sim, real = self.sim, self.real
        assert list(real.recover_tasks()) == sorted(sim.tasks.values(), key=lambda r: r.task_id)
        outcomes = [(o.task_id, o.request_id, o.state, o.body) for o in real.read_outcomes(0, 1 << 20, 1 << 30)]
        assert outcomes == [(o.task_id, o.request_id, int(o.state), o.body) for o in sim.outcomes]
        letters = [o.task_id for o in real.list_dead_letters(queue="", before_task_id=1 << 62, limit=1 << 20)]
        assert letters == sorted(sim.dead, reverse=True)
        assert {r.task_id: r for r in real.get_dead_letters(letters)} == sim.dead
        assert {k: v for k, v in real.settings().items() if k.startswith("s")} == sim.settings
        request_ids = [f"r{n}" for n in range(40)]
        found = {k: o.task_id for k, o in real.find_requests(request_ids).items()}
        assert found == {k: r.task_id for k, r in sim.find_requests(request_ids).items()}

    def reopen(self) -> None:
        self.real.close(20.0)
        self.open()


class Story:
    """Entries as a master might append them, by chance. `open` are the tasks that it believes to be its own."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._ids = 0
        self.open: dict[int, SubmitRecord] = {}
        self.letters: dict[int, SubmitRecord] = {}  # that the master could read
        self.letters_sent: dict[int, SubmitRecord] = {}

    def entries(self) -> Iterator[Entry]:
        for _ in range(self._random.randint(1, 6)):
            yield self._entry()

    def _entry(self) -> Entry:
        random = self._random
        match random.choice(("submit", "submit", "settle", "settle", "settle", "requeue", "discard", "setting")):
            case "settle" if self.open:
                ended = random.sample(list(self.open), min(len(self.open), random.randint(1, 4)))
                return Entry(settles=[self._settle(self.open.pop(i)) for i in ended])
            case "requeue" if self.letters:
                record = self.letters.pop(random.choice(list(self.letters)))
                if random.random() < 0.3:  # it has ended before it is written
                    return Entry(settles=[self._settle(record)], deleted_dead_letters=(record.task_id,))
                self.open[record.task_id] = record
                return Entry(submits=[record], deleted_dead_letters=(record.task_id,))
            case "discard" if self.letters or self.letters_sent:
                # One that is not written yet gives way to another task with its request_id.
                found = random.choice([each for each in (self.letters, self.letters_sent) if each])
                return Entry(deleted_dead_letters=(found.popitem()[0],))
            case "setting":
                value = random.choice((None, b"1", b"2"))
                return Entry(settings={random.choice(("s1", "s2")): value})
            case _:
                return Entry(submits=[self._submit(f"r{random.randrange(40)}") for _ in range(random.randint(1, 5))])

    def _submit(self, request_id: str) -> SubmitRecord:
        self._ids += 1
        record = SubmitRecord(self._ids, request_id, b"spec", b"%d" % self._ids, "", 1, 1000.0 + self._ids)
        self.open[self._ids] = record
        return record

    def _settle(self, r: SubmitRecord) -> SettleRecord:
        state = self._random.choice(
            (OutcomeState.SUCCEEDED, OutcomeState.FAILED, OutcomeState.CANCELLED, OutcomeState.DEAD_LETTERED)
        )
        dead = r if state is OutcomeState.DEAD_LETTERED else None
        if dead is not None:
            self.letters_sent[r.task_id] = r
        return SettleRecord(
            r.task_id, r.request_id, int(state), "default", "sim", "", "w0", r.submit_time_s, 2000.0, 1e12,
            b"outcome of %d" % r.task_id, dead,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_simulated_journal_is_a_model_of_the_real_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 0.01)
    monkeypatch.setattr(journal_sqlite, "SWEEP_AFTER_S", 1e6)
    random = Random(seed)
    both, story = Both(tmp_path / "data", seed), Story(random)
    try:
        for _ in range(PHASES):
            full = random.random() < 0.3
            both.fill(full=full)
            for _ in range(random.randint(1, 3)):
                both.append(story.entries())
                if random.random() < 0.5:
                    both.settle_down()
            both.settle_down()
            if full:
                both.fill(full=False)
                both.settle_down()
            both.compare()
            story.letters |= story.letters_sent
            story.letters_sent.clear()
            for number, (entry, _) in enumerate(both.entries):
                if not both.answers[0][number]:
                    for record in entry.submits:
                        story.open.pop(record.task_id, None)
            if random.random() < 0.1:
                both.reopen()
        assert len(both.answers[0]) == len(both.entries)
        assert not all(both.answers[0].values()), "some submits were rejected"
        assert both.sim.dead
        assert both.sim.deleted
    finally:
        both.real.close(20.0)

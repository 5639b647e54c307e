"""What a journal gave out is known, in a restored copy of it, too; what another one gave out is not."""

import shutil
from pathlib import Path

import pytest
from multigpu_master import ids
from multigpu_master.core.model import EPOCH_IDS
from multigpu_master.journal.protocol import Entry

from tests.master.journal.journals import settle, submit
from tests.master.journal.test_journal import Opened, opened
from tests.master.test_ids import NOW_S


def begin(data_dir: Path, now_s: float) -> tuple[int, list[ids.Incarnation]]:
    """Opens a journal at that time; what the master that did so would give out."""
    with opened(data_dir, clock_s=now_s) as it:
        return it.recovered.epoch, list(it.recovered.incarnations)


def ends_of(it: Opened) -> ids.Incarnations:
    return ids.Incarnations(it.recovered.incarnations)


def test_an_empty_journal_and_an_older_copy_repeat_no_id(tmp_path: Path) -> None:
    first, _ = begin(tmp_path / "data", NOW_S)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    later = [begin(tmp_path / "data", NOW_S + 10)[0], begin(tmp_path / "data", NOW_S + 10)[0]]
    restored, _ = begin(tmp_path / "copy", NOW_S + 20)
    empty, _ = begin(tmp_path / "empty", NOW_S + 20)
    assert first < later[0] < later[1] < min(restored, empty)


def test_an_epoch_that_a_running_master_began_is_not_begun_again(tmp_path: Path) -> None:
    first, _ = begin(tmp_path / "data", 0.0)
    with opened(tmp_path / "data", clock_s=0.0) as it:
        assert it.recovered.epoch == first + 1
        it.write(Entry(epoch=first + 5))
    assert begin(tmp_path / "data", 0.0)[0] == first + 6


def test_a_journal_that_is_lost_and_replaced_within_a_second_repeats_no_id(tmp_path: Path) -> None:
    first, second = (
        begin(tmp_path / name, NOW_S + after_s)[1][-1].first_id for name, after_s in (("a", 0.3), ("b", 0.9))
    )
    assert first + 1_000_000 < second
    assert second % EPOCH_IDS <= EPOCH_IDS // 2, "half of the ids are left"


def test_each_start_has_a_name_of_its_own_and_the_journal_knows_how_far_each_came(tmp_path: Path) -> None:
    with opened(tmp_path / "data", clock_s=NOW_S) as it:
        first = ends_of(it)
        assert first.cursors_end(first.current) == ids.CURSORS_END
        it.write(Entry(submits=[submit(1), submit(2)]), Entry(settles=[settle(1), settle(2)]))
    with opened(tmp_path / "data", clock_s=NOW_S + 5) as it:
        second = ends_of(it)
        assert second.current != first.current
        assert second.cursors_end(first.current) == 3
        assert second.ids_end(first.current) == ids.first_id(it.recovered.epoch)
        assert second.ids_end(second.current) == 2**53
        assert second.ids_end("another") == second.cursors_end("another") == second.ids_end("") == 0


def test_a_restored_copy_knows_an_incarnation_as_far_as_it_has_it(tmp_path: Path) -> None:
    with opened(tmp_path / "data", clock_s=NOW_S) as it:
        name = ends_of(it).current
        it.write(Entry(submits=[submit(1)]), Entry(settles=[settle(1)]))
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        (tmp_path / "copy" / "LOCK").unlink()
        it.write(Entry(submits=[submit(2)]), Entry(settles=[settle(2)]))
    with opened(tmp_path / "copy", clock_s=NOW_S) as it:  # its clock is behind
        assert ends_of(it).cursors_end(name) == 2  # the cursor 1 is good, 2 is of an outcome that is gone
        assert ends_of(it).ids_end(name) == ids.first_id(it.recovered.epoch)


def test_a_master_that_starts_for_ever_leaves_a_bounded_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "INCARNATIONS_MAX", 3)
    started = [begin(tmp_path / "data", NOW_S)[1] for _ in range(5)]
    assert [[one.name for one in known] for known in started[2:]] == [
        [known[-1].name for known in started[at : at + 3]] for at in range(3)
    ]

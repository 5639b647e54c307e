"""The files that peers put down, and the journal that refers to them: what is committed was synced before, what nobody
needs goes, and what anybody needs stays.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu._transport import payloads
from multigpu._transport.payloads import FREE_NAMES, LARGE_BYTES, SEGMENT_BYTES, Directory, Reference, Writer
from multigpu_master.errors import JournalError, JournalFullError
from multigpu_master.journal import payload_files as product
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.journal.protocol import Entry, LargeBody, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import room, segments
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.schema import DATABASE_NAME

from tests.master.journal.journals import SPEC
from tests.waiting import until

MIB = 1 << 20


class Opened:
    """An open journal that deletes unused segments of its payload directory. Records the arguments of its callback."""

    def __init__(self, data_dir: Path) -> None:
        self.commits: list[tuple[int, JournalError | None]] = []
        self.journal = SqliteJournal(data_dir, size_max_bytes=1 << 30)
        recovered = self.journal.open(lambda entries, _, error: self.commits.append((len(entries), error)))
        self.tasks = list(recovered.tasks)
        self.payloads = self.journal.payloads
        self.payloads.start_deleting()

    def take(self, writer: Writer, data: bytes) -> Reference:
        """What the master makes of a reference to data that a peer wrote."""
        written = writer.put(data)
        return self.payloads.resolve(written.pin.name, written.offset, written.size_bytes)

    def write(self, entry: Entry) -> JournalError | None:
        """Whether it was committed."""
        commits = len(self.commits)
        self.journal.append(entry)
        until(lambda: len(self.commits) > commits)
        return self.commits[-1][1]

    def names(self) -> list[str]:
        return sorted(p.name for p in self.payloads.path.iterdir() if p.name != "KEY" and p.name not in FREE_NAMES)


@contextlib.contextmanager
def opened(data_dir: Path) -> Iterator[Opened]:
    it = Opened(data_dir)
    try:
        yield it
    finally:
        it.journal.close(20)


def submit(task_id: int, payload: Any) -> Entry:
    return Entry(submits=[SubmitRecord(task_id, f"request-{task_id}", SPEC, payload, "", 1, 1000.0)])


def settle(task_id: int, body: bytes | LargeBody, expire_s: float = 1e12) -> Entry:
    record = SettleRecord(
        task_id, f"request-{task_id}", 1, "default", "echo", "", "w0", 1000.0, 2000.0, expire_s, body, None
    )
    return Entry(settles=[record])


def test_a_payload_file_is_synced_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []

    def note(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            real(fd)
            synced.append((Path(f"/proc/self/fd/{fd}").resolve().name, len(it.commits)))

        return sync

    with opened(tmp_path / "data") as it:
        writer = Writer(it.payloads.path)
        payload, result = it.take(writer, bytes(MIB)), it.take(writer, b"r" * MIB)
        monkeypatch.setattr(os, "fdatasync", note(os.fdatasync))
        monkeypatch.setattr(os, "fsync", note(os.fsync))
        assert it.write(submit(1, payload)) is None
        assert synced == [(payload.pin.name, 0), ("payloads", 0)]
        assert it.write(settle(1, LargeBody(b"head", result))) is None
        assert synced[2:] == [(result.pin.name, 1)]  # its name is on the disk already
        outcome = it.journal.get_outcome(1)
        assert outcome is not None and outcome.body == b"head" + b"r" * MIB


def test_the_name_of_a_file_that_was_there_before_the_master_is_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's engine may have made it while no master ran, and nobody synced its name."""
    synced: list[str] = []
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        synced.append(Path(f"/proc/self/fd/{fd}").resolve().name)

    with opened(tmp_path / "data") as it:
        pass
    writer = Writer(it.payloads.path)
    writer.put(bytes(MIB))
    monkeypatch.setattr(os, "fsync", sync)
    with opened(tmp_path / "data") as it:
        assert it.write(submit(1, it.take(writer, bytes(MIB)))) is None
    assert synced.count("payloads") == 1


def test_payload_files_without_their_journal_are_kept(tmp_path: Path) -> None:
    """A master began an empty journal, and deleted them within seconds."""
    with opened(tmp_path / "data") as it:
        assert it.write(submit(1, it.take(Writer(it.payloads.path), b"1" * MIB))) is None
    database = tmp_path / "data" / DATABASE_NAME
    database.rename(tmp_path / "moved")
    with pytest.raises(JournalError, match=r"is gone, but payloads/ of that journal are still"):
        SqliteJournal(tmp_path / "data", size_max_bytes=1 << 30).open(lambda *_: None)
    (tmp_path / "moved").rename(database)
    with opened(tmp_path / "data") as it:
        assert [task.task_id for task in it.tasks] == [1]


def test_a_shared_file_needs_no_further_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "data") as it:
        free = it.journal._room._watermark_bytes + (4 << 20)
        large = it.take(Writer(it.payloads.path), bytes(free))
        monkeypatch.setattr(room, "free_bytes", lambda _path: free)
        assert it.write(submit(1, large)) is None
        assert it.write(settle(2, LargeBody(b"head", large))) is None
        assert room.content_bytes(settle(2, LargeBody(b"head", large))) == 4
        assert it.journal.writable


def test_the_payload_of_a_settled_task_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "data") as it:
        writers = Writer(it.payloads.path), Writer(it.payloads.path)
        payload, result = it.take(writers[0], bytes(MIB)), it.take(writers[1], bytes(MIB))
        synced: list[str] = []
        real = os.fdatasync

        def note(fd: int) -> None:
            real(fd)
            synced.append(Path(f"/proc/self/fd/{fd}").resolve().name)

        monkeypatch.setattr(os, "fdatasync", note)
        it.journal.append(submit(1, payload), settle(1, LargeBody(b"head", result)))
        until(lambda: sum(count for count, _ in it.commits) == 2)
        assert synced == [result.pin.name]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, JournalFullError), (errno.EIO, JournalError)])
def test_a_sync_that_fails_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[JournalError]
) -> None:
    def fail(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    with contextlib.suppress(JournalError), opened(tmp_path / "data") as it:
        payload = it.take(Writer(it.payloads.path), bytes(MIB))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            error = it.write(submit(1, payload))
        assert type(error) is kind
    with opened(tmp_path / "data") as it:
        assert it.tasks == []


def test_queued_payloads_are_recovered_where_they_lie(tmp_path: Path) -> None:
    data = [os.urandom(LARGE_BYTES + n) for n in range(5)]
    with opened(tmp_path / "data") as it:
        writer = Writer(it.payloads.path)
        for n, each in enumerate(data, 1):
            assert it.write(submit(n, it.take(writer, each))) is None
        names = it.names()
    del writer
    with opened(tmp_path / "data") as it:
        time.sleep(2 * product.SCAN_S + product.IDLE_S)  # it is looked for what may go
        assert [task.payload.read() for task in it.tasks] == data  # type: ignore[union-attr]  # references, all of them
        assert it.names() == names
        for n in range(1, 6):
            assert it.write(settle(n, b"small")) is None
        it.tasks.clear()
        until(lambda: it.names() == [])


def test_a_file_to_which_only_a_row_refers_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        assert it.write(settle(1, LargeBody(b"head", it.take(Writer(it.payloads.path), b"r" * MIB)))) is None
    with opened(tmp_path / "data") as it:
        time.sleep(2 * product.SCAN_S + product.IDLE_S)
        outcome = it.journal.get_outcome(1)
        assert outcome is not None and outcome.body == b"head" + b"r" * MIB


def test_segments_are_deleted_with_their_last_reference(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        writer = Writer(it.payloads.path)
        mine = writer.put(bytes(MIB))
        held = it.payloads.resolve(mine.pin.name, mine.offset, mine.size_bytes)
        del writer, mine  # the peer lets go
        time.sleep(2 * product.SCAN_S)
        assert it.names() == [held.pin.name]
        assert held.read() == bytes(MIB)
        del held  # we do
        until(lambda: it.names() == [])


def test_a_segment_that_its_writer_holds_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        writer = Writer(it.payloads.path)
        mine = writer.put(bytes(MIB))
        it.payloads.resolve(mine.pin.name, 0, MIB)  # and released at once
        time.sleep(2 * product.SCAN_S)
        assert it.names() == [mine.pin.name]
        assert mine.read() == bytes(MIB)


def test_a_full_segment_is_written_anew_by_another_and_deleted_when_nobody_does(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        first = Writer(it.payloads.path)
        inode = (it.payloads.path / first.put(b"1" * SEGMENT_BYTES).pin.name).stat().st_ino
        del first
        until((it.payloads.path / FREE_NAMES[0]).exists)
        second = Writer(it.payloads.path)
        place = second.put(b"2" * MIB)
        assert (it.payloads.path / place.pin.name).stat().st_ino == inode
        assert it.payloads.resolve(place.pin.name, 0, MIB).read() == b"2" * MIB
        del second, place
        until((it.payloads.path / FREE_NAMES[0]).exists)
        until(lambda: [p.name for p in it.payloads.path.iterdir()] == ["KEY"])


def test_an_expired_result_lets_its_segment_go(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        for n in (1, 2):  # the newest outcome is never forgotten, but its body is
            it.write(submit(n, b"small"))
            it.write(settle(n, LargeBody(b"head", it.take(Writer(it.payloads.path), bytes(MIB))), expire_s=0.0))
        assert len(it.names()) == 2
        it.journal._sweeper._schedule(0, 0.0)  # or it would be half a minute
        until(lambda: it.names() == [])
        stored = it.journal.get_outcome(2)
        assert stored is not None and stored.body is None


def test_a_new_life_of_the_master_has_a_new_key(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        with opened(tmp_path / "data") as it:
            directory = Directory.of(it.payloads.initial_metadata())
            assert directory is not None and it.payloads.shared_with(directory.key)
            assert not it.payloads.shared_with(b"")
            assert oct((it.payloads.path / "KEY").stat().st_mode & 0o777) == "0o600"
            keys.append(directory.key)
    assert keys[0] != keys[1]


def test_a_writer_never_keeps_a_name_that_is_not_its_files_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a file and its lock it looks like an orphan, and may be taken for one."""
    store = Payloads(tmp_path, lambda _name: False)
    store.open()
    writer = Writer(store.path)
    robbed: list[Any] = []
    real = os.open

    def rob(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        fd = real(path, flags, *rest, **options)
        if len(robbed) < 3 and flags & os.O_RDWR:
            robbed.append(path)
            assert store._delete_unused(Path(path).name)  # what its thread would do just now
        return fd

    monkeypatch.setattr(os, "open", rob)
    place = writer.put(bytes(MIB))
    assert len(robbed) == 3
    assert (store.path / place.pin.name).read_bytes() == bytes(MIB)
    store.close()


def test_a_writer_leaves_the_master_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put down is of no use if the master has no room to write what became of it."""
    disk = shutil.disk_usage(tmp_path)
    writer = Writer(tmp_path)
    monkeypatch.setattr(payloads, "FREE_BYTES_MIN", disk.total)
    with pytest.raises(OSError, match="No space left"):
        writer.put(bytes(LARGE_BYTES))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(payloads, "FREE_BYTES_MIN", 0)
    assert writer.put(bytes(LARGE_BYTES)).read() == bytes(LARGE_BYTES)


def test_the_name_of_a_file_is_synced_although_another_file_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "data") as it:
        references = [it.take(Writer(it.payloads.path), os.urandom(LARGE_BYTES)) for _ in range(2)]
        synced: list[int] = []
        monkeypatch.setattr(product.os, "fsync", synced.append)  # type: ignore[attr-defined]
        with monkeypatch.context() as failing:
            done: list[int] = []

            def second_fails(fd: int) -> None:
                done.append(fd)
                if len(done) == 2:
                    raise OSError(errno.ENOSPC, "No space left on device")

            failing.setattr(product.os, "fdatasync", second_fails)  # type: ignore[attr-defined]
            with pytest.raises(OSError, match="No space"):
                it.payloads.sync(references)
        for reference in references:
            synced.clear()
            it.payloads.sync([reference])
            assert len(synced) == 1, "the directory"


def test_files_that_cannot_be_deleted_do_not_keep_others(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        written = [Writer(it.payloads.path).put(os.urandom(LARGE_BYTES)) for _ in range(3)]
        names = sorted(reference.pin.name for reference in written)
        link, directory = it.payloads.path / names[0], it.payloads.path / names[1]
        link.unlink()
        link.symlink_to("KEY")
        directory.unlink()
        directory.mkdir()
        written.clear()
        until(lambda: it.names() == names[:2])
    with opened(tmp_path / "data") as it:
        assert it.names() == names[:2]


def test_bytes_that_another_writer_may_have_overwritten_are_not_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "data") as it:
        reference = it.take(Writer(it.payloads.path), os.urandom(LARGE_BYTES))
        large = segments.LargeObjects(tmp_path / "data", it.payloads)

        def reused(path: Path, offset: int, size_bytes: int) -> bytes:
            path.rename(path.with_name(FREE_NAMES[0]))
            return payloads.read_file(path.with_name(FREE_NAMES[0]), offset, size_bytes)

        monkeypatch.setattr(segments, "read_file", reused)
        with pytest.raises(FileNotFoundError):
            large.read(product.reference_text(reference))

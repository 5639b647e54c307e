"""Tail: the lines that a process adds to a file."""

from pathlib import Path

import pytest
from multigpu_worker.engines.train import tail as module
from multigpu_worker.engines.train.tail import Tail


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_lines_come_once_and_whole(file: Path) -> None:
    tail = Tail(file)
    assert tail.lines() == []
    file.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    assert tail.lines() == []
    with file.open("ab") as more:
        more.write(b"o\nthree")
    assert tail.lines() == ["two"]
    assert tail.lines(last=True) == ["three"]
    assert tail.lines(last=True) == []


def test_what_carriage_returns_overwrite_is_left_out(file: Path) -> None:
    file.write_bytes(b" 10%\r 50%\r100%\nwindows\r\n\xff\n")
    assert Tail(file).lines() == ["100%", "windows", "�"]


def test_of_much_text_the_last_is_read_if_it_may_skip(file: Path) -> None:
    file.write_bytes(b"".join(b"%06d\n" % n for n in range(100_000)))
    (*_, last) = Tail(file, skips=True).lines()
    assert last == "099999"
    assert len(Tail(file, skips=True).lines()) < 20_000
    whole = Tail(file)
    assert len(whole.lines() + whole.lines(last=True)) == 100_000


def test_a_line_without_an_end_takes_little_memory(file: Path) -> None:
    tail = Tail(file, skips=True)
    with file.open("ab") as log:
        for _ in range(20):
            log.write(b"\r 50%" * 10_000)
            log.flush()
            assert tail.lines() == []
        log.write(b"\rdone\n")
    assert tail.lines() == ["done"]
    assert len(tail._rest) < 1 << 17


def test_a_line_that_stays_open_is_shown_after_a_while(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"\r 10%\r 50%")
    tail, whole = Tail(file, skips=True), Tail(file)
    assert tail.lines() == []
    monkeypatch.setattr(module, "OPEN_S", 0.0)
    assert tail.lines() == [" 50%"]
    assert tail.lines() == []
    assert whole.lines() == [], "reports are lines"

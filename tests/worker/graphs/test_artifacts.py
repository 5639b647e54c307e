"""The cache of plans and exports: one builder, whole or not at all, never another key's, never a damaged one."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest
from multigpu_worker.engines.common.artifacts import MANIFEST, RECENT_S, Artifact, ArtifactError, Artifacts

from tests.waiting import until

MIB = 1 << 20
KEY = {"model": "weights-1", "precision": "fp16"}


class Builder:
    """Builds a plan of given content, and counts."""

    def __init__(self, content: bytes = b"a plan" * 100) -> None:
        self.content = content
        self.built = 0

    def __call__(self, folder: Path) -> Mapping[str, str]:
        self.built += 1
        (folder / "model.plan").write_bytes(self.content)
        (folder / "more").mkdir()
        (folder / "more" / "notes.txt").write_text("notes")
        return {"accuracy": "0.999"}


def plan(artifact: Artifact) -> bytes:
    return (artifact.folder / "model.plan").read_bytes()


def entries(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def artifacts(root: Path) -> Artifacts:
    return Artifacts(root, MIB)


def test_artifact_is_found_again_by_other_readers(artifacts: Artifacts, root: Path) -> None:
    build = Builder()
    first = artifacts.get("plan", KEY, build)
    again = artifacts.get("plan", dict(reversed(KEY.items())), build)
    elsewhere = Artifacts(root, MIB).get("plan", KEY, build)
    assert build.built == 1
    assert first.folder == again.folder == elsewhere.folder
    assert first.facts == elsewhere.facts == {"accuracy": "0.999"}
    assert plan(elsewhere) == build.content


@pytest.mark.parametrize("changed", ["model", "precision", "engine"])
def test_any_difference_in_the_key_makes_another_artifact(artifacts: Artifacts, changed: str) -> None:
    one, other = Builder(b"one"), Builder(b"other")
    name = {"name": "the same name"}
    assert plan(artifacts.get("plan", KEY | name, one)) == b"one"
    assert plan(artifacts.get("plan", KEY | name | {changed: "another"}, other)) == b"other"
    assert plan(artifacts.get("export", KEY | name, other)) == b"other"
    assert plan(artifacts.get("plan", KEY | name, other)) == b"one"


def test_artifact_of_another_key_is_not_used(artifacts: Artifacts) -> None:
    """As if two keys had one hash: the key itself is compared."""
    theirs = artifacts.get("plan", KEY, Builder(b"theirs"))
    ours = artifacts.get("plan", {"model": "weights-2"}, Builder(b"ours"))
    shutil.rmtree(ours.folder)
    shutil.copytree(theirs.folder, ours.folder)
    assert plan(artifacts.get("plan", {"model": "weights-2"}, Builder(b"ours anew"))) == b"ours anew"


def flip(folder: Path) -> None:
    content = bytearray((folder / "model.plan").read_bytes())
    content[50] ^= 1
    (folder / "model.plan").write_bytes(content)


def better_figure(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("0.999", "1.000"))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(folder / "model.plan", 10),
    "flip": flip,
    "drop": lambda folder: (folder / "more" / "notes.txt").unlink(),
    "add": lambda folder: (folder / "foreign").write_text("x"),
    "cut_manifest": lambda folder: os.truncate(folder / MANIFEST, 100),
    "drop_manifest": lambda folder: (folder / MANIFEST).unlink(),
    "better_figure": better_figure,
    "no_object": lambda folder: (folder / MANIFEST).write_text("[]"),
    "no_folder": no_folder,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_artifact_is_made_again(artifacts: Artifacts, root: Path, damage: Callable[[Path], object]) -> None:
    build = Builder()
    folder = artifacts.get("plan", KEY, build).folder
    damage(folder)
    for _ in range(2):
        artifact = artifacts.get("plan", KEY, build)
        assert plan(artifact) == build.content
        assert artifact.facts == {"accuracy": "0.999"}
    assert build.built == 2
    assert [path.name for path in entries(root)] == [folder.name]


def test_failed_build_leaves_nothing(artifacts: Artifacts, root: Path) -> None:
    def fails(folder: Path) -> Mapping[str, str]:
        (folder / "model.plan").write_bytes(b"half")
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        artifacts.get("plan", KEY, fails)
    assert entries(root) == []
    assert plan(artifacts.get("plan", KEY, Builder(b"whole"))) == b"whole"


PROCESS = """
import sys, time
from pathlib import Path
from multigpu_worker.engines.common.artifacts import Artifacts

root, log = Path(sys.argv[1]), Path(sys.argv[2])

def build(folder):
    with log.open("a") as file:
        file.write("built\\n")
    (folder / "model.plan").write_bytes(b"half")
    time.sleep(float(sys.argv[3]))
    (folder / "model.plan").write_bytes(b"a whole plan")
    return {}

artifact = Artifacts(root, 1 << 20).get("plan", {"model": "shared"}, build)
print((artifact.folder / "model.plan").read_bytes().decode(), flush=True)
"""


@contextlib.contextmanager
def processes(number: int, root: Path, log: Path, build_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", PROCESS, str(root), str(log), str(build_s)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_concurrent_builders_build_once(root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with processes(4, root, log, 0.5) as started:
        answers = [process.communicate("\n")[0] for process in started]
    assert answers == ["a whole plan\n"] * 4
    assert log.read_text() == "built\n"


def age(root: Path, by_s: float = RECENT_S + 1) -> None:
    """As if nothing had been asked for since."""
    for path in entries(root):
        os.utime(path, (path.stat().st_atime - by_s, path.stat().st_mtime - by_s))


def test_killed_builder_leaves_nothing_and_blocks_no_other(artifacts: Artifacts, root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = Artifacts(root, 1)
    with processes(1, root, log, 60) as (process,):
        until(lambda: any((path / "model.plan").exists() for path in root.glob("*.making.*")))
        age(root)
        # What a live builder makes is not evicted, what nobody makes any more is …
        small.get("plan", KEY, Builder())
        assert list(root.glob("*.making.*"))
        process.send_signal(signal.SIGKILL)
        process.wait()
        small.get("plan", {"model": "another"}, Builder())
        assert not list(root.glob("*.making.*"))
    with processes(1, root, log, 60) as (process,):
        until(lambda: any((path / "model.plan").exists() for path in root.glob("*.making.*")))
    # … and also when the same key is built.
    with processes(1, root, log, 0) as (process,):
        assert process.communicate("\n")[0] == "a whole plan\n"
    assert not list(root.glob("*.making.*"))


def test_only_what_is_there_is_found(artifacts: Artifacts, root: Path) -> None:
    assert artifacts.find("plan", KEY) is None
    assert not root.exists()
    made = artifacts.get("plan", KEY, Builder())
    assert artifacts.find("plan", KEY) == made
    assert artifacts.find("plan", KEY | {"more": ""}) is None
    (made.folder / "model.plan").write_bytes(b"damaged")
    assert artifacts.find("plan", KEY) is None


def test_a_folder_that_cannot_be_written_gives_what_it_has(
    artifacts: Artifacts, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = artifacts.get("plan", KEY, Builder())

    def read_only(_: Path, *_arguments: object, **_more: object) -> NoReturn:  # root could write into it
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Artifacts, "_open_lock", read_only)
    assert artifacts.get("plan", KEY, Builder()) == made
    with pytest.raises(ArtifactError, match="set artifacts_dir"):
        artifacts.get("plan", KEY | {"more": ""}, Builder())


def test_one_process_at_a_time_is_alone(artifacts: Artifacts, root: Path) -> None:
    artifacts.get("plan", KEY, Builder())
    code = f"""
from pathlib import Path
from multigpu_worker.engines.common.artifacts import Artifacts
with Artifacts(Path({str(root)!r}), 1).alone("trials"):
    print("alone", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "alone\n"
        entered = threading.Event()

        def enter() -> None:
            with artifacts.alone("trials"):
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        with artifacts.alone("others"):
            assert not entered.wait(0.2)
        one.communicate("\n")
        assert entered.wait(30)
        thread.join()


def keyed(number: int) -> dict[str, str]:
    return {"model": str(number)}


def test_least_recently_used_artifacts_are_evicted(root: Path) -> None:
    (root / "device.resets").mkdir(parents=True)  # not the cache's
    artifacts, build = Artifacts(root, 3 * MIB), Builder(bytes(900_000))
    for number in (1, 2, 3, 1, 4):
        artifacts.get("plan", keyed(number), build)
        age(root)
    assert build.built == 4
    assert len(entries(root)) == 1 + 3
    for number in (1, 3, 4):
        artifacts.get("plan", keyed(number), build)
        age(root)
    assert build.built == 4
    artifacts.get("plan", keyed(2), build)
    assert build.built == 5


def test_artifacts_of_the_last_hour_are_not_evicted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifacts, build = Artifacts(root, MIB), Builder(bytes(900_000))
    artifacts.get("plan", keyed(1), build)
    age(root)
    artifacts.get("plan", keyed(1), build)
    artifacts.get("plan", keyed(2), build)
    assert len(entries(root)) == 2
    assert "raise it" in capsys.readouterr().out
    age(root)
    artifacts.get("plan", keyed(3), build)
    assert len(entries(root)) == 1
    assert "raise it" not in capsys.readouterr().out


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Writes past it fail with EFBIG, as the quota of a user does with EDQUOT."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_no_room_is_an_error_without_a_partial_artifact(artifacts: Artifacts, root: Path) -> None:
    with files_of_at_most(100_000), pytest.raises(ArtifactError, match=r"no room in .* set artifacts_dir"):
        artifacts.get("plan", KEY, Builder(bytes(200_000)))
    assert entries(root) == []
    build = Builder(bytes(200_000))
    assert plan(artifacts.get("plan", KEY, build)) == build.content


def test_folder_that_cannot_be_written_is_an_error_that_says_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(ArtifactError, match=r"no artifacts can be kept in .*: set artifacts_dir"):
        Artifacts(tmp_path / "a file" / "artifacts", MIB).get("plan", KEY, Builder())

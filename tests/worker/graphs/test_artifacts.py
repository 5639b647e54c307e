"""The cache of plans and exports: one builder, whole or not at all, never another key's, never a damaged one."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from multigpu_worker.engines.common.artifacts import MANIFEST, Artifact, ArtifactError, Artifacts

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


def flip_with_the_old_time(folder: Path) -> None:
    before = (folder / "model.plan").stat()
    flip(folder)
    os.utime(folder / "model.plan", ns=(before.st_atime_ns, before.st_mtime_ns))


def link(folder: Path) -> None:
    shutil.move(folder / "model.plan", folder.parent.parent / "model.plan")
    (folder / "model.plan").symlink_to(folder.parent.parent / "model.plan")


def better_figure(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("0.999", "1.000"))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(folder / "model.plan", 10),
    "flip": flip,
    "flip_with_the_old_time": flip_with_the_old_time,
    "drop": lambda folder: (folder / "more" / "notes.txt").unlink(),
    "add": lambda folder: (folder / "foreign").write_text("x"),
    "link": link,
    "cut_manifest": lambda folder: os.truncate(folder / MANIFEST, 100),
    "drop_manifest": lambda folder: (folder / MANIFEST).unlink(),
    "better_figure": better_figure,
    "old_format": lambda folder: (folder / MANIFEST).write_text('{"format": 0}'),
    "no_object": lambda folder: (folder / MANIFEST).write_text("[]"),
    "open_to_others": lambda folder: folder.chmod(0o777),
    "no_folder": no_folder,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_artifact_is_made_again(artifacts: Artifacts, root: Path, damage: Callable[[Path], object]) -> None:
    build = Builder()
    folder = artifacts.get("plan", KEY, build).folder
    damage(folder)
    for reader in (artifacts, Artifacts(root, MIB)):  # one that had verified it, and one that had not
        artifact = reader.get("plan", KEY, build)
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
sys.stdin.readline()  # in use until then
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


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_concurrent_builders_build_once(root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with processes(4, root, log, 0.5) as started:
        answers = [process.communicate("\n")[0] for process in started]
    assert answers == ["a whole plan\n"] * 4
    assert log.read_text() == "built\n"


def test_killed_builder_leaves_nothing_and_blocks_no_other(artifacts: Artifacts, root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with processes(1, root, log, 60) as (process,):
        wait_for(lambda: any((path / "model.plan").exists() for path in root.glob("*.making.*")))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert list(root.glob("*.making.*"))
        # Another key's builder clears away what nobody makes any more …
        artifacts.get("plan", KEY, Builder())
        assert not list(root.glob("*.making.*"))
    # … and the same key is built as if nothing had been.
    with processes(1, root, log, 0) as (process,):
        assert process.communicate("\n")[0] == "a whole plan\n"


def test_unfinished_artifact_of_a_live_builder_is_kept(artifacts: Artifacts, root: Path, tmp_path: Path) -> None:
    with processes(1, root, tmp_path / "log", 1.5) as (process,):
        wait_for(lambda: any((path / "model.plan").exists() for path in root.glob("*.making.*")))
        artifacts.get("plan", KEY, Builder())
        assert list(root.glob("*.making.*"))
        assert process.communicate("\n")[0] == "a whole plan\n"


def keyed(number: int) -> dict[str, str]:
    return {"model": str(number)}


def test_least_recently_used_artifacts_are_evicted(root: Path) -> None:
    artifacts, build = Artifacts(root, 3 * MIB), Builder(bytes(900_000))
    for number in (1, 2, 3, 1, 4):
        artifacts.get("plan", keyed(number), build).close()
    assert build.built == 4
    assert len(entries(root)) == len(list(root.glob("*.lock"))) == 3
    for number in (1, 3, 4):
        artifacts.get("plan", keyed(number), build).close()
    assert build.built == 4
    artifacts.get("plan", keyed(2), build).close()
    assert build.built == 5


def test_clock_set_back_does_not_change_the_eviction_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts, build = Artifacts(root, 2 * MIB), Builder(bytes(900_000))
    artifacts.get("plan", keyed(1), build).close()
    real = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: real - 10**18)
    for number in (2, 3, 2, 3):
        artifacts.get("plan", keyed(number), build).close()
    assert build.built == 3
    assert len(entries(root)) == 2


def test_artifact_in_use_is_not_evicted_and_an_unreferenced_one_is(root: Path) -> None:
    """By this process or by another: the lock is the kernel's."""
    artifacts, build = Artifacts(root, MIB), Builder(bytes(900_000))
    used = artifacts.get("plan", keyed(1), build)
    with processes(1, root, root.parent / "log", 0) as (process,):
        assert process.stdout is not None
        assert process.stdout.readline() == "a whole plan\n"
        artifacts.get("plan", keyed(2), build).close()
        assert plan(used) == build.content
        assert len(entries(root)) == 3
        used.close()
        artifacts.get("plan", keyed(3), build).close()
        # The other process's and the newest.
        assert len(entries(root)) == 2
    artifacts.get("plan", keyed(4), build).close()
    assert len(entries(root)) == 1
    artifacts.get("plan", keyed(5), build)
    artifacts.get("plan", keyed(6), build)
    assert len(entries(root)) == 1


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


def test_no_room_anywhere_is_an_error_without_a_partial_artifact(artifacts: Artifacts, root: Path) -> None:
    with files_of_at_most(100_000), pytest.raises(ArtifactError, match=r"no room in .* set artifacts_dir"):
        artifacts.get("plan", KEY, Builder(bytes(200_000)))
    assert entries(root) == []
    build = Builder(bytes(200_000))
    assert plan(artifacts.get("plan", KEY, build)) == build.content


FULL_DISK = """
import sys, tempfile
from pathlib import Path
from multigpu_worker.engines.common.artifacts import Artifacts

def of(size_bytes):
    return lambda folder: {"size": str((folder / "p").write_bytes(bytes(size_bytes)))}

root, tempfile.tempdir = Path(sys.argv[1]), sys.argv[2]
fits = Artifacts(root, 1 << 30).get("plan", {"model": "small"}, of(50_000))
assert fits.folder.parent == root, fits
large = Artifacts(root, 1 << 30).get("plan", {"model": "large"}, of(2 << 20))
assert large.folder.parent == Path(tempfile.tempdir), large
assert (large.folder / "p").stat().st_size == 2 << 20 and large.facts == {"size": str(2 << 20)}
print(len([path for path in root.iterdir() if path.is_dir()]))
folder = large.folder
large.close()
assert not folder.exists()
"""


def test_on_a_full_disk_the_artifact_is_private(tmp_path: Path) -> None:
    """A real one: a tmpfs of a mebibyte, in a mount namespace of its own."""
    small, elsewhere = tmp_path / "small", tmp_path / "elsewhere"
    small.mkdir()
    elsewhere.mkdir()
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    mount = f"mount -t tmpfs -o size=1m tmpfs {small} && exec {sys.executable} {script} {small} {elsewhere}"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    trial = subprocess.run([*command[:4], "mount", "-t", "tmpfs", "tmpfs", small], check=False, capture_output=True)
    if trial.returncode:
        pytest.skip("this machine lets no user mount a file system in a namespace")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"
    assert "can't be kept" in done.stdout
    assert list(elsewhere.iterdir()) == []


def test_wrapped_disk_full_error_is_recognised(artifacts: Artifacts) -> None:
    """Whoever wraps the error keeps it as the cause."""
    tries: list[Path] = []

    def build(folder: Path) -> Mapping[str, str]:
        tries.append(folder)
        if len(tries) == 1:
            raise RuntimeError("could not write the plan") from OSError(errno.ENOSPC, "No space left on device")
        return {}

    assert artifacts.get("plan", KEY, build).folder == tries[1]


def test_unwritable_folder_costs_only_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").write_text("")
    artifacts = Artifacts(tmp_path / "a file" / "artifacts", MIB)
    build = Builder()
    artifact = artifacts.get("plan", KEY, build)
    assert plan(artifact) == build.content
    assert "can't be kept" in capsys.readouterr().out
    artifact.close()
    assert not artifact.folder.exists()

"""The distribution: what the wheel requires and contains, the client without the extras, programs without theirs."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import multigpu
import pytest
from multigpu import _extras
from packaging.requirements import Requirement
from packaging.version import Version

from hatch_build import CompileHook

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PROGRAMS = {"mgpuctl": "cli", "mgpu-gateway": "gateway", "mgpu-master": "master", "mgpu-worker": "worker"}
BASE = {"grpcio", "msgpack", "numpy", "protobuf"}
# What `pip install multigpu` leaves in an environment, by import name: typing_extensions is grpcio's.
BASE_FILES = ("google", "grpc", "msgpack", "numpy", "numpy.libs", "typing_extensions.py")
# Without these the worker runs, and says what it can't do.
OPTIONAL = {"llguidance", "nvidia-ml-py", "torch", "transformers"}
NOT_POSIX = ("fcntl", "grp", "pwd", "resource", "termios")
NOT_POSIX_OS = ("geteuid", "getuid", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "pread", "pwrite", "register_at_fork")


def names(requirements: list[str]) -> set[str]:
    return {Requirement(entry).name for entry in requirements}


def run(*command: str | Path, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Runs a command that finds no sources of this checkout. `stdout` has its errors too."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_base_install_is_the_client() -> None:
    assert names(PROJECT["dependencies"]) == BASE


@pytest.mark.parametrize("extra", _extras.MODULES)
def test_programs_check_what_their_extra_installs(extra: str) -> None:
    """A package that is added to an extra must be looked for, or be one that the program runs without."""
    packages = importlib.metadata.packages_distributions()
    checked = {packages[module][0].replace("_", "-").lower() for module in _extras.MODULES[extra]}
    # uvloop makes mgpuctl faster, and Windows doesn't have it.
    optional = OPTIONAL | ({"uvloop"} if extra == "cli" else set())
    assert checked == names(PROJECT["optional-dependencies"][extra]) - optional - BASE


def test_the_client_works_without_the_extras_and_without_posix() -> None:
    """As on Windows: no fcntl, no fork. A master's offer of a shared directory is declined, so payloads are sent."""
    absent = {module for modules in _extras.MODULES.values() for module in modules} | {"opentelemetry", *NOT_POSIX}
    code = f"""if True:
        import asyncio, hashlib, os, pathlib, subprocess, sys, tempfile
        import grpc.aio, numpy
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "KEY").write_bytes(b"key")
        for name in {NOT_POSIX_OS!r}:
            delattr(os, name)
        for name in {sorted(absent)!r}:
            sys.modules[name] = None  # an import of it raises ModuleNotFoundError
        import multigpu
        from multigpu._transport.payloads import METADATA, Directory
        offer = hashlib.sha256(b"key").digest() + os.fsencode(folder)
        assert Directory.of([(METADATA, offer)]) is None
        with multigpu.Client("127.0.0.1:1", connect_timeout_s=0) as client:
            try:
                client.embed(["a text"])
            except multigpu.UnavailableError:
                print("no master")
        (folder / "KEY").unlink()
        folder.rmdir()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert (done.stdout, done.returncode) == ("no master\n", 0), done.stderr


# Packages that an environment with multigpu may contain too. docs/dependencies.md has their bounds, and vllm's, which
# takes pip a minute to resolve.
NEIGHBOURS = ("tritonclient[all]==2.73.0", "ray[default]==2.60.0", "tensorflow==2.21.0")


def resolved(requirements: list[str], folder: Path) -> dict[str, str]:
    """What pip would install from an index for these, by name. Skips the test if no index answers."""
    pip = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
    probe = run(*pip, "download", "--quiet", "--no-deps", "--dest", folder, "typing-extensions")
    if probe.returncode != 0:
        pytest.skip(f"no package index answers: {probe.stdout.strip().splitlines()[-1]}")
    report = folder / "report.json"
    done = run(*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report, *requirements)
    assert done.returncode == 0, done.stdout
    found = [entry["metadata"] for entry in json.loads(report.read_text("utf-8"))["install"]]
    return {entry["name"]: entry["version"] for entry in found}


def lower_bounds(extra: str = "") -> dict[str, str]:
    """The lowest version of each package that gRPC's stubs depend on; an extra raises those of the client."""
    entries = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    bounds = (re.match(r"(grpcio[\w-]*|protobuf)>=([\d.]+)", entry) for entry in entries)
    return {match[1]: match[2] for match in bounds if match}


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "master"])
def test_the_lowest_versions_can_be_installed_together(extra: str, tmp_path: Path) -> None:
    lowest = lower_bounds(extra)
    assert {"grpcio", "protobuf"} <= lowest.keys()
    entries = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    found = resolved([*entries, *(f"{name}=={version}" for name, version in lowest.items())], tmp_path)
    assert all(Version(found[name]) == Version(version) for name, version in lowest.items())


@pytest.mark.slow
@pytest.mark.parametrize("neighbours", [[], *([entry] for entry in NEIGHBOURS)])
def test_the_newest_versions_can_be_installed_together(neighbours: list[str], tmp_path: Path) -> None:
    """Alone, and with each neighbour. The extra `master` has the narrowest bounds."""
    entries = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["master"]]
    found = resolved([*entries, *neighbours], tmp_path)
    assert {"grpcio", "protobuf", *names(neighbours)} <= found.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, as an index would have them; without network."""
    folder = tmp_path_factory.mktemp("dist")
    hook = "import sys; from hatchling.build import build_sdist; build_sdist(sys.argv[1])"
    # With this process's environment, in which hatchling is found.
    subprocess.run([sys.executable, "-c", hook, str(folder)], cwd=ROOT, check=True, timeout=400)
    (sdist,) = folder.glob("*.tar.gz")
    assert sdist.name == f"multigpu-{multigpu.__version__}.tar.gz"
    options = [
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--wheel-dir",
    ]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, folder, sdist], check=True, timeout=400)
    (built,) = folder.glob("*.whl")
    return built


def test_a_build_that_compiles_fails_without_a_compiler(tmp_path: Path) -> None:
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    environ = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1", "CC": "no-such-compiler -pthread"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1
    assert "the C compiler no-such-compiler, which is not installed" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_editable_install_is_not_compiled() -> None:
    hook = CompileHook(str(ROOT), {}, None, None, "", "wheel")  # type: ignore[arg-type]  # it needs none of these
    build_data: dict[str, object] = {}
    hook.initialize("editable", build_data)
    assert build_data == {}


def metadata_of(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_the_wheel_says_what_pyproject_says(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Version"] == multigpu.__version__
    requirements = [Requirement(entry) for entry in metadata.get_all("Requires-Dist", [])]
    assert {r.name for r in requirements if r.marker is None or "extra" not in str(r.marker)} == BASE
    assert set(metadata.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()
    assert {"cli", "gateway", "master", "worker", "all", "gpu", "onnx"} <= set(metadata.get_all("Provides-Extra", []))
    assert [entry.partition(", ")[0] for entry in metadata.get_all("Project-URL", [])] == [*PROJECT["urls"]]


@pytest.mark.slow
def test_the_wheel_and_the_sdist_contain_the_packages_alone(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = set(archive.namelist())
    tops = {name.partition("/")[0] for name in files}
    assert tops == {
        "multigpu",
        "multigpu_gateway",
        "multigpu_master",
        "multigpu_worker",
        f"multigpu-{multigpu.__version__}.dist-info",
    }
    assert {"multigpu/py.typed", "multigpu/v1/task_pb2.pyi"} <= files
    tracked = subprocess.run(
        ["git", "ls-files", "client", "gateway", "master", "worker"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert files >= {name.partition("/")[2] for name in tracked}
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside >= {*tracked, "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    assert not {name for name in inside if name.startswith(("tests/", "docs/", "benchmarks/"))}


def environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel and nothing else; returns its site-packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    done = run(*pip, *["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"], wheel)
    assert done.returncode == 0, done.stdout
    return site


def packages_here() -> Path:
    spec = importlib.metadata.distribution("grpcio").locate_file("")
    return Path(str(spec))


@pytest.mark.slow
def test_every_program_of_the_wheel_starts(wheel: Path, tmp_path: Path) -> None:
    site = environment(tmp_path / "env", wheel)
    # As `python -m venv --system-site-packages`, which would take those of the base interpreter.
    (site / "packages.pth").write_text(f"{packages_here()}\n")
    imports = "import multigpu, multigpu_gateway.main, multigpu_master.main, multigpu_worker.main"
    code = f"{imports}; print(multigpu.__file__, multigpu.__version__)"
    done = run(tmp_path / "env/bin/python", "-c", code, cwd=tmp_path)
    assert done.stdout.split() == [str(site / "multigpu/__init__.py"), multigpu.__version__]
    scripts = importlib.metadata.distribution("multigpu").entry_points.select(group="console_scripts")
    assert {entry.name for entry in scripts} == PROGRAMS.keys()
    for program in PROGRAMS:
        done = run(tmp_path / "env/bin" / program, "--help", cwd=tmp_path)
        assert (done.returncode, f"Usage: {program}" in done.stdout) == (0, True), done.stdout
    for program in ("mgpuctl", "mgpu-master", "mgpu-worker"):
        assert multigpu.__version__ in run(tmp_path / "env/bin" / program, "--version", cwd=tmp_path).stdout


@pytest.mark.slow
def test_programs_without_their_extra_say_what_to_install(wheel: Path, tmp_path: Path) -> None:
    site = environment(tmp_path / "env", wheel)
    for name in BASE_FILES:
        if (packages_here() / name).exists():
            (site / name).symlink_to(packages_here() / name)
    python = tmp_path / "env/bin/python"
    code = "import multigpu; multigpu.Client('127.0.0.1:1').close(); multigpu.AdminClient('127.0.0.1:1').close()"
    assert (run(python, "-c", code, cwd=tmp_path).stdout) == ""
    commands = {f"{tmp_path}/env/bin/{program}": (program, extra) for program, extra in PROGRAMS.items()}
    modules = {"multigpu.cli": "mgpuctl"} | {
        f"multigpu_{name}.main": f"mgpu-{name}" for name in ("gateway", "master", "worker")
    }
    for command in [*([path] for path in commands), *([str(python), "-m", module] for module in modules)]:
        program, extra = commands.get(command[0]) or (modules[command[-1]], PROGRAMS[modules[command[-1]]])
        done = run(*command, "--help", cwd=tmp_path)
        assert done.returncode == 1
        missing = ", ".join(_extras.MODULES[extra])
        assert done.stdout == f"{program}: not installed: {missing}; run `pip install 'multigpu[{extra}]'`\n"


@pytest.mark.slow
def test_up_needs_the_daemons_packages(wheel: Path, tmp_path: Path) -> None:
    """With the extra cli alone."""
    site = environment(tmp_path / "env", wheel)
    for path in packages_here().iterdir():
        absent = re.match(r"(multigpu|_+editable|grpc_health|grpc_reflection|uvloop)|.*\.(pth|dist-info)$", path.name)
        if not absent and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    done = run(tmp_path / "env/bin/mgpuctl", "up", "--data-dir", tmp_path / "data", cwd=tmp_path)
    missing = "grpc_health, grpc_reflection, uvloop"
    assert done.returncode == 1
    assert done.stdout == f"mgpuctl up: not installed: {missing}; run `pip install 'multigpu[master]'`\n"

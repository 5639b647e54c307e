"""The deploy script's lock: consistent with pyproject.toml, complete, and accepted by pip."""

import importlib.util
import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement

from tests.commands import run_module
from tests.deploy.deployment import ROOT

LOCK = ROOT / "tools/deploy/lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROFILES = {"cpu": "onnx", "cuda12": "onnx-gpu", "cuda13": "onnx-gpu"}
HOSTS = [(python, machine) for python in ("3.11", "3.12", "3.13", "3.14") for machine in ("x86_64", "aarch64")]


def entries(file: str) -> Iterator[tuple[Requirement, list[str]]]:
    """Requirement and hashes of each package, including those of referenced files."""
    for entry in (LOCK / file).read_text("utf-8").replace("\\\n", " ").splitlines():
        if entry.startswith("-r "):
            yield from entries(entry[3:])
        elif not entry.startswith("#"):
            words = re.split(r"\s+--hash=", entry)
            yield Requirement(words[0]), [word.strip() for word in words[1:]]


def installed(profile: str, python: str, machine: str) -> dict[str, str]:
    """The packages of a profile, by name, with their versions."""
    host = {"python_version": python, "python_full_version": f"{python}.1", "platform_machine": machine}
    files = [f"{profile}.txt", *(["cpu-torch.txt"] if profile == "cpu" else [])]
    found: dict[str, str] = {}
    for requirement, _ in (entry for file in files for entry in entries(file)):
        if requirement.marker is None or requirement.marker.evaluate(host):
            assert requirement.name not in found, f"{requirement.name} twice"
            found[requirement.name] = str(requirement.specifier).removeprefix("==")
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("file", sorted(path.name for path in LOCK.iterdir()))
def test_every_package_has_one_version_and_hashes(file: str) -> None:
    found = list(entries(file))
    assert found
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.+]+", str(requirement.specifier)), requirement
        assert requirement.url is None, requirement
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes)
    assert "://" not in (LOCK / file).read_text("utf-8"), "the lock names no place"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("python", "machine"), HOSTS)
def test_the_lock_is_within_the_bounds_of_pyproject(profile: str, python: str, machine: str) -> None:
    locked = installed(profile, python, machine)
    runtimes = {"onnxruntime", "onnxruntime-gpu"} & locked.keys()
    assert len(runtimes) == 1, "they are the same import"
    # onnxruntime-gpu for CUDA 12 has no build for aarch64.
    on_gpu = profile != "cpu" and (profile, machine) != ("cuda12", "aarch64")
    assert runtimes == {"onnxruntime-gpu" if on_gpu else "onnxruntime"}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in (
        "cli",
        "master",
        "worker",
        "gateway",
        "otlp",
        "minilm",
        "gguf",
        "vision",
        "onnx-gpu" if on_gpu else "onnx",
    ):
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        version = locked.get(canonical(requirement.name))
        assert version is not None, f"{requirement.name} is not locked: run tools/generate_lock.py"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, and the lock has {version}"


@pytest.mark.parametrize(("profile", "torch"), [("cpu", "2.13.0+cpu"), ("cuda12", "2.10.0"), ("cuda13", "2.13.0")])
def test_the_tests_run_with_the_deployed_versions(profile: str, torch: str) -> None:
    locked = installed(profile, "3.11", "x86_64")
    assert locked["torch"] == torch
    pinned = {
        r.name: str(r.specifier)[2:] for r in map(Requirement, PROJECT["dependency-groups"]["dev"]) if "==" in str(r)
    }
    others = {name: version for name, version in pinned.items() if name in locked and name != "torch"}
    assert len(others) > 6
    assert {name: locked[name] for name in others} == others


def test_torch_and_onnxruntime_use_the_same_cuda() -> None:
    """ONNX Runtime uses torch's libraries: its builds are for CUDA 13 from 1.27 on."""
    for profile, suffix, runtime in (("cuda12", "-cu12", "1.26.0"), ("cuda13", "-cu13", "1.31.1")):
        locked = installed(profile, "3.11", "x86_64")
        assert f"nvidia-cudnn{suffix}" in locked
        assert locked["onnxruntime-gpu"] == runtime
    assert not any(name.startswith("nvidia-cu") for name in installed("cpu", "3.11", "x86_64"))


def test_the_generator_and_the_script_name_the_same_page() -> None:
    spec = importlib.util.spec_from_file_location("generate_lock", ROOT / "tools/generate_lock.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert f"torch_cpu_page={generator.TORCH_CPU}\n" in (ROOT / "tools/deploy/common.sh").read_text("utf-8")
    assert set(generator.PROFILES) == set(PROFILES)


PIP = ["install", "--dry-run", "--ignore-installed", "-q", "--no-input", "--only-binary", ":all:", "--require-hashes"]


@pytest.mark.slow
def test_pip_accepts_the_lock() -> None:
    """All dependencies are locked, and each package has a wheel with one of its hashes for this Python."""
    done = run_module("pip", *PIP, "-r", "tools/deploy/lock/cpu-torch.txt", "-r", "tools/deploy/lock/cpu.txt")
    away = ("Could not find a version that satisfies the requirement torch==", "Failed to establish", "Read timed out")
    if done.returncode and any(word in done.stdout for word in away):
        pytest.skip("pip reaches no PyPI, or no CPU build of torch, from here")
    assert done.returncode == 0, done.stdout

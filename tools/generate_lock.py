"""Makes tools/deploy/lock, which deploy_multi_gpu.sh installs from: every package, its version, its hashes.

    python tools/generate_lock.py [--torch-cpu PAGE]

needs `uv` (`pip install uv`). all.txt is what every host installs; cpu.txt, cuda12.txt and cuda13.txt are what differs
by the host's GPUs and driver. cpu-torch.txt is a file of its own, because pip asks a page for every package of a call.
Packages that the group `dev` of pyproject.toml pins are locked at that version: the one that the tests run with. PAGE
has links to torch's CPU builds, which PyPI doesn't have.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tools" / "deploy" / "lock"
TORCH_CPU = "https://download.pytorch.org/whl/cpu/torch/"
EXTRAS = "all,otlp,minilm,gguf,vision"
# What a host needs beside EXTRAS. onnxruntime-gpu from 1.27 on is for CUDA 13; before, it had no builds for aarch64.
PROFILES = {
    "cpu": ["multigpu[onnx]", "torch=={torch}+cpu"],
    "cuda12": [
        "multigpu[onnx-gpu]; platform_machine == 'x86_64'",
        "multigpu[onnx]; platform_machine != 'x86_64'",
        "onnxruntime-gpu<1.27; platform_machine == 'x86_64'",
        "torch<2.11",
    ],
    "cuda13": ["multigpu[onnx-gpu]", "onnxruntime-gpu=={onnxruntime}", "torch=={torch}"],
}
# Python 3.15 has no onnxruntime-gpu for CUDA 12; check_python in tools/deploy/common.sh has the same bound.
COMMON = " and platform_python_implementation == 'CPython' and sys_platform == 'linux'"
HOSTS = [f"python_version < '3.15' and platform_machine == '{name}'{COMMON}" for name in ("x86_64", "aarch64")]


def pins(project: dict[str, Any]) -> dict[str, str]:
    """The versions that the tests run with, by name."""
    dev = (entry.partition(";")[0].strip() for entry in project["dependency-groups"]["dev"])
    return {match[1]: match[2] for match in (re.fullmatch(r"([\w.-]+)==(.+)", entry) for entry in dev) if match}


def compiled(profile: str, project: dict[str, Any], held: list[str], torch_cpu: str) -> dict[str, str]:
    """What a host of this profile installs: the requirement with its marker, and its text with the hashes."""
    versions = pins(project)
    wanted = [f"multigpu[{EXTRAS}]", *(entry.format(**versions) for entry in PROFILES[profile])]
    wanted = [re.sub(r"^(multigpu\[.*?\])", rf"\1 @ {ROOT.as_uri()} ", entry) for entry in wanted]
    # The build of multigpu itself; `editables` is hatchling's, for a developer's environment.
    wanted += [*project["build-system"]["requires"], "editables"]
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-emit-package", "multigpu", "--constraint", "held.txt", "-"]
    if profile == "cpu":
        command += ["--find-links", torch_cpu]
    env = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(f"[tool.uv]\nenvironments = {HOSTS}\n", "utf-8")
        held = [*held, *(f"{name}=={version}" for name, version in versions.items() if name != "torch")]
        (Path(folder) / "held.txt").write_text("\n".join(held), "utf-8")
        done = subprocess.run(
            command, cwd=folder, input="\n".join(wanted), env=env, text=True, capture_output=True, check=False
        )
    if done.returncode:
        sys.exit(f"uv can't lock the profile {profile}: {done.stderr}")
    entries = re.split(r"\n(?=\S)", short(done.stdout.strip()))
    return {entry.split(" \\\n")[0]: entry for entry in entries}


def short(text: str) -> str:
    """Without the markers that hold on every host that the lock is for."""
    text = text.replace("python_full_version < '3.15' and ", "").replace(COMMON, "")
    text = text.replace("((platform_machine == 'aarch64') or (platform_machine == 'x86_64'))", "")
    return re.sub(r"( and| ;) *(?=\\?$)", " ", text, flags=re.MULTILINE)


def cpu_hashes(version: str, page: str) -> str:
    """Of the CPU builds, from their page: uv gives none for them."""
    with urllib.request.urlopen(page, timeout=60) as answer:
        text = answer.read().decode()
    wheel = rf"torch-{re.escape(version)}(?:\+|%2B)cpu-(cp31[1-4])-\1-manylinux\w*_(?:x86_64|aarch64)\.whl"
    found = sorted({match[2] for match in re.finditer(wheel + "#sha256=([0-9a-f]{64})", text)})
    if not found:
        sys.exit(f"there is no torch {version}+cpu on {page}")
    return "".join(f" \\\n    --hash=sha256:{digest}" for digest in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-cpu", default=TORCH_CPU, metavar="PAGE")
    torch_cpu = parser.parse_args().torch_cpu
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    held: list[str] = []
    locked: dict[str, dict[str, str]] = {}
    for profile in PROFILES:
        locked[profile] = compiled(profile, project, held, torch_cpu)
        # What the first profile took is held for the others: one version of a package, where there may be one.
        held = held or [name for name in locked[profile] if not name.startswith("torch==")]
    every = {name: entry for name, entry in locked["cpu"].items() if all(name in locked[other] for other in PROFILES)}
    (torch,) = (name for name in locked["cpu"] if name.startswith("torch=="))
    locked["cpu-torch"] = {torch: locked["cpu"].pop(torch).rstrip() + cpu_hashes(pins(project)["torch"], torch_cpu)}
    LOCK.mkdir(exist_ok=True)
    for file, entries in {"all": every, **locked}.items():
        base = "-r all.txt\n" if file in PROFILES else ""
        texts = [entry for name, entry in entries.items() if file == "all" or name not in every]
        text = f"# Made by tools/generate_lock.py: don't edit.\n{base}" + "\n".join(texts) + "\n"
        (LOCK / f"{file}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()

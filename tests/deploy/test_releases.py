"""Upgrades and rollbacks of the deploy script's services, under a --root."""

import contextlib
import os
import socket
import sqlite3
import subprocess
from pathlib import Path

import pytest
from multigpu_master.journal.sqlite.schema import SCHEMA_VERSION

from tests.deploy.deployment import deploy, deployed, environment, joining, needs_systemd


def released(root: Path) -> tuple[str, str | None, set[str]]:
    """The releases that `current` and `previous` name, and all releases."""
    opt = root / "opt/multigpu"
    previous = (opt / "previous").readlink().name if (opt / "previous").is_symlink() else None
    return (opt / "current").readlink().name, previous, {path.name for path in (opt / "releases").iterdir()}


def upgraded_twice(checkout: Path, root: Path) -> tuple[str, str]:
    """A host on its third release: the names of the second and the third."""
    names = []
    for text, arguments in (("# 1\n", ()), ("# 2\n", ("--upgrade",)), ("# 3\n", ("--upgrade",))):
        (checkout / "client/changed.py").write_text(text)
        deployed(checkout, "--root", str(root), *arguments)
        names.append(released(root)[0])
    return names[1], names[2]


@needs_systemd
def test_a_rollback_restores_the_previous_release(checkout: Path, root: Path) -> None:
    second, third = upgraded_twice(checkout, root)
    assert released(root) == (third, second, {second, third})
    deployed(checkout, "--root", str(root), "--upgrade")
    assert released(root) == (third, second, {second, third}), "an upgrade to the same code replaces nothing"
    deployed(checkout, "--root", str(root), "--rollback", "--dry-run")
    assert released(root) == (third, second, {second, third})
    deployed(checkout, "--root", str(root), "--rollback")
    assert released(root) == (second, None, {second})
    assert "there is no former release" in deploy(checkout, "--root", str(root), "--rollback").stderr


@pytest.mark.slow
@needs_systemd
@pytest.mark.parametrize("logged", [False, True])
def test_a_rollback_is_rejected_if_the_journal_is_too_new(checkout: Path, root: Path, logged: bool) -> None:
    """Also if the newer version is only in the write-ahead log of a running master."""
    second, third = upgraded_twice(checkout, root)
    journal = root / "var/lib/multigpu/journal.sqlite3"
    journal.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(journal)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        if not logged:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        before = sorted(path.name for path in journal.parent.iterdir())
        done = deploy(checkout, "--root", str(root), "--rollback")
        assert done.returncode == 1
        assert f"schema version {SCHEMA_VERSION + 1}, and the former release knows versions up to" in done.stderr
        assert released(root) == (third, second, {second, third})
        assert sorted(path.name for path in journal.parent.iterdir()) == before
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        deployed(checkout, "--root", str(root), "--rollback")
    assert released(root) == (second, None, {second})


def stand_ins(folder: Path, root: Path, release: str, systemctl: str = "") -> Path:
    """Has systemctl and the Python of a release log their arguments there."""
    log = folder / "log"
    tool = '#!/bin/sh\necho "$(basename "$0")" "$@" >>LOG\n'.replace("LOG", str(log))
    programs = root / f"opt/multigpu/releases/{release}/bin"
    for file, text in ((folder / "systemctl", tool + systemctl), (programs / "python", tool)):
        file.write_text(text)
        file.chmod(0o755)
    (programs / "mgpuctl").write_text(f'#!/bin/sh\nprintf \'"host": "{socket.gethostname()}"\\n%.0s\' 1 2\n')
    (root / "var/lib/multigpu/upgrading").mkdir(parents=True)
    return log


@pytest.mark.slow
@needs_systemd
@pytest.mark.parametrize("active", [True, False])
def test_a_rollback_replaces_the_workers_before_the_master(
    checkout: Path, tmp_path: Path, root: Path, active: bool
) -> None:
    """Checks only the order: systemctl and the previous release's Python log their arguments."""
    second, _ = upgraded_twice(checkout, root)
    log = stand_ins(tmp_path, root, second, f"[ $1 != is-active ] || exit {int(not active)}\n")
    words = f"""set -euo pipefail; prefix={root}; . tools/deploy/common.sh; . tools/deploy/machine.sh
        . tools/deploy/services.sh; prefix= dry_run=0 action=rollback listen= join= workers=; services_rollback"""
    command = ["bash", "-c", words]
    variables = environment(checkout, PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(
        command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    by_hand = [f"systemctl restart mgpu-worker@cpu-{n}.service" for n in range(2)]
    under_the_master = [f"python -m multigpu.cli.local.roll 127.0.0.1:7433 {root}/var/lib/multigpu/upgrading"]
    assert log.read_text().splitlines() == [
        "systemctl is-active --quiet mgpu-master.service",
        *(under_the_master if active else by_hand),
        "systemctl restart mgpu-master.service",
    ]
    assert released(root) == (second, None, {second})


@needs_systemd
def test_a_host_that_joined_with_tls_is_upgraded(checkout: Path, tmp_path: Path, root: Path) -> None:
    """Its keys are in /etc/multigpu since it joined: an upgrade needs no --credentials."""
    deployed(checkout, "--root", str(root), *joining(tmp_path / "credentials"))
    before, _, _ = released(root)
    (checkout / "client/changed.py").write_text("# 2\n")
    deployed(checkout, "--root", str(root), "--upgrade")
    assert released(root)[1] == before
    (root / "etc/multigpu/worker.token").unlink()
    rejected = deploy(checkout, "--root", str(root), "--upgrade")
    assert "--join needs --credentials DIR" in rejected.stderr


@pytest.mark.slow
@needs_systemd
def test_an_interrupted_upgrade_goes_on_after_the_switch(checkout: Path, tmp_path: Path, root: Path) -> None:
    """Checks only the order. The second run finds `current` switched; a third has nothing to replace."""
    second, _ = upgraded_twice(checkout, root)
    log = stand_ins(tmp_path, root, second)
    words = f"""set -euo pipefail; prefix={root}; . tools/deploy/common.sh; . tools/deploy/machine.sh
        . tools/deploy/services.sh; prefix= dry_run=0 action=upgrade listen=127.0.0.1:7433 join= secure=0
        release=$opt/releases/{second} instances=(cpu-0 cpu-1) services=(mgpu.target) units_changed=0
        switch_release; """
    variables = environment(checkout, PATH=f"{tmp_path}:{os.environ['PATH']}")
    for end in ("exit", "start_services", "start_services"):
        command = ["bash", "-c", words + end]
        subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=400, check=True)
    assert [line for line in log.read_text().splitlines() if "is-active" not in line] == [
        "systemctl restart mgpu-master.service",
        "systemctl start mgpu.target",
        f"python -m multigpu.cli.local.roll 127.0.0.1:7433 {root}/var/lib/multigpu/upgrading",
        "systemctl start mgpu-master.service",
        "systemctl start mgpu.target",
    ]

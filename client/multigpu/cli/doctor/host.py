"""Checks of this host: programs, limits, disk, ports, services, certificates."""

import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from multigpu._build import build_of
from multigpu._units import format_duration, format_size
from multigpu.cli.doctor.base import Finding, Host, SkipCheck, Verdict, fail, ok, skip, warn
from multigpu.cli.text import clean

FILES_WARN, FILES_FAIL = 1024, 256
PROCESSES_WARN = 256
SPACE_FAIL_BYTES = 256 << 20
SPACE_WARN_BYTES, SPACE_WARN_SHARE = 1 << 30, 0.05
FSYNCS, FSYNC_BYTES = 16, 4096
FSYNC_WARN_S, FSYNC_FAIL_S = 0.03, 0.5
# File systems with unreliable fsync and locks, and file systems that a reboot empties.
NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs"),
    *("fuse.sshfs", "fuse.glusterfs"),
}
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
SYSTEMCTL_TIMEOUT_S = 10.0
EXPIRES_SOON_DAYS = 14
LISTENING = "0A"


def check_versions(_: Host) -> Finding:
    """Installed packages, and whether multigpu is compiled."""
    parts = [f"Python {platform.python_version()}"]
    for package in ("multigpu", "grpcio", "protobuf", "torch", "nvidia-ml-py", "amdsmi"):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ok("versions", f"{', '.join(parts)}; multigpu is {build_of('multigpu._transport.run_state')}")


def check_limits(_: Host) -> Finding:
    """Open files and processes of this user; a service has its own limits."""
    files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    files_text = f"{files:,} open files" if files != resource.RLIM_INFINITY else "any number of open files"
    message = f"{files_text}, {processes:,} processes" if processes != resource.RLIM_INFINITY else files_text
    remedy = "`ulimit -n 65536`, or LimitNOFILE=65536 in the unit: each client and worker uses one descriptor"
    if files != resource.RLIM_INFINITY and files < FILES_WARN:
        return (fail if files < FILES_FAIL else warn)("limits", message, remedy)
    if processes != resource.RLIM_INFINITY and processes < PROCESSES_WARN:
        return warn("limits", message, "`ulimit -u 4096`, or LimitNPROC=4096 in the unit: threads count")
    return ok("limits", message)


def check_disk(host: Host) -> list[Finding]:
    """The data directory: its permissions, free space, and the time of an fsync."""
    data_dir = host.master_config.data_dir
    folder = nearest_folder(data_dir)
    shown_path = str(data_dir) if folder == data_dir.absolute() else f"{data_dir} (not there yet; {folder})"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        remedy = "run as the user that the master runs as, or choose another --data-dir"
        return [fail("disk", f"user {os.geteuid()} can't write {shown_path}", remedy)]
    findings = [_file_system(folder), _space(folder, shown_path)]
    if findings[-1].verdict is Verdict.FAIL:
        return findings  # a full disk has no space for the test file
    try:
        findings.append(judge_fsync(fsync_seconds(folder), shown_path))
    except OSError as error:
        remedy = "look for errors of the disk in `dmesg`"
        findings.append(fail("fsync", f"can't write and sync a file in {shown_path}: {error.strerror}", remedy))
    return findings


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest existing folder above it."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _space(folder: Path, shown_path: str) -> Finding:
    usage, inodes = shutil.disk_usage(folder), os.statvfs(folder)
    message = f"{format_size(usage.free)} of {format_size(usage.total)} free in {shown_path}"
    if inodes.f_files and not inodes.f_favail:
        return fail("disk", f"no inode is left in {shown_path}", "delete files, or use another --data-dir")
    if usage.free < SPACE_FAIL_BYTES:
        return fail("disk", message, "make room, or use another --data-dir: a full disk rejects durable tasks")
    if usage.free < SPACE_WARN_BYTES or usage.free < SPACE_WARN_SHARE * usage.total:
        return warn("disk", message, "make room, or set master.journal_bytes_max below what is free")
    return ok("disk", message)


def _file_system(folder: Path) -> Finding:
    kind = file_system(folder, Path("/proc/self/mountinfo").read_text("utf-8", "replace"))
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"{folder} is on {kind}: a journal needs reliable fsync and locks"
        return fail("file system", message, "keep the journal on a local disk: --data-dir")
    if kind in MEMORY_FILE_SYSTEMS:
        message = f"{folder} is on {kind}: a reboot loses every task"
        return warn("file system", message, "keep the journal on a disk: --data-dir")
    return ok("file system", f"{folder} is on {kind}")


def file_system(folder: Path, mountinfo: str) -> str:
    """The type of the folder's file system."""
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        # The kernel escapes white space and backslashes.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        if Path(point) in (folder, *folder.parents) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def fsync_seconds(folder: Path) -> float:
    """The median time of an fsync after an append of 4 KiB. Raises OSError."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".mgpuctl-doctor-") as file:
        for _ in range(FSYNCS):
            file.write(bytes(FSYNC_BYTES))
            file.flush()
            begun = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def judge_fsync(seconds: float, shown_path: str) -> Finding:
    message = f"an fsync of 4 KiB takes {format_duration(seconds)} in {shown_path}"
    if seconds < FSYNC_WARN_S:
        return ok("fsync", message)
    remedy = "a durable task is acknowledged after an fsync: use an SSD, or a quieter disk"
    return (fail if seconds >= FSYNC_FAIL_S else warn)("fsync", message, remedy)


def check_ports(host: Host) -> list[Finding]:
    """The master's ports are free, or held by the master."""
    findings = []
    for what, address in (("listen", host.master_config.listen), ("metrics", host.master_config.metrics_listen)):
        if address and not address.startswith("unix:"):
            findings.append(_port(what, address))
    return findings


def _port(what: str, address: str) -> Finding:
    host, _, port_text = address.rpartition(":")
    bare, port = host.strip("[]"), int(port_text)
    name = f"port {what}"
    if port == 0:
        return skip(name, f"{address}: any free port")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bare, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                setting = "listen" if what == "listen" else "metrics_listen"
                remedy = f"correct master.{setting}: it must be an address of this host"
                return fail(name, f"can't listen at {address}: {error.strerror}", remedy)
        else:
            return ok(name, f"{address} is free: no master runs there")
    holder = holder_of(port)
    if holder is None:
        remedy = "run this as root to see which; if it isn't the master, stop it or choose another port"
        return warn(name, f"{address} is taken by a process of another user", remedy)
    pid, command = holder
    if "multigpu_master" in command or "mgpu-master" in command:
        return ok(name, f"{address} is held by the master, pid {pid}")
    return fail(name, f"{address} is taken by pid {pid}: {command}", "stop it, or choose another port")


def holder_of(port: int) -> tuple[int, str] | None:
    """Pid and command line of the process that listens at a TCP port; None if /proc doesn't show it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(str(entry.readlink()) in wanted for entry in folder.iterdir()):
                words = (folder.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                return int(folder.parent.name), clean(words.strip())[:120]
        except OSError:
            continue  # another user's, or gone
    return None


def check_services(_: Host) -> Finding:
    """The state of the mgpu units of systemd."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        raise SkipCheck("systemd doesn't run here")
    argv = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "mgpu-*", "mgpu.target"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return warn(
            "services", f"systemctl did not answer within {SYSTEMCTL_TIMEOUT_S:g} s", "look at `systemctl status`"
        )
    if done.returncode:
        return warn("services", f"systemctl failed: {done.stderr.strip()}", "look at `systemctl status`")
    return judge_units(done.stdout)


def judge_units(listed: str) -> Finding:
    """`listed`: lines of `systemctl list-units`: UNIT LOAD ACTIVE SUB DESCRIPTION."""
    units = [line.split(maxsplit=4)[:4] for line in listed.splitlines() if len(line.split()) >= 4]
    units = [unit for unit in units if unit[1] != "not-found"]
    if not units:
        return skip("services", "no mgpu unit is loaded")
    failed = [name for name, _load, active, _sub in units if active == "failed"]
    if failed:
        return fail("services", f"failed: {', '.join(failed)}", f"`journalctl -u {failed[0]} -n 50` says why")
    pending = [f"{name} ({sub})" for name, _load, active, sub in units if active in ("activating", "reloading")]
    if pending:
        name = pending[0].split()[0]
        return warn("services", f"not up yet: {', '.join(pending)}", f"`journalctl -u {name} -n 50` if that stays so")
    return ok("services", ", ".join(f"{name} {active}" for name, _load, active, _sub in units))


def check_certificates(host: Host) -> list[Finding]:
    """Every certificate in the settings is readable and valid, and no other user can read its key."""
    certs: dict[str, str] = {}
    keys: dict[str, str] = {}
    for settings in (host.master_config, host.worker_config, host.client_config):
        for name in ("tls_cert", "tls_ca", "tls_client_ca"):
            if path := getattr(settings, name, ""):
                certs.setdefault(path, f"{settings.section}.{name}")
        if settings.tls_key:
            keys.setdefault(settings.tls_key, f"{settings.section}.tls_key")
    if not certs and not keys:
        raise SkipCheck("no TLS in the settings")
    now = datetime.now(UTC)
    findings = [_certificate(Path(path), setting, now) for path, setting in certs.items()]
    return findings + [_key(Path(path), setting) for path, setting in keys.items()]


def _certificate(path: Path, setting: str, now: datetime) -> Finding:
    from cryptography import x509  # noqa: PLC0415  slow, and needed for TLS only

    name = f"certificate {setting}"
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        return fail(
            name, f"can't read {path}: {error.strerror}", "`mgpuctl certs` makes certificates; check the file's owner"
        )
    except ValueError as error:
        return fail(name, f"{path} is not a certificate: {error}", "`mgpuctl certs` makes certificates")
    end = min(certificate.not_valid_after_utc for certificate in found)
    begin = max(certificate.not_valid_before_utc for certificate in found)
    if begin > now:
        return fail(
            name, f"{path} is not valid before {begin:%F %T} UTC", "look at this host's clock, or issue it again"
        )
    days = (end - now).total_seconds() / 86400
    if days < 0:
        return fail(name, f"{path} expired on {end:%F}", "`mgpuctl certs renew`")
    message = f"{path} is valid until {end:%F}"
    return (
        ok(name, message)
        if days >= EXPIRES_SOON_DAYS
        else warn(name, f"{message}: {days:.0f} days", "`mgpuctl certs renew`")
    )


def _key(path: Path, setting: str) -> Finding:
    name = f"key {setting}"
    try:
        mode = path.stat().st_mode
        path.open("rb").close()
    except OSError as error:
        return fail(name, f"can't read {path}: {error.strerror}", "run as the user that the daemon runs as")
    if mode & 0o007:
        return fail(name, f"every user of this host can use {path} (mode {mode & 0o777:o})", f"chmod o-rwx {path}")
    return ok(name, f"{path}: mode {mode & 0o777:o}")


CHECKS = (check_versions, check_limits, check_disk, check_ports, check_services, check_certificates)

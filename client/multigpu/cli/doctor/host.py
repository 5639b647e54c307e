"""Checks of this host: programs, disk, ports, certificates."""

import errno
import importlib.metadata
import os
import platform
import shutil
import socket
from datetime import UTC, datetime
from pathlib import Path

from multigpu.cli.doctor.base import Finding, Host, SkipCheck, fail, ok, warn
from multigpu.cli.failures import Unreachable
from multigpu.cli.text import size

SPACE_FAIL_BYTES = 256 << 20
SPACE_WARN_BYTES, SPACE_WARN_SHARE = 1 << 30, 0.05
EXPIRES_SOON_DAYS = 14


def versions(_: Host) -> list[Finding]:
    """Installed packages."""
    parts = [f"Python {platform.python_version()}"]
    for package in ("multigpu", "grpcio", "protobuf", "torch", "nvidia-ml-py"):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ok("versions", ", ".join(parts))


def disk(host: Host) -> list[Finding]:
    """The data directory: its permissions and free space."""
    data_dir = host.master_config.data_dir
    folder = nearest_folder(data_dir)
    named = str(data_dir) if folder == data_dir.absolute() else f"{data_dir} (not there yet; {folder})"
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        remedy = "run as the user that the master runs as, or choose another --data-dir"
        return fail("disk", f"user {os.geteuid()} can't write {named}", remedy)
    return _space(folder, named)


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest existing folder above it."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _space(folder: Path, named: str) -> list[Finding]:
    usage, inodes = shutil.disk_usage(folder), os.statvfs(folder)
    message = f"{size(usage.free)} of {size(usage.total)} free in {named}"
    if inodes.f_files and not inodes.f_favail:
        return fail("disk", f"no inode is left in {named}", "delete files, or use another --data-dir")
    if usage.free < SPACE_FAIL_BYTES:
        return fail("disk", message, "make room, or use another --data-dir: a full disk rejects durable tasks")
    if usage.free < SPACE_WARN_BYTES or usage.free < SPACE_WARN_SHARE * usage.total:
        return warn("disk", message, "make room, or set master.journal_bytes_max below what is free")
    return ok("disk", message)


def ports(host: Host) -> list[Finding]:
    """The master's ports are free, or the master answers."""
    findings = []
    for what, address in (("listen", host.master_config.listen), ("metrics", host.master_config.metrics_listen)):
        if address and not address.startswith("unix:"):
            findings += _port(host, f"port {what}", address)
    return findings


def _port(host: Host, name: str, address: str) -> list[Finding]:
    bare, _, port = address.rpartition(":")
    bare = bare.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bare, int(port)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                remedy = "correct it in the settings of the master: it must be an address of this host"
                return fail(name, f"can't listen at {address}: {error.strerror}", remedy)
            if isinstance(host.stats_or_failure, Unreachable):
                remedy = f"`ss -ltnp 'sport = :{port}'` as root shows it: stop it, or choose another port"
                return fail(name, f"{address} is taken, and no master answers", remedy)
            return ok(name, f"{address} is in use, and the master answers")
    return ok(name, f"{address} is free: no master runs there")


def certificates(host: Host) -> list[Finding]:
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
    findings = [finding for path, setting in certs.items() for finding in _certificate(Path(path), setting, now)]
    return findings + [finding for path, setting in keys.items() for finding in _key(Path(path), setting)]


def _certificate(path: Path, setting: str, now: datetime) -> list[Finding]:
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


def _key(path: Path, setting: str) -> list[Finding]:
    name = f"key {setting}"
    try:
        mode = path.stat().st_mode
        path.open("rb").close()
    except OSError as error:
        return fail(name, f"can't read {path}: {error.strerror}", "run as the user that the daemon runs as")
    if mode & 0o007:
        return fail(name, f"every user of this host can use {path} (mode {mode & 0o777:o})", f"chmod o-rwx {path}")
    return ok(name, f"{path}: mode {mode & 0o777:o}")


CHECKS = (versions, disk, ports, certificates)

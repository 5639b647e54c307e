"""A small certificate authority in a folder: `ca.crt`, `ca.key`, and a pair NAME.crt, NAME.key for each program.

Keys are ECDSA P-256. A URI among a certificate's names is the role of its holder: `urn:multigpu:master`,
`urn:multigpu:worker` or `urn:multigpu:client`; the master checks it. A renewal keeps the key and replaces the
certificate atomically, so that a reader of both always gets a matching pair.
"""

import contextlib
import datetime as dt
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from multigpu.cli.failures import Failure
from multigpu.daemon.files import replace_file

CA = "ca"
MASTER, WORKER, CLIENT = "master", "worker", "client"
KINDS = (MASTER, WORKER, CLIENT)
URN = "urn:multigpu:"
CA_DAYS, DAYS = 3650, 90
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Clocks differ a little between hosts.
BACKDATED = dt.timedelta(minutes=10)

RESTORE = "restore ca.crt and ca.key, or issue everything in an empty folder"

# A certificate and its key.
Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
Extensions = Sequence[tuple[x509.ExtensionType, bool]]


class AuthorityError(Failure):
    """The folder or the request is wrong."""


def init(folder: Path) -> bool:
    """Makes the authority. False: at least one of its files is there already. Raises OSError."""
    crt, key = _paths(folder, CA)
    if crt.exists() or key.exists():
        return False
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    private = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"multigpu CA {os.urandom(4).hex()}")
    extensions: Extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage(ca=True), True),
        (x509.SubjectKeyIdentifier.from_public_key(private.public_key()), False),
    ]
    ends = _now() + dt.timedelta(days=CA_DAYS)
    # The certificate last: the authority exists once it does.
    replace_file(key, _pem(private), 0o600)
    replace_file(crt, _signed(name, private.public_key(), extensions, ends, name, private), 0o644)
    return True


def issue(folder: Path, kind: str, name: str, hosts: Sequence[str], *, days: int = DAYS) -> Path:
    """A new key and certificate; replaces older ones. Returns the certificate. Raises AuthorityError, OSError."""
    if not NAME.fullmatch(name) or name == CA:
        raise AuthorityError(
            f"{name!r} can't be a certificate's name: use letters, digits, '.', '_' and '-', and not {CA!r}"
        )
    if kind == MASTER and not hosts:
        raise AuthorityError("a master's certificate needs its host names and addresses: repeat --host NAME or IP")
    private = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if kind == MASTER else ExtendedKeyUsageOID.CLIENT_AUTH
    names = [*map(_alternative, hosts), x509.UniformResourceIdentifier(URN + kind)]
    extensions: Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(ca=False), True),
        (x509.ExtendedKeyUsage([purpose]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.SubjectKeyIdentifier.from_public_key(private.public_key()), False),
    ]
    pem = _issued(_authority(folder), _named(name), private.public_key(), extensions, days)
    crt, key = _paths(folder, name)
    replace_file(key, _pem(private), 0o600)
    replace_file(crt, pem, 0o644)
    return crt


def renew(folder: Path, *, within_days: int, days: int = DAYS) -> list[Path]:
    """Extends the authority's certificates that end within some days; names and keys stay.

    Raises AuthorityError, OSError.
    """
    renewed, authority = [], _authority(folder)
    for path in sorted(folder.glob("*.crt")):
        old = read(path)
        issued_here = path.stem != CA and old.issuer == authority[0].subject
        if not issued_here or old.not_valid_after_utc > _now() + dt.timedelta(days=within_days):
            continue
        extensions = [
            (each.value, each.critical)
            for each in old.extensions
            if not isinstance(each.value, x509.AuthorityKeyIdentifier)
        ]
        replace_file(path, _issued(authority, old.subject, old.public_key(), extensions, days), 0o644)
        renewed.append(path)
    return renewed


def read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise AuthorityError(f"{path} can't be read as a certificate: {error}") from error


def _authority(folder: Path) -> Authority:
    crt, key = _paths(folder, CA)
    try:
        authority = x509.load_pem_x509_certificate(crt.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise AuthorityError(f"the authority in {folder} can't be used: {error}; {RESTORE}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or authority.public_key() != private.public_key():
        raise AuthorityError(f"{key} is not the key of {crt}; {RESTORE}")
    if authority.not_valid_after_utc < _now():
        raise AuthorityError(f"{crt} has expired; {RESTORE}")
    return authority, private


def _issued(by: Authority, subject: x509.Name, public: Any, extensions: Extensions, days: int) -> bytes:
    """A certificate that ends with its authority at the latest."""
    authority, private = by
    signed_by = (x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key()), False)
    ends = min(_now() + dt.timedelta(days=days), authority.not_valid_after_utc)
    return _signed(subject, public, [*extensions, signed_by], ends, authority.subject, private)


def _signed(
    subject: x509.Name, public: Any, extensions: Extensions, ends: dt.datetime, issuer: x509.Name, private: Any
) -> bytes:
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), _now() - BACKDATED, ends)
    for value, critical in extensions:
        builder = builder.add_extension(value, critical)
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise AuthorityError(f"{host!r} is neither an address nor a host's name: {error}") from error


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.crt", folder / f"{name}.key"


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)

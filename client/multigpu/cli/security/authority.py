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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from multigpu.cli.security.files import replace_file

CA = "ca"
MASTER, WORKER, CLIENT = "master", "worker", "client"
KINDS = (MASTER, WORKER, CLIENT)
URN = "urn:multigpu:"
CA_DAYS, DAYS = 3650, 90
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Clocks differ a little between hosts.
BACKDATED = dt.timedelta(minutes=10)


class AuthorityError(Exception):
    """The folder or the request is wrong. The message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The contents of a certificate. Times are UTC."""

    name: str
    path: Path
    kind: str
    hosts: tuple[str, ...]
    serial: str
    begins: dt.datetime
    ends: dt.datetime
    ours: bool

    @property
    def days_left(self) -> float:
        return (self.ends - _now()) / dt.timedelta(days=1)


def init(folder: Path, *, days: int = CA_DAYS) -> bool:
    """Makes the authority. False: there is one already. Raises AuthorityError, OSError."""
    crt, key = _paths(folder, CA)
    if crt.exists() and key.exists():
        _authority(folder)
        return False
    if crt.exists() or key.exists():
        there, lost = (crt, key) if crt.exists() else (key, crt)
        raise AuthorityError(
            f"{there} is there, but {lost.name} is not: restore it, or remove {there} for a new authority"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"multigpu CA {os.urandom(4).hex()}")])
    builder = (
        _builder(name, name, private.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
    )
    # The certificate last: the authority exists once it does.
    replace_file(key, _pem(private), 0o600)
    replace_file(crt, builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), 0o644)
    return True


def issue(folder: Path, kind: str, name: str, hosts: Sequence[str], *, days: int = DAYS) -> Certificate:
    """A new key and certificate; replaces older ones. Raises AuthorityError, OSError."""
    if not NAME.fullmatch(name) or name == CA:
        raise AuthorityError(
            f"{name!r} can't be a certificate's name: use letters, digits, '.', '_' and '-', and not {CA!r}"
        )
    if kind == MASTER and not hosts:
        raise AuthorityError("a master's certificate needs its host names and addresses: repeat --host NAME or IP")
    private = ec.generate_private_key(ec.SECP256R1())
    pem = _signed(folder, kind, name, hosts, private.public_key(), days)
    crt, key = _paths(folder, name)
    replace_file(key, _pem(private), 0o600)
    replace_file(crt, pem, 0o644)
    return read(folder, name)


def renew(folder: Path, name: str, *, days: int = DAYS) -> Certificate:
    """The same certificate and key with a later end. Raises AuthorityError, OSError."""
    old = read(folder, name)
    public = _load(old.path).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey), "issue() makes no others"
    replace_file(old.path, _signed(folder, old.kind, name, old.hosts, public, days), 0o644)
    return read(folder, name)


def names(folder: Path) -> list[str]:
    """The names of the certificates in the folder, without the authority's."""
    return sorted(path.stem for path in folder.glob("*.crt") if path.stem != CA)


def read(folder: Path, name: str) -> Certificate:
    """A certificate of the folder. Raises AuthorityError."""
    path, _ = _paths(folder, name)
    if not path.is_file():
        raise AuthorityError(
            f"there is no {path}; there are: {', '.join(names(folder)) or 'none; `mgpuctl certs init` makes them'}"
        )
    certificate = _load(path)
    with contextlib.suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = (*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress)))
        uris = [
            u.removeprefix(URN) for u in found.get_values_for_type(x509.UniformResourceIdentifier) if u.startswith(URN)
        ]
        return _told(folder, name, path, certificate, (uris or ["?"])[0], hosts)
    return _told(folder, name, path, certificate, CA if name == CA else "?", ())


def _told(
    folder: Path, name: str, path: Path, certificate: x509.Certificate, kind: str, hosts: tuple[str, ...]
) -> Certificate:
    ours = True
    try:
        certificate.verify_directly_issued_by(_load(_paths(folder, CA)[0]))
    except (InvalidSignature, ValueError, TypeError, AuthorityError):
        ours = False
    return Certificate(
        name=name, path=path, kind=kind, hosts=hosts, serial=f"{certificate.serial_number:x}",
        begins=certificate.not_valid_before_utc, ends=certificate.not_valid_after_utc, ours=ours,
    )  # fmt: skip


def _signed(
    folder: Path, kind: str, name: str, hosts: Sequence[str], public: ec.EllipticCurvePublicKey, days: int
) -> bytes:
    if kind not in KINDS:
        raise AuthorityError(f"{kind!r} is none of {', '.join(KINDS)}: issue the certificate again")
    authority, private = _authority(folder)
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if kind == MASTER else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(_subject(name), authority.subject, public, days, authority.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([*_alternatives(hosts), x509.UniformResourceIdentifier(URN + kind)]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternatives(hosts: Sequence[str]) -> Iterator[x509.GeneralName]:
    for host in hosts:
        try:
            yield x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            try:
                yield x509.DNSName(host)
            except ValueError as error:
                raise AuthorityError(f"{host!r} is neither an address nor a host's name: {error}") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int,
    latest: dt.datetime | None = None,
) -> x509.CertificateBuilder:  # fmt: skip
    ends = _now() + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - BACKDATED)
        .not_valid_after(min(ends, latest) if latest is not None else ends)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    crt, key = _paths(folder, CA)
    if not crt.is_file():
        raise AuthorityError(f"{folder} holds no authority: make one with `mgpuctl certs init {folder}`")
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise AuthorityError(f"the authority's key {key} can't be read: {error}") from error
    certificate = _load(crt)
    if not isinstance(private, ec.EllipticCurvePrivateKey) or certificate.public_key() != private.public_key():
        raise AuthorityError(f"{key} is not the key of {crt}: restore the one that belongs to it")
    if certificate.not_valid_after_utc < _now():
        raise AuthorityError(f"{crt} has expired: make a new authority in an empty folder, and issue everything again")
    return certificate, private


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AuthorityError(f"{path} can't be read as a certificate: {error}") from error


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.crt", folder / f"{name}.key"


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)

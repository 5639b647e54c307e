"""The addresses that a master listens on, and TLS. Without --insecure, other hosts need TLS and a token."""

import ssl
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from multigpu._transport.credentials import is_loopback
from multigpu.config.config import MasterConfig

log = structlog.get_logger()


class ListenError(Exception):
    """The master must not, or cannot, listen as configured; the text says why and what to do."""


def check(config: MasterConfig) -> None:
    """Raises ListenError if the settings would let unauthorized callers in, or contradict each other."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ListenError("tls_cert and tls_key go together: give both, or neither")
    if config.tls_client_ca and not config.tls_cert:
        raise ListenError(
            "tls_client_ca asks callers for certificates, which requires TLS: give tls_cert and tls_key too"
        )
    if not is_loopback(config.listen):
        if config.require_tokens and not config.tls_cert:
            raise ListenError(
                f"tokens would cross the network to {config.listen} in the clear: give --tls-cert and --tls-key "
                "(`mgpuctl certs` makes them), or listen on 127.0.0.1"
            )
        if not config.insecure and not (config.tls_cert and config.require_tokens):
            raise ListenError(
                f"{config.listen} can be reached from other hosts, and anyone there could run tasks and read results. "
                "Give --tls-cert, --tls-key (`mgpuctl certs` makes them) and --require-tokens; or listen on 127.0.0.1; "
                "or, on a network where every host is trusted, add --insecure"
            )
    open_metrics = config.metrics_listen and not is_loopback(config.metrics_listen)
    if open_metrics and not config.insecure and not config.tls_client_ca:
        raise ListenError(
            f"metrics_listen {config.metrics_listen} can be reached from other hosts, and the metrics name queues and "
            "workers: listen on 127.0.0.1; or give --tls-client-ca, and the scraper a certificate; or add "
            "--insecure"
        )


def open_port(server: Any, config: MasterConfig, certificates: "Certificates | None") -> int:
    """Binds config.listen and returns the port. Raises RuntimeError if the address can't be bound, for example because
    the port is in use, and ListenError if the certificates are invalid.
    """
    if certificates is None:
        return int(server.add_insecure_port(config.listen))
    credentials = grpc.dynamic_ssl_server_credentials(
        certificates.load_first(),
        certificates.new_configuration,
        require_client_authentication=bool(config.tls_client_ca),
    )
    return int(server.add_secure_port(config.listen, credentials))


# Exceptions, beside ValueError, that the package cryptography raises for certificates that it cannot parse.
_UNREADABLE = x509.InvalidVersion, x509.UnsupportedGeneralNameType, x509.DuplicateExtension


class Certificates:
    """The files of the master's certificate and key and the clients' CA. New connections use the newest valid files."""

    def __init__(self, config: MasterConfig) -> None:
        self._paths = [Path(p).expanduser() for p in (config.tls_cert, config.tls_key, config.tls_client_ca) if p]
        self._lock = threading.Lock()
        self._used: list[bytes] = []  # contents of the files that are in use
        self._logged = ""  # why the files were last rejected

    def load_first(self) -> Any:
        """Returns the first configuration for gRPC. Raises ListenError if the files are invalid."""
        self._used = contents = self._read()
        return _configuration(contents)

    def new_configuration(self) -> Any:
        """Returns a configuration if the files changed and are valid, else None. Never raises. gRPC calls this for each
        new connection, from its own threads.
        """
        with self._lock:
            try:
                if [path.read_bytes() for path in self._paths] == self._used:
                    return None
                self._used = contents = self._read()
            except (OSError, ListenError) as error:
                if str(error) != self._logged:
                    self._logged = str(error)
                    log.warning("new certificates are not used", error=str(error))
                return None
            self._logged = ""
        log.info("new certificates are in use", certificate=str(self._paths[0]))
        return _configuration(contents)

    def check_files(self) -> None:
        """Raises ListenError if the files are invalid. Does not load them: the next connection loads changed files."""
        self._read()

    def _read(self) -> list[bytes]:
        """Returns the contents of the files. Raises ListenError if a file cannot be read or is invalid, if key and
        certificate do not match, if all users may access the key, or if clients would reject the certificate.
        """
        try:
            contents = [path.read_bytes() for path in self._paths]
            key = self._paths[1]
            if key.stat().st_mode & stat.S_IRWXO:
                raise ListenError(f"every user of this host may access the key {key}: chmod o-rwx {key}")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._paths[0], self._paths[1], password=lambda: b"")  # no password prompt
            _check_server_use(self._paths[0], contents[0])
            if len(self._paths) > 2:
                context.load_verify_locations(self._paths[2])
        except (OSError, ValueError, *_UNREADABLE) as error:
            names = ", ".join(map(str, self._paths))
            raise ListenError(
                f"the certificates ({names}) are invalid: {error}; `openssl x509 -noout -text -in FILE` shows FILE"
            ) from error
        return contents


def _check_server_use(path: Path, pem: bytes) -> None:
    """Raises ListenError if clients would reject a master with this certificate."""
    certificate, now = x509.load_pem_x509_certificate(pem), datetime.now(UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise ListenError(
            f"the certificate {path} is valid from {certificate.not_valid_before_utc} to "
            f"{certificate.not_valid_after_utc}, and this host's clock says {now:%Y-%m-%d %H:%M:%S}: renew it, or set "
            "the clock"
        )
    for extension in certificate.extensions:
        value, fits = extension.value, True
        if isinstance(value, x509.ExtendedKeyUsage):
            fits = bool({ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(value))
        elif isinstance(value, x509.SubjectAlternativeName):
            fits = any(isinstance(name, x509.DNSName | x509.IPAddress) for name in value)
        if not fits:
            raise ListenError(
                f"the certificate {path} is not for servers, or names no host, so clients would reject the master: "
                "issue another with `mgpuctl certs issue DIR master --host NAME`"
            )


def _configuration(contents: list[bytes]) -> Any:
    certificate, key, *ca = contents
    return grpc.ssl_server_certificate_configuration([(key, certificate)], ca[0] if ca else None)

"""A program's credentials for a master: TLS, its certificate, its token.

Files are read when they are used: renewed certificates and tokens count from the next connection on.
"""

import contextlib
import hashlib
import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from multigpu.config.config import ConfigError

TOKEN_VARIABLE = "MGPU_TOKEN"  # noqa: S105  a name
_SECRET_BYTES_MAX = 4096


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT or unix:PATH is on this host. No name but localhost counts as such."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() in ("localhost", "localhost.")


def read_secret(file: str, what: str) -> str:
    """The text of a file with a secret. ConfigError: it can't be read, or everybody on this host may read it."""
    path = Path(file).expanduser()
    try:
        if path.stat().st_mode & stat.S_IRWXO:
            raise ConfigError(f"everybody on this host may read the {what} in {path}: chmod o-rwx {path}")
        return path.read_bytes()[:_SECRET_BYTES_MAX].decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {what} in {path} can't be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Paths; empty: none. `token`: the token itself, which takes precedence over its file."""

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""
    token: str = ""

    @classmethod
    def of(cls, config: Any, *, token: str = "") -> "Credentials":
        """From a client's or worker's config. ConfigError: its values contradict each other."""
        if bool(config.tls_cert) != bool(config.tls_key):
            raise ConfigError("tls_cert and tls_key go together: give both, or neither")
        if config.tls_cert and not config.tls_ca:
            raise ConfigError("tls_cert needs TLS: give tls_ca, the authority of the master's certificate")
        return cls(
            tls_ca=config.tls_ca, tls_cert=config.tls_cert, tls_key=config.tls_key, token_file=config.token_file,
            token=token,
        )  # fmt: skip

    @classmethod
    def of_client(cls, config: Any) -> "Credentials":
        """From a client's config, and MGPU_TOKEN."""
        return cls.of(config, token=os.environ.get(TOKEN_VARIABLE, "").strip())

    def check(self, address: str) -> None:
        """ConfigError: a file can't be used."""
        self.metadata(address)
        if self.tls_ca:
            self._texts()

    def metadata(self, address: str) -> tuple[tuple[str, str], ...] | None:
        """The metadata of every call. ConfigError: the token can't be read, or would be sent without encryption."""
        token = self.token or self._read_token()
        if not token:
            return None
        if not self.tls_ca and not is_loopback(address):
            raise ConfigError(
                f"the token would cross the network to {address} in the clear: give tls_ca (MGPU_TLS_CA), the "
                "authority of the master's certificate"
            )
        if not token.isascii() or not token.isprintable():
            raise ConfigError("the token has characters that no token has: copy it again, and nothing else")
        return (("authorization", f"Bearer {token}"),)

    def _read_token(self) -> str:
        if not self.token_file:
            return ""
        return read_secret(self.token_file, "token")

    def channel(self, address: str, options: Any, api: Any = grpc) -> Any:
        """A channel for blocking calls; with `api` grpc.aio, for the running event loop. ConfigError: a certificate
        can't be read.
        """
        if not self.tls_ca:
            return api.insecure_channel(address, options=options)
        ca, *pair = self._texts()
        cert, key = pair or (None, None)
        return api.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)

    def stamp(self) -> bytes:
        """Changes with the files of a channel. Empty without TLS, or while they can't be read."""
        with contextlib.suppress(ConfigError):
            return hashlib.sha256(b"\0".join(self._texts())).digest() if self.tls_ca else b""
        return b""

    def _texts(self) -> list[bytes]:
        texts = []
        for path in (self.tls_ca, self.tls_cert, self.tls_key):
            if path:
                try:
                    file = Path(path).expanduser()
                    texts.append(file.read_bytes())
                    if b"-----BEGIN " not in texts[-1]:
                        raise ConfigError(f'{file} is no certificate or key in PEM format ("-----BEGIN …")')
                    if path == self.tls_key and file.stat().st_mode & stat.S_IRWXO:
                        raise ConfigError(f"everybody on this host may read the key {file}: chmod o-rwx {file}")
                except OSError as error:
                    raise ConfigError(f"{path} can't be read: {error}") from error
        return texts

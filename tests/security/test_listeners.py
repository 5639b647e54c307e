"""Settings with which a master rejects to listen, and a client to send its token."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from multigpu._transport.credentials import Credentials, is_loopback
from multigpu.cli.security import authority
from multigpu.config.config import ClientConfig, ConfigError, MasterConfig
from multigpu_master.security import listeners

TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True), ("127.8.9.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/run/x", True),
        ("LOCALHOST:1", True), ("[::ffff:127.0.0.1]:1", False), ("0.0.0.0:1", False), ("[::]:1", False),
        ("10.0.0.1:1", False), ("gpu1:1", False), ("localhost.evil.org:1", False), ("128.0.0.1:1", False),
    ],
)  # fmt: skip
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("settings", "rejection"),
    [
        ({}, ""),
        ({"require_tokens": True}, ""),
        ({"listen": "unix:/run/m"}, ""),
        (TLS, ""),
        ({"listen": "0.0.0.0:1"}, "--insecure"),
        ({"listen": "[::]:1"}, "--insecure"),
        ({"listen": "gpu1:1"}, "--insecure"),
        ({"listen": "0.0.0.0:1"} | TLS, "--require-tokens"),
        ({"listen": "0.0.0.0:1", "tls_client_ca": "a"} | TLS, "--require-tokens"),
        ({"listen": "0.0.0.0:1", "require_tokens": True}, "in the clear"),
        ({"listen": "0.0.0.0:1", "require_tokens": True, "insecure": True}, "in the clear"),
        ({"listen": "0.0.0.0:1", "require_tokens": True} | TLS, ""),
        ({"listen": "0.0.0.0:1", "insecure": True}, ""),
        ({"tls_cert": "c"}, "go together"),
        ({"tls_key": "k"}, "go together"),
        ({"tls_client_ca": "a"}, "requires TLS"),
        ({"metrics_listen": "127.0.0.1:1"}, ""),
        ({"metrics_listen": "0.0.0.0:1"}, "--tls-client-ca"),
        ({"metrics_listen": "0.0.0.0:1"} | TLS, "--tls-client-ca"),
        ({"metrics_listen": "0.0.0.0:1", "tls_client_ca": "a"} | TLS, ""),
        ({"metrics_listen": "0.0.0.0:1", "insecure": True}, ""),
    ],
)
def test_allowed_listen_settings(settings: dict[str, Any], rejection: str) -> None:
    config = MasterConfig(**settings)
    if not rejection:
        listeners.check(config)
    else:
        with pytest.raises(listeners.ListenError, match=re.escape(rejection)):
            listeners.check(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--listen", "0.0.0.0:0"), "can be reached from other hosts"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "/none.crt", "--tls-key", "/none.key"), "/none.crt"),
        (("--listen", "127.0.0.1:0", "--metrics-listen", "0.0.0.0:0"), "--tls-client-ca"),
        (("--listen", "127.0.0.1:0", "--strategy", "none"), "no strategy 'none'"),
    ],
)
def test_a_real_master_does_not_start(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    assert words in rejected_words(tmp_path, *flags)


def rejected_words(folder: Path, *flags: str, code: int = 2) -> str:
    """The error of a real master on stderr, before it is ready. Exit status 2: its settings must be changed, so systemd
    does not start it again. Other errors, with 3, may pass.
    """
    command = [sys.executable, "-m", "multigpu_master.main", "--data-dir", str(folder / "d"), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == code, ended.stderr
    assert "master ready" not in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_metrics_port_in_use_is_rejected_before_the_master_is_ready(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = rejected_words(tmp_path, "--listen", "127.0.0.1:0", "--metrics-listen", address, code=3)
    assert re.fullmatch(rf"mgpu-master: metrics_listen '{address}' .* in use; choose another address\n", words), words


@pytest.mark.parametrize("kind", ["worker", "client"])
def test_a_master_with_a_certificate_of_another_kind_is_rejected(tmp_path: Path, kind: str) -> None:
    authority.init(tmp_path / "ca")
    authority.issue(tmp_path / "ca", kind, kind, [])
    pair = tmp_path / "ca" / kind
    words = rejected_words(tmp_path, "--listen", "127.0.0.1:0", "--tls-cert", f"{pair}.crt", "--tls-key", f"{pair}.key")
    assert f"{pair}.crt" in words
    assert "mgpuctl certs issue" in words


def test_a_master_whose_key_is_of_another_certificate_is_rejected(tmp_path: Path) -> None:
    authority.init(tmp_path / "ca")
    for name in ("one", "two"):
        authority.issue(tmp_path / "ca", "master", name, ["localhost"])
    files = ("--tls-cert", str(tmp_path / "ca" / "one.crt"), "--tls-key", str(tmp_path / "ca" / "two.key"))
    assert "two.key) are invalid" in rejected_words(tmp_path, "--listen", "127.0.0.1:0", *files)


def test_a_client_sends_no_token_without_tls(tmp_path: Path) -> None:
    shown = Credentials(token="mgpu_x").metadata("127.0.0.1:1")
    assert shown == (("authorization", "Bearer mgpu_x"),)
    assert Credentials(token="mgpu_x", tls_ca="ca").metadata("gpu1:1") == shown
    assert Credentials().metadata("gpu1:1") is None
    with pytest.raises(ConfigError, match="in the clear"):
        Credentials(token="mgpu_x").metadata("gpu1:1")
    for strange in ("a\nb", "ä", "\x00"):
        with pytest.raises(ConfigError, match="characters"):
            Credentials(token=strange).metadata("127.0.0.1:1")
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(" mgpu_x\n")
    assert Credentials(token_file=str(path)).metadata("127.0.0.1:1") == shown
    path.chmod(0o640)
    assert Credentials(token_file=str(path)).metadata("127.0.0.1:1") == shown
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="chmod o-rwx"):
        Credentials(token_file=str(path)).metadata("127.0.0.1:1")


def test_a_certificate_without_its_key_or_its_authority_is_rejected() -> None:
    for settings in ({"tls_cert": "c"}, {"tls_key": "k"}, {"tls_cert": "c", "tls_key": "k"}):
        with pytest.raises(ConfigError):
            Credentials.of(ClientConfig(**settings))  # type: ignore[arg-type]


def test_a_token_in_the_environment_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_TOKEN", "mgpu_verysecret")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for words in (("config", "show"), ("--master", "127.0.0.1:1", "status"), ("--version",)):
        ended = subprocess.run(
            [sys.executable, "-m", "multigpu.cli", *words], capture_output=True, text=True, timeout=30, check=False
        )
        assert "verysecret" not in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr

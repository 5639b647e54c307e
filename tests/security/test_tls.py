"""TLS: callers without it, and certificates that are invalid, expired or of another kind."""

import contextlib
import datetime as dt
import re
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID
from multigpu import errors
from multigpu._transport.credentials import Credentials
from multigpu.cli import cli
from multigpu.cli.security import authority
from multigpu.config.config import ConfigError, MasterConfig
from multigpu.v1 import task_service_pb2
from multigpu_master.metrics.master import _Certificate
from multigpu_master.security import listeners
from structlog.testing import capture_logs

from tests.fleet import until
from tests.security.secured import Caller, SecuredFleet, hello

UNAVAILABLE, PERMISSION_DENIED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED


class TlsFleet(SecuredFleet):
    """A master with a certificate that requires certificates."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.ca = folder / "ca"
        authority.init(self.ca)
        authority.issue(self.ca, "master", "master", ["localhost", "127.0.0.1"])
        authority.issue(self.ca, "worker", "worker", [])
        authority.issue(self.ca, "client", "client", [])
        self.other = folder / "other"
        authority.init(self.other)
        authority.issue(self.other, "client", "client", [])
        files = (self.ca / name for name in ("master.crt", "master.key", "ca.crt"))
        tls = zip(("--tls-cert", "--tls-key", "--tls-client-ca"), map(str, files), strict=True)
        super().__init__(folder, *(word for pair in tls for word in pair), *flags)

    def show(
        self, pair: Path | None, token: str | None = None, *, ca: Path | None = None, name: str = "localhost"
    ) -> Caller:
        """A caller with this certificate (its path without suffix) that trusts this authority."""
        key, cert = (pair.with_suffix(end).read_bytes() if pair else None for end in (".key", ".crt"))
        trusted = ((ca or self.ca) / "ca.crt").read_bytes()
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", name))
        return Caller(
            grpc.secure_channel(self.fleet.address, grpc.ssl_channel_credentials(trusted, key, cert), options), token
        )

    def caller(self, token: str | None = None) -> Caller:
        return self.show(self.ca / "client", token)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFleet]:
    with TlsFleet(tmp_path_factory.mktemp("tls")) as it:
        yield it


def test_a_certificate_and_a_token_are_accepted(secured: TlsFleet) -> None:
    assert secured.admin.probe() is grpc.StatusCode.OK
    assert secured.caller().probe() is grpc.StatusCode.UNAUTHENTICATED


def test_no_answer_without_tls(secured: TlsFleet) -> None:
    assert Caller(grpc.insecure_channel(secured.fleet.address), secured.admin_token).probe() is UNAVAILABLE


@pytest.mark.parametrize("certificate", ["none", "of another authority", "self-signed", "expired"])
def test_no_answer_without_a_valid_certificate(
    secured: TlsFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: str
) -> None:
    pair: Path | None = None
    if certificate == "of another authority":
        pair = secured.other / "client"
    elif certificate == "self-signed":
        authority.init(tmp_path / "self")
        pair = tmp_path / "self" / "ca"
    elif certificate == "expired":
        past = dt.datetime.now(dt.UTC) - dt.timedelta(days=5)
        with monkeypatch.context() as patch:
            patch.setattr(authority, "_now", lambda: past)
            authority.issue(secured.ca, "client", "old", [], days=2)
        assert authority.read(secured.ca / "old.crt").not_valid_after_utc < dt.datetime.now(dt.UTC)
        pair = secured.ca / "old"
    assert secured.show(pair, secured.admin_token).probe() is UNAVAILABLE


def test_a_client_rejects_a_false_master(secured: TlsFleet) -> None:
    pair = secured.ca / "client"
    assert secured.show(pair, secured.admin_token, ca=secured.other).probe() is UNAVAILABLE
    assert secured.show(pair, secured.admin_token, name="elsewhere").probe() is UNAVAILABLE


def test_certificates_of_workers_and_clients_are_not_interchangeable(secured: TlsFleet) -> None:
    """The certificate decides, even with a token of the other role."""
    _, work = secured.create("work", "worker")
    worker, client = secured.ca / "worker", secured.ca / "client"
    assert secured.show(worker, secured.admin_token).probe() is PERMISSION_DENIED
    assert secured.show(worker, secured.admin_token).status("TaskService/List") is PERMISSION_DENIED
    assert secured.show(client, work).open("WorkerService/Session", hello("w")).end() is PERMISSION_DENIED
    assert (
        secured.show(client, secured.admin_token).open("WorkerService/Session", hello("w")).end() is PERMISSION_DENIED
    )
    stream = secured.show(worker, work).open("WorkerService/Session", hello("w"))
    assert stream.next().HasField("welcome")
    stream.close()
    # The master's certificate is for servers only.
    assert secured.show(secured.ca / "master", secured.admin_token).probe() is UNAVAILABLE


def _sdk(secured: TlsFleet, monkeypatch: pytest.MonkeyPatch, token: str, ca: Path | None = None) -> None:
    monkeypatch.setenv("MGPU_TLS_CA", str((ca or secured.ca) / "ca.crt"))
    monkeypatch.setenv("MGPU_TLS_CERT", str(secured.ca / "client.crt"))
    monkeypatch.setenv("MGPU_TLS_KEY", str(secured.ca / "client.key"))
    monkeypatch.setenv("MGPU_TOKEN", token)


def test_a_fleet_over_tls(secured: TlsFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = secured.ca
    files = "--tls-ca", str(ca / "ca.crt"), "--tls-cert", str(ca / "worker.crt"), "--tls-key", str(ca / "worker.key")
    worker = secured.start_worker("w1", *files)
    _sdk(secured, monkeypatch, secured.create("sdk", "submit", queues=["q"])[1])
    with multigpu.Client(secured.fleet.address) as client:
        assert client.run("echo", b"x", queue="q") == b"x"
        assert client.run("echo", bytes(300_000), queue="q") == bytes(300_000)  # sent, not shared
        assert len(list(client.map("echo", [b"y"] * 500, queue="q"))) == 500
        assert client.submit("echo", b"z", queue="q").result(120) == b"z"
        with pytest.raises(errors.RejectedError, match="not for the queue"):
            client.run("echo", b"x")
    worker.stop()


def test_an_unusable_master_is_not_reported_as_absent(
    secured: TlsFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = secured.fleet.address
    port = address.rpartition(":")[2]
    (tmp_path / "text").write_text("no certificate")
    no_pem, other = str(tmp_path / "text"), str(secured.other / "client")
    cases: list[tuple[str, dict[str, str], int, str]] = [
        (f"[::ffff:127.0.0.1]:{port}", {}, 3, "is for other names: .* --host ::ffff:127.0.0.1"),
        (f"nowhere.invalid:{port}", {}, 3, "host name in the address nowhere.invalid.* is not known"),
        (address, {"MGPU_TLS_CA": no_pem}, 2, "no certificate or key in PEM"),
        (address, {"MGPU_TLS_CERT": no_pem}, 2, "no certificate or key in PEM"),
        (address, {"MGPU_TLS_CERT": "", "MGPU_TLS_KEY": ""}, 3, "closes the connection: .*tls_cert and tls_key"),
        (address, {"MGPU_TLS_CERT": f"{other}.crt", "MGPU_TLS_KEY": f"{other}.key"}, 3, "closes the connection"),
        (address, {"MGPU_TLS_CERT": f"{other}.crt"}, 3, "the key is of another certificate|closes the connection"),
        (address, {"MGPU_TLS_CA": str(secured.other / "ca.crt")}, 3, "not of the authority"),
    ]
    for at, changed, exit_code, says in cases:
        _sdk(secured, monkeypatch, secured.admin_token)
        for name, text in changed.items():
            monkeypatch.setenv(name, text)
        done = CliRunner().invoke(cli, ["--master", at, "status"])
        with multigpu.Client(at, connect_timeout_s=0.5) as client, pytest.raises(errors.TransportError) as raised:
            client.get(1)
        for text in (done.stderr, str(raised.value)):
            assert re.search(says, text), text
            assert "mgpuctl up" not in text, text
        assert done.exit_code == exit_code, done.stderr


def _serial(secured: TlsFleet) -> int:
    """The serial number of the certificate for a new connection."""
    context = ssl.create_default_context(cafile=secured.ca / "ca.crt")
    context.load_cert_chain(secured.ca / "client.crt", secured.ca / "client.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = secured.fleet.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        der = tls.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der).serial_number


def test_certificates_are_renewed_without_a_restart(secured: TlsFleet, tmp_path: Path) -> None:
    stream = secured.admin.open("TaskService/Watch", task_service_pb2.WatchRequest())
    stream.next()
    before, key = _serial(secured), (secured.ca / "master.key").read_bytes()
    assert _serial(secured) == before
    old = authority.read(secured.ca / "master.crt")
    assert secured.ca / "master.crt" not in authority.renew(secured.ca, within_days=30)
    assert secured.ca / "master.crt" in authority.renew(secured.ca, within_days=100)
    renewed = authority.read(secured.ca / "master.crt")
    names = x509.SubjectAlternativeName
    assert renewed.extensions.get_extension_for_class(names) == old.extensions.get_extension_for_class(names)
    assert _serial(secured) == renewed.serial_number != before
    assert (secured.ca / "master.key").read_bytes() == key
    assert secured.caller(secured.admin_token).probe() is grpc.StatusCode.OK
    assert stream.call.is_active()  # streams go on
    stream.close()
    # With a new key, certificate and key do not match for a moment.
    elsewhere = tmp_path / "ca"
    shutil.copytree(secured.ca, elsewhere)
    authority.issue(elsewhere, "master", "master", ["localhost", "127.0.0.1"])
    new = (elsewhere / "master.crt").read_bytes()
    (secured.ca / "master.key").write_bytes((elsewhere / "master.key").read_bytes())
    assert _serial(secured) == renewed.serial_number
    (secured.ca / "master.crt").write_text("nonsense")
    assert _serial(secured) == renewed.serial_number
    assert secured.fleet.master.events("new certificates are not used")
    (secured.ca / "master.crt").write_bytes(new)
    assert _serial(secured) == x509.load_pem_x509_certificate(new).serial_number


def test_a_connected_client_uses_its_renewed_certificate(secured: TlsFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old one expires, so its channel cannot reconnect, and it opens another."""
    now = dt.datetime.now(dt.UTC)
    monkeypatch.setattr(authority, "_now", lambda: now - dt.timedelta(days=1) + dt.timedelta(seconds=3))
    authority.issue(secured.ca, "client", "brief", [], days=1)
    monkeypatch.undo()
    _sdk(secured, monkeypatch, secured.admin_token)
    monkeypatch.setenv("MGPU_TLS_CERT", str(secured.ca / "brief.crt"))
    monkeypatch.setenv("MGPU_TLS_KEY", str(secured.ca / "brief.key"))
    with multigpu.Client(secured.fleet.address, connect_timeout_s=20) as client:
        task_id = client.submit("echo", b"x", wait_for_worker=True).id
        assert client.get(task_id).outcome is None
        end = authority.read(secured.ca / "brief.crt").not_valid_after_utc
        until(lambda: end < dt.datetime.now(dt.UTC), what="the end of the certificate")
        assert secured.ca / "brief.crt" in authority.renew(secured.ca, within_days=0)
        secured.fleet.restart_master()
        assert client.get(task_id).outcome is None
        client.cancel(task_id)


def test_metrics_on_another_address_need_a_certificate(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def mute() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        return None

    with TlsFleet(tmp_path, "--metrics-listen", f"0.0.0.0:{port}") as secured:
        held = until(mute, what="the metrics")  # a silent connection blocks no other
        context = ssl.create_default_context(cafile=secured.ca / "ca.crt")
        for url, shown in (f"https://localhost:{port}/metrics", context), (f"http://localhost:{port}/metrics", None):
            with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)) as caught:
                urllib.request.urlopen(url, context=shown, timeout=60).read()
            assert "rejected" not in str(caught.value)
        context.load_cert_chain(secured.ca / "client.crt", secured.ca / "client.key")
        text = urllib.request.urlopen(f"https://localhost:{port}/metrics", context=context, timeout=60).read()
        held.close()
        assert b"mgpu_tasks_submitted_total" in text
        certificate = x509.load_pem_x509_certificate((secured.ca / "master.crt").read_bytes())
        (expiry,) = [line for line in text.splitlines() if line.startswith(b"mgpu_certificate_expiry_timestamp")]
        assert float(expiry.split()[1]) == certificate.not_valid_after_utc.timestamp()

        def serial() -> int:
            plain = socket.create_connection(("127.0.0.1", port), timeout=10)
            with context.wrap_socket(plain, server_hostname="localhost") as tls:
                return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"").serial_number

        # The certificate is renewed a moment before its key.
        elsewhere = tmp_path / "renewed"
        shutil.copytree(secured.ca, elsewhere)
        authority.issue(elsewhere, "master", "master", ["localhost", "127.0.0.1"])
        shutil.copy(elsewhere / "master.crt", secured.ca)
        until(lambda: secured.fleet.master.events("a new certificate is not used for metrics"))
        assert serial() == certificate.serial_number
        shutil.copy(elsewhere / "master.key", secured.ca)
        until(lambda: serial() == authority.read(elsewhere / "master.crt").serial_number)

        def is_rejected() -> bool:
            try:
                urllib.request.urlopen(f"https://localhost:{port}/metrics", context=context, timeout=60).read()
            except (urllib.error.URLError, ssl.SSLError, ConnectionError):
                return True
            return False

        assert not is_rejected()
        authority.init(tmp_path / "another")
        shutil.copy(tmp_path / "another" / "ca.crt", secured.ca)
        until(is_rejected, what="the new authority of clients, with the same certificate")
        assert "Traceback" not in secured.fleet.master.log()


def test_an_error_that_comes_back_is_logged_again(tmp_path: Path) -> None:
    """The error was taken for the earlier one, although the files had been sound in between."""
    authority.init(tmp_path)
    authority.issue(tmp_path, "master", "master", ["localhost"])
    path = tmp_path / "master.crt"
    sound = path.read_bytes()
    certificate = _Certificate([str(path)])
    with capture_logs() as logs:
        for contents in (sound, b"damaged", b"damaged", sound, b"damaged"):
            path.write_bytes(contents)
            certificate.use_if_changed(lambda: None)
    assert [entry["event"] for entry in logs] == ["a new certificate is not used for metrics"] * 2


def test_a_key_readable_by_others_is_rejected(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    authority.init(ca)
    authority.issue(ca, "master", "master", ["localhost"])
    settings: dict[str, Any] = {"tls_cert": str(ca / "master.crt"), "tls_key": str(ca / "master.key")}
    listeners.Certificates(MasterConfig(**settings)).check_files()
    shown = Credentials(tls_ca=str(ca / "ca.crt"), **settings)
    shown.channel("localhost:1", ()).close()
    (ca / "master.key").chmod(0o604)
    with pytest.raises(listeners.ListenError, match="chmod o-rwx"):
        listeners.Certificates(MasterConfig(**settings)).check_files()
    with pytest.raises(ConfigError, match="chmod o-rwx"):
        shown.channel("localhost:1", ())


def test_a_certificate_with_a_name_of_a_kind_that_is_not_known_is_rejected(tmp_path: Path) -> None:
    """Neither the start nor the renewal said what was wrong."""
    private, name = ec.generate_private_key(ec.SECP256R1()), authority._named("master")
    x400_address = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x04\xa3\x02\x30\x00")
    ends = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    pem = authority._signed(name, private.public_key(), [(x400_address, False)], ends, name, private)
    (tmp_path / "crt").write_bytes(pem)
    (tmp_path / "key").write_bytes(authority._pem(private))
    (tmp_path / "key").chmod(0o600)
    config = MasterConfig(tls_cert=str(tmp_path / "crt"), tls_key=str(tmp_path / "key"))
    with pytest.raises(listeners.ListenError, match=r"are invalid.*openssl x509"):
        listeners.Certificates(config).load_first()
    assert listeners.Certificates(config).new_configuration() is None


def test_a_certificate_that_has_expired_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority.init(tmp_path)
    crt = authority.issue(tmp_path, "master", "master", ["localhost"])
    used = listeners.Certificates(MasterConfig(tls_cert=str(crt), tls_key=str(crt.with_suffix(".key"))))
    used.load_first()
    monkeypatch.setattr(authority, "_now", lambda: dt.datetime.now(dt.UTC) - dt.timedelta(days=3))
    authority.issue(tmp_path, "master", "master", ["localhost"], days=1)
    with pytest.raises(listeners.ListenError, match=r"is valid from .* renew it"):
        used.check_files()
    assert used.new_configuration() is None


def test_a_renewed_key_is_used_once_its_mode_is_mended(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    authority.init(ca)
    authority.issue(ca, "master", "master", ["localhost"])
    settings: dict[str, Any] = {"tls_cert": str(ca / "master.crt"), "tls_key": str(ca / "master.key")}
    certificates = listeners.Certificates(MasterConfig(**settings))
    certificates.load_first()
    assert certificates.new_configuration() is None
    authority.issue(ca, "master", "master", ["localhost"])
    (ca / "master.key").chmod(0o604)
    assert certificates.new_configuration() is None
    (ca / "master.key").chmod(0o600)
    assert certificates.new_configuration() is not None
    assert certificates.new_configuration() is None


def test_the_authority_is_created_once_and_explains_errors(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    with pytest.raises(authority.AuthorityError, match="restore"):
        authority.issue(ca, "worker", "w", [])
    assert authority.init(ca)
    first = (ca / "ca.crt").read_bytes()
    assert not authority.init(ca)
    assert (ca / "ca.crt").read_bytes() == first
    assert {p.name: p.stat().st_mode & 0o777 for p in ca.iterdir()} == {"ca.crt": 0o644, "ca.key": 0o600}
    problems: list[tuple[str, str, list[str], str]] = [
        ("master", "m", [], "--host"),
        ("worker", "ca", [], "name"),
        ("worker", "../x", [], "name"),
        ("client", "c", ["bad host\N{SNOWMAN}"], "neither"),
    ]
    for kind, name, hosts, words in problems:
        with pytest.raises(authority.AuthorityError, match=words):
            authority.issue(ca, kind, name, hosts)
    made = authority.read(authority.issue(ca, "worker", "w", []))
    assert made.not_valid_after_utc - made.not_valid_before_utc - authority.BACKDATED == dt.timedelta(days=90)
    (ca / "w.key").chmod(0o640)
    authority.issue(ca, "worker", "w", [])
    assert (ca / "w.key").stat().st_mode & 0o777 == 0o640  # as the user set it
    other = tmp_path / "other"
    authority.init(other)
    shutil.copy(other / "ca.key", ca / "ca.key")
    with pytest.raises(authority.AuthorityError, match="not the key of"):
        authority.issue(ca, "worker", "w", [])
    (ca / "ca.key").unlink()
    assert not authority.init(ca)
    with pytest.raises(authority.AuthorityError, match="restore"):
        authority.renew(ca, within_days=0)


def test_a_renewal_leaves_certificates_of_another_authority_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        authority.init(tmp_path / name)
        authority.issue(tmp_path / name, "worker", name, [])
    shutil.copy(tmp_path / "one" / "one.crt", tmp_path / "two")
    before = (tmp_path / "two" / "one.crt").read_bytes()
    assert authority.renew(tmp_path / "two", within_days=100) == [tmp_path / "two" / "two.crt"]
    assert (tmp_path / "two" / "one.crt").read_bytes() == before


def test_an_expired_authority_issues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority.init(tmp_path)
    monkeypatch.setattr(authority, "_now", lambda: dt.datetime.now(dt.UTC) + dt.timedelta(days=3651))
    with pytest.raises(authority.AuthorityError, match=r"ca\.crt has expired"):
        authority.issue(tmp_path, "worker", "w", [])


def test_certs_issue_makes_the_authority_and_certs_renew_renews(tmp_path: Path) -> None:
    def certs(*words: str) -> Any:
        return CliRunner().invoke(cli, ["certs", *words])

    ca = tmp_path / "ca"
    first = certs("issue", str(ca), "worker", "--days", "20")
    assert (first.exit_code, first.stderr) == (0, f"{ca}: a new authority\n")
    assert first.stdout.startswith(f"{ca}/worker.crt: valid until ")
    second = certs("issue", str(ca), "client")
    assert (second.exit_code, second.stderr) == (0, "")
    renewed = certs("renew", str(ca))
    assert renewed.stdout.startswith(f"{ca}/worker.crt: valid until ")
    assert len(renewed.stdout.splitlines()) == 1
    assert certs("renew", str(ca)).stdout == "nothing to renew: no certificate ends within 30 days\n"
    (ca / "client.crt").write_text("damaged")
    assert "client.crt can't be read as a certificate" in certs("renew", str(ca)).stderr
    assert "can't be used" in certs("renew", str(tmp_path / "none")).stderr


def test_certificates_of_another_authority_are_accepted(secured: TlsFleet, tmp_path: Path) -> None:
    """As docs/security.md describes them; here openssl is the other authority, with the fleet's key."""
    names = "subjectAltName=URI:urn:multigpu:client\nextendedKeyUsage=clientAuth\n"
    (tmp_path / "names").write_text(names)
    request = ("req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=alice", "-keyout", "alice.key")
    sign = ("x509", "-req", "-in", "alice.csr", "-extfile", "names", "-days", "1", "-set_serial", "7")
    by = ("-CA", str(secured.ca / "ca.crt"), "-CAkey", str(secured.ca / "ca.key"))
    for words in ((*request, "-out", "alice.csr"), (*sign, *by, "-out", "alice.crt")):
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True, timeout=400)
    assert secured.show(tmp_path / "alice", secured.admin_token).probe() is grpc.StatusCode.OK

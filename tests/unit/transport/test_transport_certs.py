"""Mutual TLS over real sockets: who is let in, who is not, and what people are told."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import os
import socket
import ssl
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from geo_ray.base.errors import CertificateError, GeoRayError, PeerRefusedError
from geo_ray.cli.certs import certs
from geo_ray.transport.security import cert_store
from geo_ray.transport.security.certs import (
    Authority,
    issue_for_run,
    new_key,
    pem_of_key,
    read_cert,
    read_key,
)
from geo_ray.transport.security.tls import (
    Encryption,
    TlsBytes,
    TlsFiles,
    client_context,
    expect_region,
    explain,
    peer_region,
    refusal,
    region_uri,
    server_context,
)
from tests.support.wan_support import open_files

WAIT_S = 60.0
LONG_AGO = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
FAR_AHEAD = dt.datetime.now(dt.UTC) + dt.timedelta(days=100)

Wrap = Callable[[socket.socket], ssl.SSLSocket]
Ended = (
    str | OSError | PeerRefusedError
)  # the region of the other end, or why there is no connection


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("test CA")


@pytest.fixture(scope="module")
def east(authority: Authority) -> TlsBytes:
    return authority.issue("us-east")


@pytest.fixture(scope="module")
def west(authority: Authority) -> TlsBytes:
    return authority.issue("eu-west", hosts=["bridge.example", "10.0.0.7"])


def as_server(source: TlsBytes | TlsFiles) -> Wrap:
    context = server_context(source)
    return lambda sock: lazy(context, sock, server_side=True)


def as_client(source: TlsBytes | TlsFiles) -> Wrap:
    context = client_context(source)
    return lambda sock: lazy(context, sock)


def lazy(
    context: ssl.SSLContext, sock: socket.socket, *, server_side: bool = False
) -> ssl.SSLSocket:
    return context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)


def bare_client() -> ssl.SSLContext:
    """Trusts everybody and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def meet(server: Wrap, client: Wrap) -> tuple[Ended, Ended]:
    """Let both ends shake hands and pass a byte each way; what the server and the client got."""

    def end(wrap: Wrap, sock: socket.socket, results: list[Ended]) -> None:
        sock.settimeout(WAIT_S)
        try:
            with wrap(sock) as tls:
                try:
                    results.append(exchange(tls))
                except (OSError, PeerRefusedError) as error:
                    results.append(error)
                    # To close with unread bytes would be a reset, and that may overtake the alert.
                    with contextlib.suppress(OSError):
                        tls.shutdown(socket.SHUT_WR)
                        while tls.recv(4096):
                            pass
        finally:
            sock.close()

    def exchange(tls: ssl.SSLSocket) -> str:
        if isinstance(tls, ssl.SSLSocket):
            tls.do_handshake()
        tls.sendall(b"x")
        # With TLS 1.3 a refused client learns of it only here.
        if tls.recv(1) != b"x":
            raise ssl.SSLEOFError("the peer hung up")
        return peer_region(tls)

    at_server: list[Ended] = []
    at_client: list[Ended] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname(), WAIT_S)
        accepted, _ = listener.accept()
    thread = threading.Thread(target=end, args=(server, accepted, at_server))
    thread.start()
    end(client, dialed, at_client)
    thread.join(WAIT_S)
    return at_server[0], at_client[0]


def meet_quietly(server: Wrap, client: Wrap) -> Ended:
    """As `meet`, where the server does not find a region; what the client got."""
    at_server, at_client = meet(server, client)
    assert isinstance(at_server, PeerRefusedError)
    return at_client


def signed_with(authority: Authority, names: list[x509.GeneralName]) -> TlsBytes:
    """A valid certificate of the deployment with other names than geo-ray writes."""
    key = new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "odd")])
    ca_key = read_key(authority.key_pem)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.cert.not_valid_before_utc)
        .not_valid_after(authority.cert.not_valid_after_utc)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(identifier, False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("bridge.example"), *names]), False)
    )
    cert = builder.sign(ca_key, hashes.SHA256())
    pem = cert.public_bytes(serialization.Encoding.PEM)
    return TlsBytes(authority.cert_pem, pem, pem_of_key(key))


def reason(ended: Ended) -> str:
    assert isinstance(ended, ssl.SSLError), repr(ended)
    return explain(ended)


# ------------------------------------------------------------------ handshakes


def test_two_regions_of_one_deployment_know_each_other(east: TlsBytes, west: TlsBytes) -> None:
    assert meet(as_server(east), as_client(west)) == ("eu-west", "us-east")
    assert meet(as_server(west), as_client(east)) == ("us-east", "eu-west")


def test_files_do_as_well_as_bytes(tmp_path: Path, west: TlsBytes) -> None:
    cert_store.init(tmp_path)
    one = cert_store.issue(tmp_path, "us-east")
    two = cert_store.issue(tmp_path, "eu-west")
    assert meet(as_server(one), as_client(two)) == ("eu-west", "us-east")
    at_server, at_client = meet(as_server(one), as_client(west))
    assert "another CA" in reason(at_client)
    assert not isinstance(at_server, str)


def test_another_ca_is_refused_by_both(east: TlsBytes) -> None:
    stranger = Authority.create("another CA").issue("eu-west")
    at_server, at_client = meet(as_server(east), as_client(stranger))
    assert "another CA" in reason(at_client)
    assert "does not know the CA" in reason(at_server)


def test_a_client_of_another_ca_is_refused_by_the_server(east: TlsBytes) -> None:
    stranger = Authority.create("another CA").issue("eu-west")
    trusting = TlsBytes(east.ca_pem, stranger.cert_pem, stranger.key_pem)
    at_server, at_client = meet(as_server(east), as_client(trusting))
    assert "another CA" in reason(at_server)
    assert "does not know the CA" in reason(at_client)


def test_the_same_name_for_another_ca_does_not_help(east: TlsBytes) -> None:
    stranger = Authority.create("test CA").issue("eu-west")
    trusting = TlsBytes(east.ca_pem, stranger.cert_pem, stranger.key_pem)
    at_server, at_client = meet(as_server(east), as_client(trusting))
    assert isinstance(at_server, ssl.SSLError)
    assert isinstance(at_client, OSError)


@pytest.mark.parametrize(
    ("now", "says"), [(LONG_AGO, "expired"), (FAR_AHEAD, "not valid yet")], ids=["old", "young"]
)
def test_dates_are_checked_by_both(
    authority: Authority, east: TlsBytes, now: dt.datetime, says: str
) -> None:
    outdated = authority.issue("eu-west", days=10, now=now)
    at_server, at_client = meet(as_server(east), as_client(outdated))
    assert says in reason(at_server)
    assert "not valid" in reason(at_client)  # what the alert can say
    at_server, at_client = meet(as_server(outdated), as_client(east))
    assert says in reason(at_client)
    assert isinstance(at_server, ssl.SSLError)


def test_a_certificate_of_another_region_is_refused(east: TlsBytes, west: TlsBytes) -> None:
    context = client_context(west)

    def dial(sock: socket.socket) -> ssl.SSLSocket:
        tls = context.wrap_socket(sock)
        expect_region(tls, "us-east")
        with pytest.raises(PeerRefusedError, match=r"'ap-south'.*'us-east'"):
            expect_region(tls, "ap-south")
        return tls

    assert meet(as_server(east), dial) == ("eu-west", "us-east")


def test_a_client_without_certificate_is_refused(east: TlsBytes) -> None:
    at_server, at_client = meet(as_server(east), lambda sock: lazy(bare_client(), sock))
    assert "showed no certificate" in reason(at_server)
    assert "was shown none" in reason(at_client)


@pytest.mark.parametrize(
    "names", [[], ["us-east", "eu-west"], [""]], ids=["no region", "two regions", "empty"]
)
def test_a_good_certificate_that_does_not_name_one_region_is_refused(
    authority: Authority, east: TlsBytes, names: list[str]
) -> None:
    odd = signed_with(authority, [x509.UniformResourceIdentifier(region_uri(n)) for n in names])
    context = server_context(east)

    def accept(sock: socket.socket) -> ssl.SSLSocket:
        tls = context.wrap_socket(sock, server_side=True)
        with pytest.raises(PeerRefusedError, match="names"):
            peer_region(tls)
        return tls

    assert meet_quietly(accept, as_client(odd)) == "us-east"


def test_plaintext_against_a_tls_server(east: TlsBytes) -> None:
    class Plain:
        """Speaks no TLS, and waits for the server's verdict."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def __enter__(self) -> socket.socket:
            self._sock.sendall(b"GEOR" + bytes(60))
            return self._sock

        def __exit__(self, *_: object) -> None:
            self._sock.close()

    at_server, at_client = meet(as_server(east), Plain)  # type: ignore[arg-type]
    assert "does not speak TLS" in reason(at_server)
    assert isinstance(at_client, OSError)


def test_tls_against_a_plaintext_server(west: TlsBytes) -> None:
    def plain(sock: socket.socket) -> ssl.SSLSocket:
        sock.sendall(b"GEOR" + bytes(60))
        return sock  # type: ignore[return-value]

    _, at_client = meet(plain, as_client(west))
    assert "does not speak TLS" in reason(at_client)


def test_tls_1_2_is_refused_in_both_roles(east: TlsBytes, west: TlsBytes) -> None:
    def old(context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    client = old(client_context(west))
    at_server, at_client = meet(as_server(east), lambda sock: lazy(client, sock))
    assert "no TLS 1.3" in reason(at_server)
    assert "no TLS 1.3" in reason(at_client)
    server = old(server_context(east))
    at_server, at_client = meet(lambda sock: lazy(server, sock, server_side=True), as_client(west))
    assert "no TLS 1.3" in reason(at_server)
    assert "no TLS 1.3" in reason(at_client)


def test_a_certificate_of_a_region_cannot_issue_others(east: TlsBytes, west: TlsBytes) -> None:
    forger = Authority.from_pem(west.cert_pem, west.key_pem)
    forged = forger.issue("ap-south")
    chain = TlsBytes(east.ca_pem, forged.cert_pem + west.cert_pem, forged.key_pem)
    at_server, at_client = meet(as_server(east), as_client(chain))
    assert isinstance(at_server, ssl.SSLCertVerificationError)
    assert isinstance(at_client, OSError)


def test_a_failed_handshake_becomes_a_typed_error() -> None:
    error = refusal(ssl.SSLEOFError("gone"), "eu-west")
    assert isinstance(error, PeerRefusedError)
    assert "eu-west" in error.message and "its log has the reason" in error.message


# ------------------------------------------------------------------ certificates in memory


def test_wrapping_a_lost_connection_closes_it(east: TlsBytes) -> None:
    """Whoever keeps the error must not keep the socket open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    # Closing without time to linger resets the connection.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    name = f"socket:[{os.fstat(ours.fileno()).st_ino}]"
    assert name in open_files()
    with pytest.raises(OSError, match="reset") as caught:
        Encryption("required", east).dialed(ours)
    assert caught.value.__traceback__ is not None  # it holds the frames
    assert name not in open_files()


def test_a_run_makes_its_own_and_keeps_keys_out_of_sight() -> None:
    made = issue_for_run("run-1", ["us-east", "eu-west"])
    assert meet(as_server(made["us-east"]), as_client(made["eu-west"])) == ("eu-west", "us-east")
    assert "PRIVATE" not in repr(made) and "KEY" not in str(made)
    other = issue_for_run("run-1", ["us-east", "eu-west"])
    assert not isinstance(meet(as_server(made["us-east"]), as_client(other["eu-west"]))[0], str)


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a" * 64, "a b", "ü"])
def test_names_that_are_no_labels_are_refused(authority: Authority, name: str) -> None:
    with pytest.raises(CertificateError, match="region's name"):
        authority.issue(name)


@pytest.mark.parametrize("name", ["a", "us-east-1", "A_b.c", "a" * 63])
def test_names_come_back_as_they_were(authority: Authority, east: TlsBytes, name: str) -> None:
    assert meet(as_server(east), as_client(authority.issue(name)))[0] == name


def test_a_key_of_another_certificate_is_refused(east: TlsBytes, west: TlsBytes) -> None:
    for wrong in (
        TlsBytes(east.ca_pem, east.cert_pem, west.key_pem),
        TlsBytes(b"no PEM", east.cert_pem, east.key_pem),
        TlsBytes(east.ca_pem, b"no PEM", east.key_pem),
        TlsBytes(b"\xff\xfe", east.cert_pem, east.key_pem),
    ):
        with pytest.raises(CertificateError) as caught:
            server_context(wrong)
        assert "PRIVATE" not in str(caught.value)


def test_an_encrypted_key_is_an_error_and_no_question(east: TlsBytes) -> None:
    key = serialization.load_pem_private_key(east.key_pem, None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    with pytest.raises(CertificateError):
        server_context(TlsBytes(east.ca_pem, east.cert_pem, encrypted))


def test_loading_leaves_no_key_behind(east: TlsBytes) -> None:
    server_context(east)
    with pytest.raises(CertificateError):
        server_context(TlsBytes(east.ca_pem, b"no PEM", east.key_pem))
    places = ("/dev/shm", tempfile.gettempdir())
    left = [p for place in places for p in Path(place).glob(f"geo-ray-tls-{os.getpid()}-*")]
    assert not left


# ------------------------------------------------------------------ the command


def run(*arguments: object, error: type[GeoRayError] | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(certs, [str(argument) for argument in arguments])
    if error is None:
        assert result.exit_code == code, result.output
    else:
        assert type(result.exception) is error, result.output
    return result


def test_init_issue_show_renew(tmp_path: Path) -> None:
    home = tmp_path / "deployment"
    run("init", home)
    shown = run("issue", "us-east", "--dir", home, "--host", "10.1.2.3", "--host", "b.example")
    assert str(home / "regions" / "us-east") in shown.output.replace("\n", "")
    run("issue", "eu-west", "--dir", home, "--days", 10)
    for key in (home / "ca.key", home / "regions/us-east/key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    entries = {entry.name: entry for entry in cert_store.entries(home)}
    assert set(entries) == {"CA", "us-east", "eu-west"}
    assert entries["us-east"].hosts == ("b.example", "10.1.2.3")
    assert "renew soon" in run("show", home).output

    key = (home / "regions/eu-west/key.pem").read_bytes()
    run("renew", "eu-west", "--dir", home, "--days", 400)
    renewed = {entry.name: entry for entry in cert_store.entries(home)}
    assert renewed["eu-west"].not_after > entries["eu-west"].not_after
    assert renewed["us-east"].not_after == entries["us-east"].not_after
    assert (home / "regions/eu-west/key.pem").read_bytes() == key
    run("renew", "--dir", home)
    east, west = (TlsFiles.in_directory(home / "regions" / n) for n in ("us-east", "eu-west"))
    assert meet(as_server(east), as_client(west)) == ("eu-west", "us-east")
    assert not list(home.rglob("*.tmp"))


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    run("init", tmp_path)
    run("issue", "us-east", "--dir", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run("init", tmp_path, error=CertificateError)
    run("issue", "us-east", "--dir", tmp_path, error=CertificateError)
    assert {path: path.read_bytes() for path in before} == before
    run("issue", "us-east", "--dir", tmp_path, "--force")
    assert (tmp_path / "regions/us-east/key.pem").read_bytes() != before[
        tmp_path / "regions/us-east/key.pem"
    ]
    run("init", tmp_path, "--force")
    assert "from another CA" in run("show", tmp_path, code=1).output


def test_a_renewed_ca_still_vouches_for_old_certificates(tmp_path: Path) -> None:
    run("init", tmp_path)
    run("issue", "us-east", "--dir", tmp_path)
    old = TlsFiles.in_directory(tmp_path / "regions/us-east").read()
    run("renew", "--ca", "--dir", tmp_path, "--days", 5000)
    run("issue", "eu-west", "--dir", tmp_path)
    new = TlsFiles.in_directory(tmp_path / "regions/eu-west")
    assert meet(as_server(old), as_client(new)) == ("eu-west", "us-east")
    assert (tmp_path / "regions/us-east/ca.pem").read_bytes() == (tmp_path / "ca.pem").read_bytes()


def test_an_expired_certificate_is_shown_as_such(tmp_path: Path) -> None:
    authority = cert_store.init(tmp_path)
    files = cert_store.issue(tmp_path, "us-east")
    Path(files.cert).write_bytes(authority.issue("us-east", days=1, now=LONG_AGO).cert_pem)
    assert "EXPIRED" in run("show", tmp_path, code=1).output


def test_missing_fields_are_named(tmp_path: Path) -> None:
    run("show", tmp_path, error=CertificateError)
    run("issue", "us-east", "--dir", tmp_path, error=CertificateError)
    run("init", tmp_path)
    run("renew", "us-east", "--dir", tmp_path, error=CertificateError)
    run("renew", "us-east", "--ca", "--dir", tmp_path, code=2)
    missing = TlsFiles.in_directory(tmp_path / "nowhere")
    with pytest.raises(CertificateError, match="nowhere"):
        client_context(missing)
    (tmp_path / "ca.key").write_text("no key")
    run("issue", "us-east", "--dir", tmp_path, error=CertificateError)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run("init", tmp_path / "file" / "below", error=CertificateError)


def test_a_curve_that_is_not_known_is_a_certificate_error() -> None:
    authority = Authority.create("ca")
    p256, unknown = b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d\x03\x01\x63"

    def odd(pem: bytes) -> bytes:
        head, *lines, tail = pem.strip().splitlines()
        der = base64.b64decode(b"".join(lines))
        assert p256 in der
        body = base64.encodebytes(der.replace(p256, unknown))
        return head + b"\n" + body + tail + b"\n"

    cert_pem = authority.cert.public_bytes(serialization.Encoding.PEM)
    read_cert(cert_pem)
    with pytest.raises(CertificateError):
        read_cert(odd(cert_pem))
    with pytest.raises(CertificateError):
        read_key(odd(pem_of_key(new_key())))

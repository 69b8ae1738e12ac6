"""Mutual TLS: which clients are admitted, half-close both ways, and hijacked streams that the
daemon relays."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engine.errors import ServerError
from engine.http.messages import AnyReply, Reply, Request
from engine.http.server import Server
from engine.http.tls import mutual_context
from engine.system.tls import verifying_context
from tests.support import PATIENCE
from tests.unit.http.harness import SHORT, App, answers, serve, until

RAW = "application/vnd.docker.raw-stream"


class Certificates(NamedTuple):
    authority: str
    server: ssl.SSLContext
    client: Callable[[], ssl.SSLContext]
    anonymous: Callable[[], ssl.SSLContext]
    stranger: Callable[[], ssl.SSLContext]


def _issue(directory: Path, name: str, issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_name, issuer_key = issuer or (subject, key)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    cert_path, key_path = directory / f"{name}.pem", directory / f"{name}.key"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(cert_path), str(key_path)


def _authority(directory: Path, name: str) -> tuple[str, tuple[x509.Name, ec.EllipticCurvePrivateKey]]:
    certificate, key = _issue(directory, name, None)
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    assert isinstance(loaded, ec.EllipticCurvePrivateKey)
    return certificate, (x509.load_pem_x509_certificate(Path(certificate).read_bytes()).subject, loaded)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("tls")
    authority, issuer = _authority(directory, "authority")
    _, other_issuer = _authority(directory, "other")
    server = _issue(directory, "server", issuer)
    client = _issue(directory, "client", issuer)
    stranger = _issue(directory, "stranger", other_issuer)

    def make(pair: tuple[str, str] | None) -> ssl.SSLContext:
        context = verifying_context(authority=authority)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context

    return Certificates(
        authority, mutual_context(authority, *server), lambda: make(client), lambda: make(None), lambda: make(stranger)
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


class Client:
    """A blocking TLS client that can half-close, as Go's can and asyncio's cannot."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self.raw = socket.create_connection(("127.0.0.1", port), timeout=10 * PATIENCE)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")
        self._kept = bytearray()
        self._until(self.tls.do_handshake)

    def _until(self, act: Callable[[], object]) -> object:
        while True:
            try:
                result = act()
                self._flush()
                return result
            except ssl.SSLWantReadError:
                self._flush()
                data = self.raw.recv(65536)
                if data:
                    self.incoming.write(data)
                else:
                    self.incoming.write_eof()

    def _flush(self) -> None:
        if self.outgoing.pending:
            self.raw.sendall(self.outgoing.read())

    def send(self, data: bytes) -> None:
        self.tls.write(data)
        self._flush()

    def receive(self) -> bytes:
        if self._kept:
            kept, self._kept = bytes(self._kept), bytearray()
            return kept
        try:
            data = self._until(lambda: self.tls.read(65536))
        except ssl.SSLZeroReturnError:
            return b""
        assert isinstance(data, bytes)
        return data

    def receive_all(self) -> bytes:
        received = b""
        while piece := self.receive():
            received += piece
        return received

    def receive_until(self, end: bytes) -> bytes:
        received = b""
        while not received.endswith(end):
            piece = self.receive()
            assert piece, received
            received += piece
        return received

    def close_write(self) -> None:
        # SSL_shutdown(3) treats pending data as an error, so it is read first.
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self.tls.read(65536):
                self._kept += data
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self._flush()

    def close(self) -> None:
        self.raw.close()


def with_client(path: str, certificates: Certificates, act: Callable[[Client, App], None]) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        port = await server.listen_tcp("127.0.0.1", 0, certificates.server)

        def run() -> None:
            client = Client(port, certificates.client())
            try:
                act(client, app)
            finally:
                client.close()

        await asyncio.to_thread(run)
        await until(lambda: not server.connections)

    serve(scenario, path)


def test_requests(path: str, certificates: Certificates) -> None:
    def act(client: Client, app: App) -> None:
        for _ in range(3):
            client.send(b"GET /sync HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answers(client.receive_until(b"}\n"))[0].status == 200
        body = os.urandom(2_000_000)
        client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 100_000):
            client.send(body[at : at + 100_000])
        assert answers(client.receive_all())[0].body == body

    with_client(path, certificates, act)


def test_pages_of_other_sites_are_refused(path: str, certificates: Certificates) -> None:
    """A browser presents the client's certificate for any page."""

    def act(client: Client, app: App) -> None:
        client.send(b"POST /sync HTTP/1.1\r\nHost: engine:2376\r\nSec-Fetch-Site: cross-site\r\n\r\n")
        client.send(b"POST /sync HTTP/1.1\r\nHost: engine:2376\r\nConnection: close\r\n\r\n")
        assert [each.status for each in answers(client.receive_all())] == [403, 200]
        assert len(app.requests) == 1

    with_client(path, certificates, act)


def test_slow_handler_of_a_large_body(path: str, certificates: Certificates) -> None:
    """When reading is paused, decrypted bytes remain buffered; they must be delivered when it
    resumes."""

    def act(client: Client, app: App) -> None:
        async def count(request: Request) -> AnyReply:
            size = 0
            async for chunk in request.body:
                size += len(chunk)
                await asyncio.sleep(0.002)
            return Reply(200, b"%d\n" % size)

        app.extra["count"] = count
        client.send(b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        client.send(b"x" * 3_000_000)
        assert answers(client.receive_until(b"3000000\n"))[0].status == 200

    with_client(path, certificates, act)


def test_half_close_still_gets_the_answer(path: str, certificates: Certificates) -> None:
    def act(client: Client, app: App) -> None:
        client.send(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        client.close_write()
        found = answers(client.receive_all())
        assert found[0].complete and found[0].body.startswith(b"onetwo")

    with_client(path, certificates, act)


def test_stream_under_way_ends_when_the_client_leaves(path: str, certificates: Certificates) -> None:
    def act(client: Client, app: App) -> None:
        client.send(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        client.receive_until(b"first\r\n")

    with_client(path, certificates, act)


@pytest.mark.parametrize("early", [b"", b"early stdin", b"e" * 200_000], ids=["later", "early", "much"])
def test_hijack_is_relayed_with_half_close(path: str, certificates: Certificates, early: bytes) -> None:
    """`cat` at the other end of a pair: all bytes are echoed, also after the client has closed its
    side."""
    size = 1_500_000

    def act(client: Client, app: App) -> None:
        tasks: list[asyncio.Task[None]] = []

        async def cat(end: socket.socket, early: bytes) -> None:
            reader, writer = await asyncio.open_connection(sock=end)
            writer.write(early)
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write(b"<the end>")
            await writer.drain()
            writer.write_eof()
            writer.close()

        async def hijack(request: Request) -> AnyReply:
            taken = await request.hijack(RAW)
            descriptor = taken.descriptor()
            end = socket.socket(fileno=os.dup(descriptor))
            os.close(descriptor)
            tasks.append(asyncio.get_running_loop().create_task(cat(end, taken.head + taken.early)))
            return taken.release()

        app.extra["hijack"] = hijack
        client.send(b"POST /hijack HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n" + early)
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.receive()
        head, _, received = head.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 UPGRADED")
        while len(received) < len(early):
            received += client.receive()
        data = os.urandom(size)
        for at in range(0, size, 50_000):
            client.send(data[at : at + 50_000])
            while len(received) < len(early) + at:
                received += client.receive()
        client.close_write()
        received += client.receive_all()
        assert received == early + data + b"<the end>"

    with_client(path, certificates, act)


def test_hijack_whose_owner_hangs_up(path: str, certificates: Certificates) -> None:
    def act(client: Client, app: App) -> None:
        async def hijack(request: Request) -> AnyReply:
            taken = await request.hijack(RAW)
            descriptor = taken.descriptor()
            os.write(descriptor, taken.head + b"bye")
            os.close(descriptor)
            return taken.release()

        app.extra["hijack"] = hijack
        client.send(b"POST /hijack HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.receive_all().endswith(b"\r\n\r\nbye")

    with_client(path, certificates, act)


def test_hijack_that_fails(path: str, certificates: Certificates) -> None:
    def act(client: Client, app: App) -> None:
        async def hijack(request: Request) -> AnyReply:
            os.close((await request.hijack(RAW)).descriptor())
            raise ServerError("the monitor is away")

        app.extra["hijack"] = hijack
        for _ in range(2):
            client.send(b"POST /hijack HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answers(client.receive_until(b"}\n"))[0].status == 500

    with_client(path, certificates, act)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
def test_a_client_without_tls_is_told(path: str, certificates: Certificates, method: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        port = await server.listen_tcp("127.0.0.1", 0, certificates.server)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} /_ping HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert await reader.read() == (
            b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
        )
        writer.close()

    serve(scenario, path)


@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated")
def test_only_known_clients_come_in(path: str, certificates: Certificates) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        port = await server.listen_tcp("127.0.0.1", 0, certificates.server)

        def refused(make: Callable[[], ssl.SSLContext]) -> None:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                client = Client(port, make())
                client.send(b"GET /sync HTTP/1.0\r\n\r\n")
                # with TLS 1.3 the refusal arrives after the client's own handshake
                client.receive()

        await asyncio.to_thread(refused, certificates.anonymous)
        await asyncio.to_thread(refused, certificates.stranger)
        old = certificates.client()
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        await asyncio.to_thread(refused, lambda: old)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read(-1) == b""  # the server sends nothing
        writer.close()
        assert not app.requests

    serve(scenario, path, SHORT)


def test_contexts_that_ask_for_too_little(path: str, certificates: Certificates) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        lax = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.authority)
        with pytest.raises(ServerError, match="client certificates"):
            await server.listen_tcp("127.0.0.1", 0, lax)
        lax.verify_mode = ssl.CERT_REQUIRED
        lax.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.raises(ServerError, match=r"before 1\.2"):
            await server.listen_tcp("127.0.0.1", 0, lax)

    serve(scenario, path)

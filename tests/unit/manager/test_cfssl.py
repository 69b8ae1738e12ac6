"""External CAs over HTTP and HTTPS: what is asked for, and every answer that is not accepted."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidParameter, ServerError
from engine.manager import cfssl, keys
from engine.manager.certificates import Root, Subject, certificates, issued_by, new_root, request_key, subject_of
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Role
from engine.wire.swarm import ExternalCA

NOW = time.time_ns()
HOUR = 3600 * SECOND
SUBJECT = Subject("n" * 25, Role.MANAGER, "s" * 25)
WORKER = SUBJECT._replace(role=Role.WORKER)
ADDRESS = "10.0.0.1:2377"

Answer = Callable[[str, dict[str, Any]], tuple[int, bytes]]


class External:
    """A cfssl server with the root's key."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.root = Root(*new_root(NOW))
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.clients: list[bytes | None] = []
        self.answer: Answer = self.sign
        external = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                external.asked.append((self.path, document))
                if isinstance(self.connection, ssl.SSLSocket):
                    external.clients.append(self.connection.getpeercert(True))
                status, body = external.answer(self.path, document)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://localhost:{self.server.server_port}/api/v1/cfssl/sign"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def sign(self, path: str, document: dict[str, Any]) -> tuple[int, bytes]:
        if path.endswith("/info"):
            return 200, good(self.root.pem)
        names = document["subject"]["names"][0]
        role = Role.MANAGER if names["OU"] == "swarm-manager" else Role.WORKER
        subject = Subject(document["subject"]["CN"], role, names["O"])
        public = request_key(document["certificate_request"])
        return 200, good(self.root.issue(public, subject, address=ADDRESS, now=NOW, lifetime=HOUR))


def good(pem: str) -> bytes:
    return json.dumps({"success": True, "result": {"certificate": pem}, "errors": []}).encode()


@pytest.fixture
def external() -> Iterator[External]:
    made = External()
    yield made
    made.close()


async def asked(external: External, *urls: str, subject: Subject = SUBJECT) -> str:
    servers = [ExternalCA(url=url, options={"profile": "node"}) for url in (urls or (external.url,))]
    csr = keys.request(keys.new_key())
    return await cfssl.sign(servers, external.root, csr, subject, ADDRESS, external.root.pem)


@pytest.mark.parametrize("subject", [SUBJECT, WORKER])
async def test_a_certificate_from_outside(external: External, subject: Subject) -> None:
    (certificate,) = certificates(await asked(external, subject=subject))
    assert subject_of(certificate) == subject
    ((path, document),) = external.asked
    assert path == "/api/v1/cfssl/sign"
    assert document["subject"] == {
        "CN": subject.node,
        "names": [{"O": subject.swarm, "OU": f"swarm-{subject.role.label}"}],
    }
    manager = [subject.node, "swarm-manager", "10.0.0.1"]
    assert document["hosts"] == (manager if subject is SUBJECT else manager[:1])
    assert document["profile"] == "node"


async def test_the_next_one_is_asked_when_one_fails(external: External) -> None:
    await asked(external, "http://127.0.0.1:1/sign", "http://127.0.0.1:1/other", external.url)
    assert len(external.asked) == 1


def other_root(external: External, document: dict[str, Any]) -> bytes:
    public = request_key(document["certificate_request"])
    return good(Root(*new_root(NOW)).issue(public, SUBJECT, address=ADDRESS, now=NOW, lifetime=HOUR))


def other_key(external: External, document: dict[str, Any]) -> bytes:
    public = request_key(keys.request(keys.new_key()))
    return good(external.root.issue(public, SUBJECT, address=ADDRESS, now=NOW, lifetime=HOUR))


def other_subject(external: External, document: dict[str, Any]) -> bytes:
    public = request_key(document["certificate_request"])
    return good(external.root.issue(public, SUBJECT._replace(node="x"), address=ADDRESS, now=NOW, lifetime=HOUR))


def other_names(external: External, document: dict[str, Any]) -> bytes:
    public = request_key(document["certificate_request"])
    return good(external.root.issue(public, SUBJECT, address="10.0.0.2", now=NOW, lifetime=HOUR))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (other_root, "not issued by the swarm's root"),
        (other_key, "not that of the requested key"),
        (other_subject, "another subject"),
        (other_names, "lacks the name 10.0.0.1"),
        (lambda *_: good("x"), "no PEM"),
        (lambda *_: b"x", "no JSON"),
        (lambda *_: b"[]", "refused"),
        (lambda *_: b'{"success": false, "errors": [{"message": "no profile"}]}', "no profile"),
        (lambda *_: b'{"success": true, "result": []}', "refused"),
        (lambda *_: b'"' + b"x" * (2 << 20) + b'"', "longer than"),
    ],
)
async def test_answers_that_are_refused(external: External, answer: Any, words: str) -> None:
    external.answer = lambda path, document: (200, answer(external, document))
    with pytest.raises(ServerError, match=words):
        await asked(external)


async def test_a_worker_does_not_get_the_name_of_managers(external: External) -> None:
    """A faulty or hostile external CA must not make a manager of a worker."""

    def answer(path: str, document: dict[str, Any]) -> tuple[int, bytes]:
        document["subject"]["names"][0]["OU"] = "swarm-manager"
        return external.sign(path, document)

    external.answer = answer
    with pytest.raises(ServerError, match="another subject"):
        await asked(external, subject=WORKER)


@pytest.mark.parametrize("url", ["ftp://x/", "x", "https://", ""])
async def test_urls_that_are_none(external: External, url: str) -> None:
    with pytest.raises(ServerError, match="not an http or https URL"):
        await asked(external, url)


async def test_the_root_of_an_external_ca(external: External) -> None:
    assert await cfssl.root_of(ExternalCA(url=external.url)) == external.root.pem
    assert external.asked == [("/api/v1/cfssl/info", {"label": ""})]
    with pytest.raises(InvalidParameter, match="does not tell its root"):
        await cfssl.root_of(ExternalCA(url="http://127.0.0.1:1/sign"))


async def test_cross_signing(external: External) -> None:
    new = Root(*new_root(NOW))
    external.answer = lambda path, document: (200, good(external.root.cross_sign(new, NOW)))
    pem = await cfssl.cross_sign([ExternalCA(url=external.url)], external.root, new, external.root.pem)
    assert issued_by(certificates(pem)[0], external.root.certificate)
    assert external.asked[0][1]["profile"] == "CA"
    leaf = external.root.issue(request_key(keys.request(keys.new_key())), SUBJECT, address="", now=NOW, lifetime=HOUR)
    external.answer = lambda path, document: (200, good(leaf))
    with pytest.raises(ServerError, match="not that of the new root"):
        await cfssl.cross_sign([ExternalCA(url=external.url)], external.root, new, external.root.pem)


async def test_https_is_verified_and_the_manager_shows_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Root(*new_root(NOW))
    key = keys.new_key()
    public = request_key(keys.request(key))
    certificate = authority.issue(public, SUBJECT, address="localhost", now=NOW, lifetime=HOUR)
    (tmp_path / "crt").write_text(certificate)
    (tmp_path / "key").write_text(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    context.load_verify_locations(cadata=authority.pem)
    context.verify_mode = ssl.CERT_OPTIONAL
    external = External(context)
    try:
        with pytest.raises(ServerError, match="certificate verify failed"):
            await asked(external)
        server = ExternalCA(url=external.url, ca_cert=authority.pem)
        monkeypatch.setattr(cfssl, "own_files", (tmp_path / "crt", tmp_path / "key"))
        csr = keys.request(keys.new_key())
        await cfssl.sign([server], external.root, csr, SUBJECT, ADDRESS, external.root.pem)
        assert external.clients == [ssl.PEM_cert_to_DER_cert(certificate)]
    finally:
        external.close()

"""Pulls from registries of many kinds, including hostile ones: an error with the reason, in time,
in little memory, and nothing left behind.

The registries are scripts behind a loopback socket. Needs root, because layers are extracted. A
real registry: tests/api/test_registry.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from engine.config import Config
from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError, Unauthorized
from engine.images.credentials import (
    NOBODY,
    Challenge,
    Credentials,
    challenges,
    next_page,
    registry_auth,
    registry_config,
)
from engine.images.registry.repository import NoManifest
from engine.images.remote import Remote, Search
from engine.wire.images import Progress
from tests.support.images.archives import Image, Node, digest, directory, docker_archive, tar
from tests.unit.images.test_store import Stage

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LOW = tar([directory("etc"), Node("etc/name", b"low"), Node("noise", os.urandom(300_000))])
HIGH = tar([Node("etc/name", b"high"), Node("bin/.wh.sh")])
IMAGE = Image([LOW, HIGH], [], {"Cmd": ["sh"]})
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI = "application/vnd.oci.image.manifest.v1+json"


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            ['Bearer realm="https://auth/token",service="registry",scope="repository:a/b:pull,push"'],
            [("bearer", {"realm": "https://auth/token", "service": "registry", "scope": "repository:a/b:pull,push"})],
        ),
        (['Basic realm="say \\"x\\", y"'], [("basic", {"realm": 'say "x", y'})]),
        (["basic"], [("basic", {})]),
        (
            ["Negotiate abc==, BEARER Realm=x , service = y"],
            [("negotiate", {}), ("bearer", {"realm": "x", "service": "y"})],
        ),
        (["Basic realm=a", "Bearer realm=b"], [("basic", {"realm": "a"}), ("bearer", {"realm": "b"})]),
        (['Bearer realm="unterminated'], [("bearer", {})]),
        (['Bearer realm="a",realm="b"'], [("bearer", {"realm": "a"})]),
        (["", " , ,", "=", '"x"'], []),
    ],
)
def test_challenges(headers: list[str], expected: list[tuple[str, dict[str, str]]]) -> None:
    assert challenges(headers) == [Challenge(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('</v2/x/tags/list?last=b&n=2>; rel="next"', "/v2/x/tags/list?last=b&n=2"),
        ("<https://h/y>; rel=next", "https://h/y"),
        ('<a>; rel="prev", <b>; title="x"; rel="last next"', "b"),
        ('<a>; rel="prev"', ""),
        ("nonsense", ""),
        ("<a>", ""),
    ],
)
def test_next_page(header: str, expected: str) -> None:
    assert next_page([header]) == expected


def encoded(document: Any, alphabet: str = "url", *, padded: bool = True) -> str:
    raw = json.dumps(document).encode()
    text = (base64.urlsafe_b64encode if alphabet == "url" else base64.b64encode)(raw).decode()
    return text if padded else text.rstrip("=")


@pytest.mark.parametrize("alphabet", ["url", "plain"])
@pytest.mark.parametrize("padded", [True, False])
def test_registry_auth(alphabet: str, padded: bool) -> None:
    document = {"username": "ü?>~", "password": "p\xff?>", "email": None, "serverAddress": "h:5", "unknown": 1}
    found = registry_auth(encoded(document, alphabet, padded=padded))
    assert (found.username, found.password, found.serveraddress) == ("ü?>~", "p\xff?>", "h:5")
    assert "p\xff" not in repr(found)


def test_registry_auth_in_its_other_forms() -> None:
    for empty in (None, "", " ", "e30=", "e30", encoded(None)):
        assert registry_auth(empty) == NOBODY
    assert registry_auth(encoded({"identitytoken": "t"})).identitytoken == "t"
    assert registry_auth(encoded({"auth": base64.b64encode(b"me:a:b").decode()})).password == "a:b"


@pytest.mark.parametrize(
    "header",
    ["!", "e30==x", encoded([]), encoded("x"), encoded({"username": 1}), encoded({"auth": "!"}), "A" * 100_000],
)
def test_bad_registry_auth_is_told_without_its_value(header: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        registry_auth(header)
    assert len(caught.value.message) < 200


def test_registry_config() -> None:
    me, her = {"username": "me", "password": "a"}, {"username": "her", "password": "b"}
    document = {
        "https://index.docker.io/v1/": me,
        "registry:5000": me,
        "https://registry:5000/v1/": her,
        "http://other.example/v2/": her,
        "token.example": {"identitytoken": "t"},
        "bad.example": {"username": 1},
        "none.example": None,
    }
    found = registry_config(base64.urlsafe_b64encode(json.dumps(document).encode()).decode())
    assert {domain: (each.username, each.identitytoken) for domain, each in found.items()} == {
        "docker.io": ("me", ""),
        "registry:5000": ("me", ""),
        "other.example": ("her", ""),
        "token.example": ("", "t"),
        "none.example": ("", ""),
    }


@pytest.mark.parametrize("header", [None, "", "e30=", "%%%", "e30", "bnVsbA==", "W10=", "x" * 70_000, "\xe9"])
def test_registry_config_that_cannot_be_decoded_is_ignored(header: str | None) -> None:
    assert registry_config(header) == {}


# --- registries -----------------------------------------------------------------------------------


class Ask:
    """One request as a script receives it, with methods to respond."""

    def __init__(
        self, method: str, target: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.body = body
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes = b"", /, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"Content-Length": str(len(body)), **named}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        await self.send(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + (b"" if self.method == "HEAD" else body))


class Close(Exception):
    """Raised by a script to end the connection."""


Script = Callable[[Ask], Awaitable[None]]


class Server:
    """A loopback port that a script serves; it records the requests."""

    def __init__(self, script: Script, context: ssl.SSLContext | None = None) -> None:
        self.script = script
        self._context = context
        self.asked: list[Ask] = []
        self.unread: Callable[[Ask], bool] = lambda ask: False
        """True for a request whose body is not read."""
        self._connections: set[asyncio.Task[None]] = set()
        self._port = 0

    async def __aenter__(self) -> Server:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def listen(self) -> None:
        """Accept connections, again at the same port after `close`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, ssl=self._context)
        self._port = self._server.sockets[0].getsockname()[1]
        self.host = f"127.0.0.1:{self._port}"

    def close(self) -> None:
        """Refuse further connections."""
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, Close):
                while True:
                    head = await reader.readexactly(1)
                    if head == b"\x16":  # the client tries TLS first
                        return
                    head += await reader.readuntil(b"\r\n\r\n")
                    first, *lines = head.decode().split("\r\n")
                    method, target, _ = first.split(" ")
                    headers = {
                        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
                    }
                    ask = Ask(method, target, headers, b"", writer)
                    if not self.unread(ask):
                        ask.body = await _body(reader, headers)
                    self.asked.append(ask)
                    await self.script(ask)
        finally:
            self._connections.discard(task)
            writer.close()

    def count(self, path: str, method: str = "GET") -> int:
        return sum(1 for ask in self.asked if ask.path == path and ask.method == method)


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


class Good:
    """The script of a registry that has `IMAGE` as a/b:t, to be changed by a test."""

    def __init__(self, image: Image = IMAGE, compress: Callable[[bytes], bytes] = gzip.compress) -> None:
        config = image.configuration()
        packed = [compress(layer) for layer in image.layers]
        self.blobs = {digest(data): data for data in (config, *packed)}
        self.document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": OCI,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(config),
                "size": len(config),
            },
            "layers": [
                {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest(data), "size": len(data)}
                for data in packed
            ],
        }
        self.layers = [digest(data) for data in packed]
        self.media_type = OCI
        self.special: dict[str, Script] = {}
        """Responses that replace the registry's, by path."""

    def manifest(self) -> bytes:
        return json.dumps(self.document).encode()

    async def __call__(self, ask: Ask) -> None:
        special = self.special.get(ask.path)
        if special is not None:
            await special(ask)
            return
        last = ask.path.rpartition("/")[2]
        if ask.path == "/v2/":
            await ask.answer(200, b"{}")
        elif ask.path.startswith("/v2/a/b/manifests/") and last in ("t", digest(self.manifest())):
            await ask.answer(200, self.manifest(), Content_Type=self.media_type)
        elif ask.path.startswith("/v2/a/b/blobs/") and last in self.blobs:
            await ask.answer(200, self.blobs[last])
        else:
            await ask.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}')


MANIFEST = "/v2/a/b/manifests/t"


def blob(at: int, good: Good) -> str:
    return f"/v2/a/b/blobs/{good.layers[at]}"


class Puller:
    """An engine's images and registries on a temporary root."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.stage = Stage(root)
        self.remote = Remote(
            Config(registry_timeout=30, registry_certificates=root / "none", **{"download_attempts": 1} | config),
            self.stage.images,
            self.stage.events,
        )

    async def __aenter__(self) -> Puller:
        await self.stage.__aenter__()
        client = await self.remote.client()
        client.delays, client.patience = (0.01, 0.01, 0.01), ()
        self.client = client
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.remote.close()
        await self.stage.__aexit__()

    async def pull(self, image: str, tag: str = "t", credentials: Credentials = NOBODY) -> list[Progress]:
        pulling = await self.remote.pull(image, tag, credentials)
        return [progress async for progress in pulling.run()]

    def left(self) -> tuple[list[str], list[str], list[str]]:
        return self.stage.on_disk()


EMPTY: tuple[list[str], list[str], list[str]] = ([], [], [])


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def stage(root: Path, script: Script, **config: Any) -> AsyncIterator[tuple[Server, Puller]]:
    async with Server(script) as server, Puller(root, **config) as puller:
        yield server, puller


async def nothing() -> AsyncIterator[bytes]:
    for chunk in ():
        yield chunk


async def asked(probe: Callable[[], bool]) -> None:
    """Wait until a server has received the expected requests; the test's own time limit ends the
    wait."""
    while not probe():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def refused(
    root: Path, script: Script, kind: type[EngineError], text: str, tag: str = "t", stall: float | None = None
) -> None:
    """Assert that a pull fails with this error and leaves nothing behind. `stall`: the timeout for
    a response, after which the engine asks once more.
    """

    async def work() -> None:
        async with stage(root, script) as (server, puller):
            if stall is not None:
                puller.client.stall, puller.client.delays = stall, (0.01,)
            with pytest.raises(kind) as caught:
                await puller.pull(f"{server.host}/a/b", tag)
            assert text in caught.value.message, caught.value.message
            assert type(caught.value) is kind or kind is ServerError
            assert puller.left() == EMPTY
            assert len(puller.stage.images) == 0

    run(work)


@needs_root
@pytest.mark.parametrize(
    ("kind", "compress"),
    [("tar+gzip", gzip.compress), ("tar+zstd", zstandard.ZstdCompressor().compress), ("tar", bytes)],
)
def test_a_pull(tmp_path: Path, kind: str, compress: Callable[[bytes], bytes]) -> None:
    good = Good(compress=compress)
    for layer in good.document["layers"]:
        layer["mediaType"] = f"application/vnd.oci.image.layer.v1.{kind}"

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            said = await puller.pull(f"{server.host}/a/b")
            texts = [progress.status for progress in said]
            assert texts[0] == "Pulling from a/b"
            assert texts.count("Pull complete") == 2
            assert texts[-2:] == [
                f"Digest: {digest(good.manifest())}",
                f"Status: Downloaded newer image for {server.host}/a/b:t",
            ]
            record = puller.stage.images.get(f"{server.host}/a/b:t")
            assert record.id == IMAGE.id
            assert puller.stage.images.get(f"{server.host}/a/b@{digest(good.manifest())}") is record
            again = [progress.status for progress in await puller.pull(f"{server.host}/a/b")]
            assert again[1:3] == ["Already exists"] * 2
            assert again[-1] == f"Status: Image is up to date for {server.host}/a/b:t"
            assert server.count(blob(0, good)) == 1
            await puller.stage.images.delete(f"{server.host}/a/b:t")
            assert puller.left() == EMPTY

    run(work)


@needs_root
def test_an_index(tmp_path: Path) -> None:
    good = Good()

    async def index(ask: Ask) -> None:
        entries = [
            {"digest": digest(b"other"), "platform": {"os": "linux", "architecture": "s390x"}},
            {"digest": digest(b"none"), "platform": {"os": "unknown", "architecture": "unknown"}},
            {"digest": digest(good.manifest()), "platform": {"os": "linux", "architecture": "amd64"}},
        ]
        raw = json.dumps(
            {"schemaVersion": 2, "mediaType": LIST, "manifests": entries[: 3 if "mine" in ask.path else 2]}
        )
        await ask.answer(200, raw.encode(), Content_Type=LIST)

    good.special["/v2/a/b/manifests/mine"] = good.special["/v2/a/b/manifests/others"] = index

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            await puller.pull(f"{server.host}/a/b", "mine")
            (name,) = puller.stage.images.get(f"{server.host}/a/b:mine").digests
            # the digest of the index, as requested
            assert name.rpartition("@")[2] not in (digest(good.manifest()), "")
            with pytest.raises(NotFound, match="no matching manifest for linux/amd64"):
                await puller.pull(f"{server.host}/a/b", "others")

    run(work)


@needs_root
@pytest.mark.parametrize("depth", [2, 3])
def test_indexes_within_indexes(tmp_path: Path, depth: int) -> None:
    good = Good()
    inner = good.manifest()
    platform = {"os": "linux", "architecture": "amd64"}
    for _ in range(depth + 1):
        raw = json.dumps({"schemaVersion": 2, "manifests": [{"digest": digest(inner), "platform": platform}]}).encode()
        reply = functools.partial(_reply, raw)
        good.special[f"/v2/a/b/manifests/{digest(raw)}"] = good.special["/v2/a/b/manifests/nested"] = reply
        inner = raw

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            if depth == 2:
                await puller.pull(f"{server.host}/a/b", "nested")
                assert puller.stage.images.get(f"{server.host}/a/b:nested").id == IMAGE.id
            else:
                with pytest.raises(InvalidParameter, match="too many levels of nested indexes"):
                    await puller.pull(f"{server.host}/a/b", "nested")

    run(work)


async def _reply(raw: bytes, ask: Ask) -> None:
    await ask.answer(200, raw, Content_Type=LIST)


@needs_root
@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "text"),
    [
        (404, b"", {}, NoManifest, "not found"),
        (404, b"<html>no</html>", {"Content_Type": "text/html"}, NoManifest, "not found"),
        (401, b"", {}, NotFound, "pull access denied"),
        (401, b"", {"WWW_Authenticate": "Basic realm=x"}, NotFound, "no basic auth credentials"),
        (403, b'{"errors":[{"code":"DENIED","message":"go away"}]}', {}, NotFound, "denied: go away"),
        (403, b"[" * 100_000, {}, NotFound, "pull access denied"),
        (
            429,
            b'{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}',
            {},
            ServerError,
            "toomanyrequests: slow down",
        ),
        (429, b"", {"Retry_After": "86400"}, ServerError, "toomanyrequests"),
        (429, b"", {"Retry_After": "soon"}, ServerError, "toomanyrequests"),
        (500, b"<h1>oops</h1>", {}, ServerError, "received unexpected HTTP status: 500"),
        (503, b"", {}, ServerError, "503"),
        (301, b"", {}, ServerError, "301"),
        (200, b"<html>hello</html>", {"Content_Type": "text/html"}, ServerError, "text/html"),
        (200, b"", {"Content_Type": OCI}, InvalidParameter, "invalid manifest"),
        (200, b"garbage", {"Content_Type": OCI}, InvalidParameter, "invalid manifest"),
        (200, b"[" * 3_000_000, {"Content_Type": OCI}, InvalidParameter, "invalid manifest"),
        (200, b"\xff\xfe", {"Content_Type": OCI}, InvalidParameter, "invalid manifest"),
        (200, b'{"schemaVersion":1,"fsLayers":[]}', {"Content_Type": "application/json"}, InvalidParameter, "schema 1"),
        (
            200,
            b"{}",
            {"Content_Type": "application/vnd.docker.distribution.manifest.v1+prettyjws"},
            InvalidParameter,
            "schema 1",
        ),
        (200, b"{}", {"Content_Type": OCI}, InvalidParameter, "schemaVersion"),
        (200, b'{"schemaVersion":2}', {"Content_Type": DOCKER}, InvalidParameter, "no config"),
        (
            200,
            b'{"schemaVersion":2,"mediaType":"%s"}' % LIST.encode(),
            {"Content_Type": DOCKER},
            InvalidParameter,
            "differs from Content-Type",
        ),
        (200, b"x", {"Content_Length": str(100 << 20), "Content_Type": OCI}, ServerError, "more than 4194304 bytes"),
    ],
)
def test_bad_answers_to_the_manifest(
    tmp_path: Path, status: int, body: bytes, headers: dict[str, str], kind: type[EngineError], text: str
) -> None:
    good = Good()
    good.special[MANIFEST] = lambda ask: ask.answer(status, body, **headers)
    refused(tmp_path, good, kind, text)


@needs_root
def test_an_endless_manifest_is_not_read_to_its_end(tmp_path: Path) -> None:
    good = Good()
    sent = 0

    async def endless(ask: Ask) -> None:
        nonlocal sent
        await ask.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n")
        while sent < 100 << 20:
            await ask.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536

    good.special[MANIFEST] = endless
    refused(tmp_path, good, ServerError, "more than 4194304 bytes")
    assert sent < 32 << 20


def spoilt(change: Callable[[dict[str, Any]], object]) -> Good:
    good = Good()
    change(good.document)
    return good


def _type_of_layer(kind: str, manifest: dict[str, Any]) -> None:
    manifest["layers"][0]["mediaType"] = f"application/vnd.oci.image.layer.{kind}"


@needs_root
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(manifests=[{"digest": digest(b"")}]), "both an image and an index"),
        (lambda d: d["layers"].pop(), "1 layers in its manifest, 2 in its configuration"),
        (lambda d: d["layers"][0].update(size=-1), "layer size -1 is not between"),
        (lambda d: d["layers"][0].update(size=0), "layer size 0 is not between"),
        (lambda d: d["layers"][0].update(size=1 << 60), "layer size"),
        (lambda d: d["layers"][0].update(size=10**30), "invalid manifest"),
        (lambda d: d["layers"][0].update(size="1"), "invalid manifest"),
        (lambda d: d["layers"][0].update(digest="sha256:../../../../etc/passwd"), "invalid digest"),
        (lambda d: d["layers"][0].update(digest="sha512:" + "0" * 128), "invalid digest"),
        (lambda d: d["layers"][0].update(mediaType="application/vnd.helm.chart"), "unsupported layer type"),
        *(
            (functools.partial(_type_of_layer, kind), "unsupported layer type")
            for kind in ("v1.tar+gzip+encrypted", "v1.tar+lz4", "nydus.blob.v1", "v1.tarball")
        ),
        (lambda d: d["config"].update(digest="x"), "invalid digest"),
        (lambda d: d["config"].update(size=1 << 40), "config has"),
        (lambda d: d["config"].update(mediaType="application/vnd.docker.plugin.v1+json"), "Encountered remote"),
        (lambda d: d.update(layers=d["layers"] * 100), "more than 128 layers"),
        (lambda d: d.update(layers=None, config=None), "no config"),
    ],
)
def test_lying_manifests(tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str) -> None:
    refused(tmp_path, spoilt(change), InvalidParameter, text)


@needs_root
def test_a_manifest_that_is_not_its_digest(tmp_path: Path) -> None:
    good = Good()
    good.special[f"/v2/a/b/manifests/{digest(b'x')}"] = lambda ask: ask.answer(200, good.manifest(), Content_Type=OCI)
    refused(tmp_path, good, ServerError, "manifest verification failed", digest(b"x"))


@needs_root
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (lambda data: data[:-1] + b"?", "verification failed"),
        (lambda data: data + b"more", "larger than the"),
        (lambda data: data[: len(data) // 2], "closed the connection before the end of blob"),
        (lambda data: b"", "closed the connection before the end of blob"),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_lying_blobs(tmp_path: Path, data: Callable[[bytes], bytes], text: str, at: int) -> None:
    good = Good()
    given = data(good.blobs[good.layers[at]])
    good.special[blob(at, good)] = lambda ask: ask.answer(200, given)
    refused(tmp_path, good, ServerError, text)


@needs_root
def test_a_blob_that_is_no_layer(tmp_path: Path) -> None:
    refused(tmp_path, Good(compress=lambda layer: gzip.compress(layer[:-2000])), InvalidParameter, "layer")
    refused(tmp_path, Good(compress=lambda layer: b"no archive at all" * 100), InvalidParameter, "layer")
    refused(tmp_path, Good(compress=lambda layer: gzip.compress(layer)[:-5]), InvalidParameter, "gzip")
    refused(tmp_path, Good(compress=lambda layer: gzip.compress(layer + bytes(512))), InvalidParameter, "diff_id")
    twice = Image([tar([Node("a", b"1"), Node("b"), Node("a", b"2")])], [])
    refused(tmp_path, Good(twice), InvalidParameter, "duplicates of file paths not supported: a")


@needs_root
@pytest.mark.parametrize("place", ["ping", "manifest", "config", "blob", "within the blob", "head"])
def test_stalls(tmp_path: Path, place: str) -> None:
    good = Good()

    async def stall(ask: Ask) -> None:
        if place == "within the blob":
            data = good.blobs[good.layers[0]]
            await ask.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:1000])
        if place == "head":
            await ask.send(b"HTTP/1.1 200 OK\r\nContent-")
        await asyncio.Event().wait()

    config = f"/v2/a/b/blobs/{IMAGE.id}"
    paths = {"ping": "/v2/", "manifest": MANIFEST, "config": config}
    good.special[paths.get(place, blob(0, good))] = stall
    refused(tmp_path, good, ServerError, "no answer within 0.2 s", stall=0.2)


@needs_root
def test_what_is_no_http(tmp_path: Path) -> None:
    async def garbage(ask: Ask) -> None:
        await ask.send(b"220 smtp.example ESMTP\r\n")
        raise Close

    async def nothing(ask: Ask) -> None:
        raise Close

    async def long(ask: Ask) -> None:
        await ask.send(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n")

    for script in (garbage, nothing, long):
        refused(tmp_path, script, ServerError, "/v2/")


@needs_root
def test_a_broken_download_goes_on(tmp_path: Path) -> None:
    good = Good()
    data = good.blobs[good.layers[0]]
    third = len(data) // 3

    async def broken(ask: Ask) -> None:
        begin = int(ask.headers.get("range", "bytes=0-")[6:-1])
        head = f"Content-Length: {len(data) - begin}\r\nContent-Range: bytes {begin}-{len(data) - 1}/{len(data)}\r\n"
        status = "206 Partial Content" if begin else "200 OK"
        await ask.send(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + data[begin : begin + third + 1])
        if begin + third < len(data):
            raise Close

    good.special[blob(0, good)] = broken

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            await puller.pull(f"{server.host}/a/b")
            asked = [ask.headers.get("range") for ask in server.asked if ask.path == blob(0, good)]
            assert asked == [None, f"bytes={third + 1}-", f"bytes={2 * third + 2}-"]

    run(work)


@needs_root
@pytest.mark.parametrize("answer", ["whole", "not satisfiable"])
def test_a_registry_that_cannot_go_on_begins_again(tmp_path: Path, answer: str) -> None:
    good = Good()
    data = good.blobs[good.layers[0]]
    times = 0

    async def broken(ask: Ask) -> None:
        nonlocal times
        times += 1
        if times == 1:
            await ask.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:100_000])
            raise Close
        if times == 2 and answer == "not satisfiable":
            await ask.answer(416)
        else:
            await ask.answer(200, data)

    good.special[blob(0, good)] = broken

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            await puller.pull(f"{server.host}/a/b")
            assert puller.stage.images.get(f"{server.host}/a/b:t").id == IMAGE.id

    run(work)


@needs_root
def test_another_range_than_was_asked_for(tmp_path: Path) -> None:
    good = Good()
    data = good.blobs[good.layers[0]]

    async def broken(ask: Ask) -> None:
        if "range" in ask.headers:
            await ask.answer(206, data[5:], Content_Range=f"bytes 5-{len(data) - 1}/{len(data)}")
        else:
            await ask.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:100_000])
            raise Close

    good.special[blob(0, good)] = broken
    refused(tmp_path, good, ServerError, "another range")


@needs_root
@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_passing_trouble_is_waited_for(tmp_path: Path, status: int) -> None:
    good = Good()
    seen: dict[str, int] = {}

    async def trouble(ask: Ask) -> None:
        seen[ask.path] = seen.get(ask.path, 0) + 1
        if seen[ask.path] < 3:
            await ask.answer(status, Retry_After="0")
        else:
            await good(ask)

    async def work() -> None:
        async with stage(tmp_path, trouble) as (server, puller):
            await puller.pull(f"{server.host}/a/b")

    run(work)
    assert set(seen.values()) == {3}


@needs_root
@pytest.mark.parametrize("pushes", [False, True])
def test_a_client_that_leaves_ends_the_wait(tmp_path: Path, pushes: bool) -> None:
    good = Good()

    async def trouble(ask: Ask) -> None:
        await (ask.answer(503) if "/blobs/" in ask.path else good(ask))

    async def work() -> None:
        async with stage(tmp_path, trouble) as (server, puller):
            puller.client.patience, puller.client.pause, puller.client.attempts = (1000.0,), 1000.0, 2
            name = f"{server.host}/a/b"
            if pushes:
                await puller.stage.load(docker_archive(Image([LOW], [f"{name}:t"])))
                sending = await puller.remote.push(f"{name}:t", "", NOBODY)
            else:
                sending = await puller.remote.pull(name, "t", NOBODY)
            running = sending.run()
            task = asyncio.create_task(_drained(running))
            await asked(lambda: sum("/blobs/" in ask.path for ask in server.asked) >= 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await running.aclose()

    run(work)


async def _drained(said: AsyncIterator[Progress]) -> None:
    async for _ in said:
        pass


# --- many pulls, and those that are given up ------------------------------------------------------


@needs_root
def test_ten_pulls_download_each_blob_once(tmp_path: Path) -> None:
    good = Good()
    go = asyncio.Event()

    async def held(ask: Ask) -> None:
        await go.wait()
        await ask.answer(200, good.blobs[good.layers[0]])

    good.special[blob(0, good)] = held

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            pulls = [asyncio.create_task(puller.pull(f"{server.host}/a/b")) for _ in range(10)]
            await asked(lambda: server.count(f"/v2/a/b/blobs/{IMAGE.id}") == 10)
            go.set()
            for said in await asyncio.gather(*pulls):
                assert [progress.status for progress in said].count("Pull complete") == 2
            assert [server.count(blob(at, good)) for at in (0, 1)] == [1, 1]
            assert len(puller.left()[0]) == 2

    run(work)


@needs_root
def test_who_leaves_takes_only_what_nobody_else_wants(tmp_path: Path) -> None:
    good = Good()
    go = asyncio.Event()

    async def held(ask: Ask) -> None:
        data = good.blobs[good.layers[0]]
        await ask.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:1000])
        await go.wait()
        await ask.send(data[1000:])

    good.special[blob(0, good)] = held

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            puller.client.stall = 30
            pulls = [asyncio.create_task(puller.pull(f"{server.host}/a/b")) for _ in range(3)]
            await asked(lambda: server.count(blob(0, good)) == 1 and server.count(f"/v2/a/b/blobs/{IMAGE.id}") == 3)
            pulls[0].cancel()
            await asyncio.wait([pulls[0]])
            go.set()
            await asyncio.gather(*pulls[1:])
            assert server.count(blob(0, good)) == 1
            await puller.stage.images.delete(f"{server.host}/a/b:t")
            go.clear()
            pulls = [asyncio.create_task(puller.pull(f"{server.host}/a/b")) for _ in range(3)]
            await asked(lambda: server.count(blob(0, good)) == 2)
            for pull in pulls:
                pull.cancel()
            await asyncio.wait(pulls)
            assert puller.left() == EMPTY

    run(work)


@needs_root
def test_one_layer_that_fails_ends_the_others(tmp_path: Path) -> None:
    good = Good()

    async def hang(ask: Ask) -> None:
        await asyncio.Event().wait()

    good.special[blob(0, good)] = hang
    good.special[blob(1, good)] = lambda ask: ask.answer(404)

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            puller.client.stall = 1000
            with pytest.raises(ServerError, match="404"):
                await puller.pull(f"{server.host}/a/b")
            assert puller.left() == EMPTY

    run(work)


@needs_root
def test_every_tag(tmp_path: Path) -> None:
    good = Good()

    async def tags(ask: Ask) -> None:
        if "last=" in ask.query:
            await ask.answer(200, b'{"tags":["t"]}')
        else:
            await ask.answer(200, b'{"name":"a/b","tags":["u"]}', Link='</v2/a/b/tags/list?last=u&n=1>; rel="next"')

    good.special["/v2/a/b/tags/list"] = tags
    good.special["/v2/a/b/manifests/u"] = lambda ask: ask.answer(200, good.manifest(), Content_Type=OCI)
    good.special["/v2/a/loop/tags/list"] = lambda ask: ask.answer(200, b'{"tags":null}', Link='<?n=1000>; rel="next"')

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            said = await puller.pull(f"{server.host}/a/b", "")
            told = [progress.status for progress in said if progress.status.startswith("Status: ")]
            assert told == [f"Status: Downloaded newer image for {server.host}/a/b"], "once, for all of them"
            assert {name.rpartition(":")[2] for name in puller.stage.images.get(IMAGE.id).tags} == {"t", "u"}
            for none in ("loop", "nothing"):
                with pytest.raises(NotFound):
                    await puller.pull(f"{server.host}/a/{none}", "")

    run(work)


# --- credentials ----------------------------------------------------------------------------------

ME = Credentials(username="me", password="secret")
BASIC = "Basic " + base64.b64encode(b"me:secret").decode()


@needs_root
def test_basic_authentication_and_redirections_that_would_leak(tmp_path: Path) -> None:
    good = Good()

    async def elsewhere(ask: Ask) -> None:
        assert "authorization" not in ask.headers
        await ask.answer(200, good.blobs[ask.path.rpartition("/")[2]])

    async def work() -> None:
        async with Server(elsewhere) as other:

            async def guarded(ask: Ask) -> None:
                if ask.headers.get("authorization") != BASIC:
                    await ask.answer(401, WWW_Authenticate='Basic realm="x"')
                elif "/blobs/" in ask.path:
                    await ask.answer(307, Location=f"http://{other.host}/cdn/{ask.path.rpartition('/')[2]}")
                else:
                    await good(ask)

            async with stage(tmp_path, guarded) as (server, puller):
                with pytest.raises(NotFound, match="pull access denied"):
                    await puller.pull(f"{server.host}/a/b")
                with pytest.raises(Unauthorized, match="pull access denied"):
                    await puller.pull(f"{server.host}/a/b", credentials=Credentials(username="me", password="no"))
                await puller.pull(f"{server.host}/a/b", credentials=ME)
                assert len(other.asked) == 3
                assert all("authorization" not in ask.headers for ask in other.asked)

    run(work)


@needs_root
@pytest.mark.parametrize(
    "location",
    [
        "http://192.0.2.1/blob",
        "http://metadata.internal/",
        "ftp://127.0.0.1/x",
        "//",
        "http://[::bad/",
        "http://a:99999/",
    ],
)
def test_redirections_that_are_not_followed(tmp_path: Path, location: str) -> None:
    good = Good()
    good.special[blob(0, good)] = lambda ask: ask.answer(302, Location=location)
    refused(tmp_path, good, ServerError, "")


@needs_root
def test_redirections_without_end(tmp_path: Path) -> None:
    good = Good()
    good.special[MANIFEST] = lambda ask: ask.answer(302, Location=MANIFEST)
    refused(tmp_path, good, ServerError, "redirections")


@needs_root
def test_tokens(tmp_path: Path) -> None:
    good = Good()
    granted = {"anonymous": "", "mine": BASIC}
    served: list[str] = []

    async def guarded(ask: Ask) -> None:
        where = f"http://{ask.headers['host']}"
        if ask.path == "/token":
            if ask.method == "POST":
                assert b"grant_type=refresh_token" in ask.body and b"refresh_token=identity" in ask.body
                await ask.answer(200, b'{"access_token":"refreshed"}')
                return
            name = "mine" if ask.headers.get("authorization") == granted["mine"] else "anonymous"
            assert "service=here" in ask.query and "scope=repository:a/b:pull" in ask.query.replace("%3A", ":").replace(
                "%2F", "/"
            )
            await ask.answer(200, json.dumps({"token": name, "expires_in": 300}).encode())
            return
        token = ask.headers.get("authorization", "").removeprefix("Bearer ")
        if not token or (token == "anonymous" and "/blobs/" in ask.path and len(served) == 0):
            served.append(token)
            await ask.answer(401, WWW_Authenticate=f'Bearer realm="{where}/token",service="here"')
            return
        served.append(token)
        await good(ask)

    async def work() -> None:
        async with stage(tmp_path, guarded) as (server, puller):
            await puller.pull(f"{server.host}/a/b")
            assert set(served) == {"", "anonymous"}
            assert server.count("/token") == 1
            served.clear()
            await puller.pull(f"{server.host}/a/b", credentials=ME)
            assert set(served) == {"", "mine"}
            served.clear()
            await puller.pull(f"{server.host}/a/b", credentials=Credentials(identitytoken="identity"))
            assert set(served) == {"", "refreshed"}

    run(work)


@needs_root
@pytest.mark.parametrize(
    ("realm", "text"),
    [
        ("http://192.0.2.1/token", "plain HTTP is allowed only for loopback"),
        ("file:///etc/passwd", "names an invalid token server"),
        ("::::", "names an invalid token server"),
    ],
)
def test_token_servers_that_are_not_asked(tmp_path: Path, realm: str, text: str) -> None:
    async def guarded(ask: Ask) -> None:
        await ask.answer(401, WWW_Authenticate=f'Bearer realm="{realm}"')

    refused(tmp_path, guarded, ServerError, text)


@needs_root
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"token":"a b\\r\\nX: y"}', b'{"token":' + b"[" * 10_000, b" " * (2 << 20)]
)
def test_token_servers_that_give_none(tmp_path: Path, body: bytes) -> None:
    async def guarded(ask: Ask) -> None:
        if ask.path == "/token":
            await ask.answer(200, body)
        else:
            await ask.answer(401, WWW_Authenticate=f'Bearer realm="http://{ask.headers["host"]}/token"')

    refused(tmp_path, guarded, ServerError, "")


@needs_root
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (',error="insufficient_scope"', NotFound, "denied: requested access to the resource is denied"),
        (',error="invalid_token"', Unauthorized, "unauthorized: authentication required"),
        ("", Unauthorized, "unauthorized: authentication required"),
    ],
)
def test_a_token_that_does_not_suffice(tmp_path: Path, error: str, kind: type[EngineError], text: str) -> None:
    """Docker Hub answers so for a repository that does not exist, whatever the credentials."""

    async def guarded(ask: Ask) -> None:
        if ask.path == "/token":
            await ask.answer(200, b'{"token":"t"}')
        else:
            body = b'{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}'
            realm = f'Bearer realm="http://{ask.headers["host"]}/token"{error}'
            await ask.answer(401, body, WWW_Authenticate=realm)

    async def work() -> None:
        async with stage(tmp_path, guarded) as (server, puller):
            for tag in ("t", ""):
                with pytest.raises(kind, match=f"pull access denied.*{text if tag else ''}"):
                    await puller.pull(f"{server.host}/a/b", tag, ME)
            looked_at = Forbidden if kind is NotFound else Unauthorized
            with pytest.raises(looked_at, match=text):
                await puller.remote.described(f"{server.host}/a/b", ME)

    run(work)


@needs_root
@pytest.mark.parametrize(
    ("status", "body", "headers", "kind"),
    [
        (404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}', {}, NotFound),
        (401, b"", {}, Unauthorized),
        (403, b"", {}, Forbidden),
        (500, b"", {}, ServerError),
        (200, b"garbage", {"Content_Type": OCI}, InvalidParameter),
        (200, b'{"schemaVersion":1}', {"Content_Type": "application/json"}, InvalidParameter),
    ],
)
def test_what_a_registry_answers_about_a_name(
    tmp_path: Path, status: int, body: bytes, headers: dict[str, str], kind: type[EngineError]
) -> None:
    good = Good()
    good.special[MANIFEST] = lambda ask: ask.answer(status, body, **headers)

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            with pytest.raises(kind):
                await puller.remote.described(f"{server.host}/a/b:t", NOBODY)
            for name, malformed in (("a" * 64, ServerError), ("UPPER", InvalidParameter)):
                with pytest.raises(malformed):
                    await puller.remote.described(name, NOBODY)

    run(work)


@needs_root
def test_a_configuration_that_says_no_platform(tmp_path: Path) -> None:
    good = Good()
    config = b'{"rootfs":{}}'
    good.blobs[digest(config)] = config
    good.document["config"].update(digest=digest(config), size=len(config))

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            found = await puller.remote.described(f"{server.host}/a/b:t", NOBODY)
            assert found.platforms == [] and found.descriptor.media_type == OCI
            assert found.descriptor.digest == digest(good.manifest())

    run(work)


@needs_root
def test_login(tmp_path: Path) -> None:
    async def guarded(ask: Ask) -> None:
        if ask.path == "/token":
            if ask.headers.get("authorization") == BASIC:
                await ask.answer(200, b'{"token":"t","refresh_token":"identity"}')
            else:
                await ask.answer(401)
        elif ask.headers.get("authorization") == "Bearer t":
            await ask.answer(200)
        else:
            await ask.answer(401, WWW_Authenticate=f'Bearer realm="http://{ask.headers["host"]}/token"')

    async def work() -> None:
        async with stage(tmp_path, guarded) as (server, puller):
            address = f"http://{server.host}/v1/"
            good = Credentials(username="me", password="secret", serveraddress=address)
            assert await puller.remote.log_in(good) == "identity"
            with pytest.raises(Unauthorized, match=r"login attempt to http.*/v2/ failed with status: 401 Unauthorized"):
                await puller.remote.log_in(Credentials(username="me", password="x", serveraddress=address))

    run(work)


TOKEN_ERRORS = {
    "in words": (
        401,
        b'{"errors":[{"Code":"UNAUTHORIZED","message":"a message","detail":null}]}',
        "unauthorized: a message",
    ),
    "of another shape": (401, b'{"error":"unauthorized"}', "unauthorized: authentication required"),
    "too many": (
        429,
        b'{"errors":[{"code":"TOOMANYREQUESTS","message":"out of tokens"}]}',
        "toomanyrequests: out of tokens",
    ),
    "no JSON": (403, b"no way", 'error parsing HTTP 403 response body: no error details found: "no way"'),
    "of the server": (500, b"", "received unexpected HTTP status: 500 X"),
    "without a token": (200, b'{"something":"wrong"}', "authorization server did not include a token in the response"),
    "without a message": (403, b'{"errors":[{"code":"DENIED"}]}', "denied: requested access to the resource is denied"),
    "unknown": (400, b'{"errors":[{"code":"NAME_INVALID","message":"bad"}]}', "name invalid: bad"),
}


@needs_root
@pytest.mark.parametrize("kind", TOKEN_ERRORS)
def test_what_a_token_server_says(tmp_path: Path, kind: str) -> None:
    """A push ends with the server's message. Where it retries, it reports that first."""
    status, body, text = TOKEN_ERRORS[kind]

    async def script(ask: Ask) -> None:
        if ask.path == "/token":
            await ask.answer(status, body)
        else:
            await ask.answer(401, WWW_Authenticate=f'Bearer realm="http://{ask.headers["host"]}/token"')

    async def work() -> None:
        async with stage(tmp_path, script) as (server, puller):
            name = f"{server.host}/a/b:t"
            await puller.stage.load(docker_archive(Image([LOW], [name])))
            said: list[Progress] = []
            sending = await puller.remote.push(name, "", NOBODY)
            with pytest.raises(ServerError) as caught:
                async for progress in sending.run():
                    said.append(progress)
            assert caught.value.message == text
            again = [progress for progress in said if progress.status == "Retrying in 1 second"]
            assert len(again) == (3 if status in (429, 500) else 0)
            assert server.count("/token") == len(again) + 1

    run(work)


@needs_root
def test_a_pull_says_that_it_tries_again(tmp_path: Path) -> None:
    good = Good()
    failures = [503, 503]

    async def sometimes(ask: Ask) -> None:
        if failures:
            await asyncio.sleep(0.2)
            await ask.answer(failures.pop())
        else:
            await ask.answer(200, good.blobs[good.layers[0]])

    good.special[blob(0, good)] = sometimes

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            said = await puller.pull(f"{server.host}/a/b")
            again = [progress for progress in said if progress.status == "Retrying in 1 second"]
            assert 1 <= len(again) <= 2 and {progress.id for progress in again} == {good.layers[0][7:19]}

    run(work)


# --- transport ------------------------------------------------------------------------------------


@needs_root
def test_mirrors_come_before_the_hub(tmp_path: Path) -> None:
    good = Good()

    async def work() -> None:
        async with Server(good) as first, Server(good) as second:
            good.special["/v2/a/c/manifests/t"] = lambda ask: ask.answer(404)

            async def broken(ask: Ask) -> None:
                await (ask.answer(503) if "/manifests/" in ask.path else good(ask))

            first.script = broken
            mirrors = (f"http://{first.host}", f"http://{second.host}")
            async with Puller(tmp_path, registry_mirrors=mirrors) as puller:
                await puller.pull("a/b", credentials=ME)
                assert puller.stage.images.get("a/b:t").id == IMAGE.id
                assert first.count(MANIFEST) == 4
                assert second.count(MANIFEST) == 1
                assert all("authorization" not in ask.headers for ask in (*first.asked, *second.asked))

    run(work)


@needs_root
@pytest.mark.parametrize(
    ("url", "insecure", "expected"),
    [
        ("http://localhost:5000", (), True),
        ("http://127.8.9.10", (), True),
        ("http://[::1]:5000", (), True),
        ("http://registry.example:5000", (), False),
        ("http://registry.example:5000", ("registry.example:5000",), True),
        ("http://registry.example:5001", ("registry.example:5000",), False),
        ("http://registry.example:5001", ("Registry.example",), True),
        ("http://10.1.2.3:5000", ("10.0.0.0/8",), True),
        ("http://11.1.2.3:5000", ("10.0.0.0/8", "nonsense/8"), False),
        ("http://localhost.example:5000", (), False),
    ],
)
def test_who_may_be_spoken_to_in_the_clear(tmp_path: Path, url: str, insecure: tuple[str, ...], expected: bool) -> None:
    from yarl import URL

    async def work() -> None:
        async with Puller(tmp_path, insecure_registries=insecure) as puller:
            assert puller.client.may_be_plain(URL(url)) is expected

    run(work)


@needs_root
def test_a_network_of_insecure_registries_has_those_that_resolve_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in dockerd."""
    from yarl import URL

    async def work() -> None:
        async with Puller(tmp_path, insecure_registries=("10.0.0.0/8", "fd00::/8")) as puller:
            loop = asyncio.get_running_loop()
            hosts = {"near.example": "10.1.2.3", "six.example": "fd00::1", "far.example": "192.0.2.1"}

            async def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
                if host not in hosts:
                    raise socket.gaierror(socket.EAI_NONAME, "unknown")
                return [(0, 0, 0, "", (hosts[host], 0))]

            monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
            for host, expected in (("near", True), ("six", True), ("far", False), ("none", False)):
                await puller.client.look_up(f"{host}.example:5000")
                assert puller.client.may_be_plain(URL(f"http://{host}.example:5000")) is expected

    run(work)


@needs_root
def test_plain_http_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # independent of this host's name servers and their speed
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    async def work() -> None:
        async with Puller(tmp_path) as puller:
            with pytest.raises(ServerError) as caught:
                await puller.pull("registry.invalid:5000/a/b")
            assert "https://registry.invalid:5000/v2/" in caught.value.message
            assert "dial tcp: lookup registry.invalid: no such host" in caught.value.message
            bringing = puller.remote.bring("http://registry.invalid/x.tar", nothing(), "", "", (), "")
            with pytest.raises(NotFound, match=r"dial tcp: lookup registry.invalid"):
                async for _ in bringing:
                    pass
            with pytest.raises(ServerError, match=r"dial tcp 127.0.0.1:1: connect: connection refused"):
                await puller.pull("127.0.0.1:1/a/b")

    run(work)


@needs_root
def test_search(tmp_path: Path) -> None:
    async def index(ask: Ask) -> None:
        if ask.path == "/v1/search":
            assert "q=box" in ask.query
            await ask.answer(
                200, b'{"results":[{"name":"a","star_count":1},{"name":"b","star_count":9,"is_official":true}]}'
            )
        else:
            await ask.answer(404)

    async def work() -> None:
        async with stage(tmp_path, index) as (server, puller):
            box = Search(f"{server.host}/box")
            found = await puller.remote.search(box, NOBODY)
            assert [(result.name, result.is_official) for result in found] == [("b", True), ("a", False)]
            for wanted in (box._replace(stars=2), box._replace(official=True)):
                assert [result.name for result in await puller.remote.search(wanted, NOBODY)] == ["b"]
            assert await puller.remote.search(box._replace(automated=True), NOBODY) == []
        async with stage(tmp_path / "other", Good()) as (server, puller):
            with pytest.raises(ServerError, match="does not offer a search"):
                await puller.remote.search(Search(f"{server.host}/box"), NOBODY)

    (tmp_path / "other").mkdir()
    run(work)

"""Contexts and files by URL, from web servers of many kinds: the words of Docker for each failure,
progress as its clients draw it, and nothing left behind.

The servers are scripts behind a loopback socket. Repositories: tests/system/test_git.py.
"""

from __future__ import annotations

import asyncio
import bz2
import contextlib
import gzip
import hashlib
import lzma
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.fetching import UNNAMED, Download, check_checksum, download, file_name, modified
from engine.builder.remote import MAX_TEXT, Archive, Meter, Text, content_type, fetch, sniffed
from engine.builder.reports import Transfer
from engine.config import Config
from engine.errors import EngineError, InvalidParameter, ServerError
from engine.images.idle import Idle
from engine.images.registry import Registries
from engine.images.remote import Remote
from tests.support.images.archives import Node, tar
from tests.unit.images.test_registry import Ask, Close, Script, Server

DOCKERFILE = b"FROM scratch\nCOPY a /\n"
TAR = tar([Node("Dockerfile", DOCKERFILE), Node("a", b"A" * 1000)])
OCTETS = "application/octet-stream"


class Web:
    """The client of web servers, without a store of images, and a directory for files."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.registries = Registries(Config(**config))
        self.directory = directory
        self.said: list[Transfer] = []
        self.idle = Idle()
        self.remote = cast(Remote, SimpleNamespace(client=self._client, store=SimpleNamespace(idle=self.idle)))

    async def _client(self) -> Registries:
        return self.registries

    def fetch(self, url: str) -> contextlib.AbstractAsyncContextManager[Any]:
        return fetch(url, self.remote, self.directory, self.said.append)

    def download(self, url: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Download]:
        return download(url, self.remote, self.directory, self.said.append, **options)


@contextlib.asynccontextmanager
async def web(directory: Path, script: Script, **config: Any) -> AsyncIterator[tuple[str, Web]]:
    async with Server(script) as server:
        client = Web(directory, **config)
        try:
            yield f"http://{server.host}", client
        finally:
            await client.registries.rest()
            client.idle.close()
            assert os.listdir(directory) == []


def serving(body: bytes, **headers: str) -> Script:
    async def script(ask: Ask) -> None:
        await ask.answer(200, body, **headers)

    return script


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


async def collected(body: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in body])


# --- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", ["text/plain", "text/plain; charset=utf-8", "Text/Plain", OCTETS, "", None])
def test_a_dockerfile_alone(tmp_path: Path, stated: str | None) -> None:
    async def work() -> None:
        script = serving(DOCKERFILE, **({} if stated is None else {"Content_Type": stated}))
        async with web(tmp_path, script) as (base, client), client.fetch(f"{base}/Dockerfile") as found:
            assert found == Text(DOCKERFILE)

    run(work)


@pytest.mark.parametrize(
    ("pack", "stated"),
    [
        (bytes, "application/x-tar"),
        (bytes, "application/tar"),
        (bytes, OCTETS),
        (bytes, "binary/octet-stream"),
        (bytes, ""),
        (gzip.compress, "application/x-gzip"),
        (gzip.compress, "application/gzip"),
        (gzip.compress, OCTETS),
        (bz2.compress, "application/x-bzip2"),
        (bz2.compress, ""),
        (lzma.compress, "application/x-xz"),
        (lzma.compress, OCTETS),
        (zstandard.compress, "application/zstd"),
        (zstandard.compress, OCTETS),
    ],
)
def test_an_archive(tmp_path: Path, pack: Callable[[bytes], bytes], stated: str) -> None:
    body = pack(TAR)

    async def work() -> None:
        async with web(tmp_path, serving(body, Content_Type=stated)) as (base, client):
            async with client.fetch(f"{base}/x") as found:
                assert isinstance(found, Archive)
                assert await collected(found.body) == body
            last = client.said[-1]
            assert (last.id, last.status) == ("Downloading context", f"{base}/x")
            assert last.progress_detail is not None
            assert (last.progress_detail.current, last.progress_detail.total) == (len(body), len(body))
            assert last.progress.startswith("[====")

    run(work)


def test_an_archive_in_chunks_and_behind_a_redirect(tmp_path: Path) -> None:
    body = os.urandom(3 << 20)

    async def script(ask: Ask) -> None:
        if ask.path == "/old":
            await ask.answer(302, Location="/new")
            return
        await ask.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/x-tar\r\n\r\n")
        for at in range(0, len(body), 100_000):
            piece = body[at : at + 100_000]
            await ask.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await ask.send(b"0\r\n\r\n")

    async def work() -> None:
        async with web(tmp_path, script) as (base, client):
            async with client.fetch(f"{base}/old") as found:
                assert await collected(found.body) == body
            last = client.said[-1]
            assert last.progress == " 3.146MB"  # the total is not known
            assert last.progress_detail is not None and last.progress_detail.current == len(body)

    run(work)


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (404, b"no", {}, "Error downloading remote context {url}: Got HTTP status code >= 400: 404 X"),
        (500, b"", {}, "Error downloading remote context {url}: Got HTTP status code >= 400: 500 X"),
        (200, b"", {}, "Error detecting content type for remote {url}: Empty response"),
        (
            200,
            b"<!DOCTYPE html><p>hello",
            {"Content_Type": "text/html; charset=utf-8"},
            'Error detecting content type for remote {url}: unsupported Content-Type "text/html; charset=utf-8"',
        ),
        (
            200,
            b" <HTML>",
            {"Content_Type": OCTETS},
            f'Error detecting content type for remote {{url}}: unsupported Content-Type "{OCTETS}"',
        ),
        (
            200,
            b"PK\x03\x04",
            {},
            'Error detecting content type for remote {url}: unsupported Content-Type ""',
        ),
        (
            200,
            b"#" * (MAX_TEXT + 1),
            {"Content_Type": "text/plain"},
            f"Error downloading remote context {{url}}: a Dockerfile of more than {MAX_TEXT} bytes",
        ),
        (
            200,
            b"abc",
            {"Content_Type": "text/plain", "Content_Length": "9"},
            "Error downloading remote context {url}: ",
        ),
        (301, b"", {"Location": "/x"}, "Error downloading remote context {url}: "),
        (301, b"", {"Location": "file:///etc/passwd"}, "Error downloading remote context {url}: "),
    ],
)
def test_contexts_that_cannot_be_fetched(
    tmp_path: Path, status: int, body: bytes, headers: dict[str, str], words: str
) -> None:
    async def script(ask: Ask) -> None:
        await ask.answer(status, body, **headers)
        if "Content_Length" in headers:
            raise Close

    async def work() -> None:
        async with web(tmp_path, script) as (base, client):
            url = f"{base}/x?token=1"
            with pytest.raises(ServerError) as caught:
                async with client.fetch(url):
                    raise AssertionError("it was fetched")
            assert words.format(url=url) in caught.value.message

    run(work)


def test_an_archive_that_breaks_off(tmp_path: Path) -> None:
    async def script(ask: Ask) -> None:
        await ask.answer(200, TAR[:700], Content_Length=str(len(TAR)), Content_Type="application/x-tar")
        raise Close

    async def work() -> None:
        async with web(tmp_path, script) as (base, client), client.fetch(f"{base}/x") as found:
            with pytest.raises(ServerError, match="Error downloading remote context"):
                await collected(found.body)

    run(work)


@pytest.mark.parametrize(
    "url", ["", "ftp://h/x", "/etc/passwd", "h/x", "http://", "http://:80/x", "http://h:x/", "x y"]
)
def test_what_is_no_url(tmp_path: Path, url: str) -> None:
    async def work() -> None:
        with pytest.raises(InvalidParameter) as caught:
            async with Web(tmp_path).fetch(url):
                raise AssertionError("it was fetched")
        assert caught.value.message == f"remoteURL ({url}) could not be recognized as URL"

    run(work)


def test_nobody_listens_and_no_password_is_shown(tmp_path: Path) -> None:
    async def work() -> None:
        async with Server(serving(b"")) as server:
            host = server.host
        client = Web(tmp_path)
        for attempt in (client.fetch, client.download):
            with pytest.raises(ServerError) as caught:
                async with attempt(f"http://me:secret@{host}/x"):
                    raise AssertionError("it was fetched")
            assert "connection refused" in caught.value.message
            assert "secret" not in caught.value.message
        await client.registries.rest()
        client.idle.close()

    run(work)


def test_the_user_of_a_url_is_sent(tmp_path: Path) -> None:
    seen: list[str] = []

    async def script(ask: Ask) -> None:
        seen.append(ask.headers.get("authorization", ""))
        await ask.answer(200, b"x", Content_Type="text/plain")

    async def work() -> None:
        async with web(tmp_path, script) as (base, client):
            url = base.replace("://", "://me:secret@") + "/x"
            async with client.fetch(url) as found:
                assert found == Text(b"x")

    run(work)
    assert seen == ["Basic bWU6c2VjcmV0"]


def test_a_stalled_server(tmp_path: Path) -> None:
    async def script(ask: Ask) -> None:
        await ask.answer(200, TAR[:10], Content_Length=str(len(TAR)), Content_Type="application/x-tar")
        await asyncio.Event().wait()

    async def work() -> None:
        async with web(tmp_path, script) as (base, client):
            client.registries.stall = 0.2
            with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
                async with client.fetch(f"{base}/x"):
                    raise AssertionError("it was fetched")
            with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
                async with client.download(f"{base}/x"):
                    raise AssertionError("it was fetched")

    run(work)


@pytest.mark.parametrize("what", ["fetch", "download"])
def test_a_client_that_leaves_during_a_download(tmp_path: Path, what: str) -> None:
    """The connection is closed at once, and no thread waits any more."""

    async def work() -> None:
        begun, gone = asyncio.Event(), asyncio.Event()

        async def script(ask: Ask) -> None:
            await ask.answer(200, b"\x1f\x8b" + bytes(600_000), Content_Length="9000000", Content_Type=OCTETS)
            begun.set()
            try:
                while True:
                    await ask.send(bytes(100))
                    await asyncio.sleep(0.01)
            except ConnectionError:
                gone.set()
                raise

        async with web(tmp_path, script) as (base, client):

            async def consume() -> None:
                if what == "download":
                    async with client.download(f"{base}/x"):
                        raise AssertionError("it was fetched")
                async with client.fetch(f"{base}/x") as found:
                    await collected(found.body)

            task = asyncio.create_task(consume())
            await begun.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.registries.rest()
            await gone.wait()

    run(work)


@pytest.mark.parametrize(
    ("stated", "head", "expected"),
    [
        ("text/plain", b"\x00", "text/plain"),
        ("text/html", b"FROM x", ""),
        ("application/json", b"FROM x", ""),
        ("application/x-tar", b"FROM x", "application/x-tar"),
        ("application/x-tar-gz", b"", "application/x-tar"),
        ("application/zip", TAR, ""),
        ("text/plain, text/html", b"", "text/plain"),
        ("xtext/plain", b"", ""),
        ("", b"FROM x", "text/plain"),
        ("", b"\xef\xbb\xbfFROM x", "text/plain"),
        ("", "FROM ü\n".encode("latin-1"), "text/plain"),
        ("", b"# a\x1b[m\n", "text/plain"),
        ("", b"a\x00", "application/octet-stream"),
        ("", b"BZh9", "application/x-bzip2"),
        ("", b"\n<!-- x", ""),
        ("", b"<xml", "text/plain"),
        ("", b"%PDF-1.4", ""),
        ("", b"\x7fELF\x02", ""),
        (f"{OCTETS}; x=y", TAR, "application/x-tar"),
    ],
)
def test_content_types(stated: str, head: bytes, expected: str) -> None:
    assert content_type(stated, head) == expected


def test_every_tar_is_recognised_by_its_header() -> None:
    assert sniffed(TAR) == "application/x-tar"
    old = bytearray(512)  # the seventh edition of Unix: no magic
    old[0:5], old[100:107], old[124:136] = b"GIF89", b"0000644", b"00000000000\0"
    old[148:156] = b"%06o\0 " % (sum(old) + 8 * ord(" "))
    assert sniffed(bytes(old)) == "application/x-tar"
    old[0] ^= 1
    assert sniffed(bytes(old)) != "application/x-tar"


@given(
    st.text(max_size=40), st.one_of(st.binary(max_size=600), st.binary(max_size=30).map(lambda end: TAR[:512] + end))
)
def test_any_answer_has_a_known_type(stated: str, head: bytes) -> None:
    found = content_type(stated, head)
    assert found in ("", "text/plain") or found.startswith("application/")
    assert "/" in sniffed(head)


# --- progress -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2 << 20), max_size=50), st.booleans())
def test_progress_grows_and_ends_at_the_total(sizes: list[int], known: bool) -> None:
    said: list[Transfer] = []
    total = sum(sizes)
    meter = Meter(said.append, "", "Downloading", total if known else 0)
    for size in sizes:
        meter.take(size)
    meter.end()
    shown = [message.progress_detail.current for message in said if message.progress_detail]
    assert shown == sorted(shown)
    assert shown[-1] == total
    assert shown.count(total) <= 1 + sizes.count(0) + (not known)


# --- ADD of URLs ----------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    body = os.urandom(2_500_000)
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"

    async def work() -> None:
        script = serving(body, Last_Modified="Tue, 14 Nov 2023 22:13:20 GMT")
        async with web(tmp_path, script) as (base, client):
            async with client.download(f"{base}/d/a%20b.tar.gz?x=y", checksum=digest) as found:
                assert (found.name, found.digest) == ("a b.tar.gz", digest)
                tree = found.tree
                entry = tree.find("a b.tar.gz")
                assert entry is not None
                assert (entry.kind, entry.mode, entry.uid, entry.gid) == ("0", 0o600, 0, 0)
                assert (entry.size, entry.mtime) == (len(body), 1_700_000_000 * 10**9)
                root = tree.resolve("")
                assert root is not None and root.kind == "5"
                assert tree.find("b") is tree.resolve("a b.tar.gz/x") is None
                assert tree.children("") == ["a b.tar.gz"]
                assert list(tree.walk("")) == [("a b.tar.gz", entry)]
                assert tree.digest(entry) == hashlib.sha256(body).digest()
                assert tree.read("a b.tar.gz", len(body)) == body
                with pytest.raises(EngineError):
                    tree.read("a b.tar.gz", len(body) - 1)
                with pytest.raises(EngineError):
                    tree.read("b", 1)
                for _ in range(2):  # each reader begins at the beginning
                    reader = tree.reader(entry)
                    buffer = memoryview(bytearray(1_000_000))
                    pieces = []
                    while got := reader.readinto(buffer):
                        pieces.append(bytes(buffer[:got]))
                    assert b"".join(pieces) == body
                    reader.close()
            assert client.said[-1].status == "Downloading"
            assert client.said[-1].id == ""

    run(work)


def test_an_empty_file(tmp_path: Path) -> None:
    async def work() -> None:
        async with web(tmp_path, serving(b"")) as (base, client), client.download(f"{base}/x") as found:
            entry = found.tree.find("x")
            assert entry is not None and (entry.size, entry.mtime) == (0, 0)
            assert found.tree.read("x", 0) == b""

    run(work)


def test_checksums(tmp_path: Path) -> None:
    right = f"sha256:{hashlib.sha256(b'x').hexdigest()}"
    wrong = f"sha256:{'0' * 64}"

    async def work() -> None:
        async with web(tmp_path, serving(b"x")) as (base, client):
            with pytest.raises(InvalidParameter) as caught:
                async with client.download(f"{base}/x", checksum=wrong):
                    raise AssertionError("it was fetched")
            assert caught.value.message == f"digest mismatch {right}: {wrong}"

    run(work)
    check_checksum(right)
    for bad, words in (
        *((text, "invalid checksum digest format") for text in ("x", ":", "sha256:", "a+:b", right.upper())),
        *((text, "invalid checksum digest format") for text in (right + "\n", f"sha256:{'g' * 64}")),
        *((text, "invalid checksum digest length") for text in (right[:-1], "sha256:g")),
        *((text, "unsupported digest algorithm") for text in ("md5:0", f"sha512:{'0' * 128}", "a+b:z")),
    ):
        with pytest.raises(InvalidParameter, match=f"^{words}$"):
            check_checksum(bad)


@pytest.mark.parametrize(
    ("path", "disposition", "expected"),
    [
        ("/a/b", "", "b"),
        ("/a/b?c=d/e#f/g", "", "b"),
        ("/a%2Fb", "", "b"),
        ("/b.tar", 'attachment; filename="c"', "b.tar"),
        ("/b/", "", ""),
        ("/", 'attachment; filename="c"', "c"),
        ("", "inline; filename=c.txt", "c.txt"),
        ("/", "attachment; filename*=UTF-8''%e2%82%ac%20x", "€ x"),
        ("/", 'attachment; filename="/etc/passwd"', "passwd"),
        ("/", 'attachment; filename="a/"', ""),
        ("/", 'attachment; filename=".."', ""),
        ("/", "attachment", ""),
        ("/", ";;=", ""),
        ("/..", "", ""),
        ("/.", "", ""),
        ("/a/%2e%2e", "", ""),
        ("/%00", "", ""),
        ("/.wh.x", "", ""),
        ("/" + "x" * 255, "", "x" * 255),
        ("/" + "x" * 256, "", ""),
        ("/%ff", "", "\udcff"),
    ],
)
def test_file_names(path: str, disposition: str, expected: str) -> None:
    assert file_name(f"http://h{path}", {"Content-Disposition": disposition}) == expected


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_file_name_is_one_name(path: str, disposition: str) -> None:
    headers = {"Content-Disposition": f"attachment; filename{disposition}".replace("\n", "").replace("\r", "")}
    name = file_name("http://h/" + path.replace("[", "").replace("]", ""), headers)
    assert "/" not in name
    assert "\0" not in name
    assert name not in (".", "..")
    assert len(os.fsencode(name)) <= 255


def test_a_file_without_a_name(tmp_path: Path) -> None:
    async def work() -> None:
        async with web(tmp_path, serving(b"x")) as (base, client):
            with pytest.raises(InvalidParameter) as caught:
                async with client.download(f"{base}/"):
                    raise AssertionError("it was fetched")
            assert caught.value.message == f"cannot determine filename from url: {base}/"
            async with client.download(f"{base}/", named=False) as found:
                assert found.name == UNNAMED
        script = serving(b"x", Content_Disposition="attachment; filename=y")
        async with web(tmp_path, script) as (base, client), client.download(f"{base}/") as found:
            assert found.name == "y"

    run(work)


def test_files_that_cannot_be_fetched(tmp_path: Path) -> None:
    async def script(ask: Ask) -> None:
        if ask.path == "/cut":
            await ask.answer(200, b"x", Content_Length="5")
            raise Close
        await ask.answer(404, b"no")

    async def work() -> None:
        async with web(tmp_path, script) as (base, client):
            with pytest.raises(ServerError) as caught:
                async with client.download(f"{base}/x"):
                    raise AssertionError("it was fetched")
            assert caught.value.message == f"{base}/x: Got HTTP status code >= 400: 404 X"
            with pytest.raises(ServerError):
                async with client.download(f"{base}/cut"):
                    raise AssertionError("it was fetched")
            with pytest.raises(InvalidParameter, match="invalid URL"):
                async with client.download("http://:x/"):
                    raise AssertionError("it was fetched")

    run(work)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def work() -> None:
        async with web(tmp_path, serving(b"x")) as (base, client):
            monkeypatch.setattr(os, "pwrite", full)
            with pytest.raises(ServerError, match="no space left on device"):
                async with client.download(f"{base}/x"):
                    raise AssertionError("it was fetched")
            monkeypatch.undo()

    run(work)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tue, 14 Nov 2023 22:13:20 GMT", 1_700_000_000),
        ("Tuesday, 14-Nov-23 22:13:20 GMT", 1_700_000_000),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Wed, 31 Dec 1969 23:59:59 GMT", 0),
        ("Fri, 01 Jan 9999 00:00:00 GMT", 0),
        ("yesterday", 0),
        ("", 0),
        ("Tue, 99 Nov 2023 22:13:20 GMT", 0),
    ],
)
def test_modification_times(text: str, expected: int) -> None:
    assert modified({"Last-Modified": text}) == expected


@given(st.text())
def test_any_modification_time(text: str) -> None:
    assert modified({"Last-Modified": text}) >= 0

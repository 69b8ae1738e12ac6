"""Pulls and pushes while their registry has trouble: how often and when they try again, and what
ends them. No test waits: the client's sleeps are recorded.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from engine.config import Config
from engine.errors import ServerError
from engine.images.credentials import NOBODY
from engine.images.registry.session import DELAYS, PATIENCE
from tests.support.images.archives import Image, digest, docker_archive
from tests.support.logs.receivers import certificate
from tests.unit.images.test_registry import IMAGE as BOTH
from tests.unit.images.test_registry import (
    MANIFEST,
    Ask,
    Close,
    Good,
    Puller,
    Script,
    Server,
    run,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ALL = (*DELAYS, *PATIENCE)
IMAGE = Image(BOTH.layers[:1], [], {"Cmd": ["sh"]})
UPLOAD = "/v2/a/b/blobs/uploads/"
BRIEF = 0.5
"""Seconds without an answer, after which the client of a registry that stalls tries again."""


class Registry(Good):
    """A registry that also takes pushes. `trouble` answers requests in its place while `rounds`
    lasts.
    """

    def __init__(self, where: Callable[[Ask], bool], trouble: Script, rounds: int) -> None:
        super().__init__(IMAGE)
        self.where = where
        self.trouble = trouble
        self.rounds = rounds
        self.taken: dict[str, bytes] = {}
        self.sent = b""

    async def __call__(self, ask: Ask) -> None:
        if self.rounds and self.where(ask):
            self.rounds -= 1
            await self.trouble(ask)
        elif ask.method in ("GET", "HEAD") and ask.path.rpartition("/")[2] not in self.taken:
            await super().__call__(ask)
        elif ask.method == "HEAD":
            await ask.answer(200)
        elif ask.method == "POST":
            await ask.answer(202, Location=f"{UPLOAD}1?state=x")
        elif ask.method == "PATCH":
            self.sent = ask.body
            await ask.answer(202, Location=f"{UPLOAD}1?state=y")
        elif ask.method == "PUT" and ask.path.startswith(UPLOAD):
            name = digest(self.sent or ask.body)
            assert f"digest={name.replace(':', '%3A')}" in ask.query or f"digest={name}" in ask.query
            self.taken[name] = self.sent
            await ask.answer(201)
        elif ask.method == "PUT":
            self.taken["manifest"] = ask.body
            await ask.answer(201)
        else:
            await ask.answer(202)


class Site:
    """A registry, a client of it, and the seconds that the client has slept."""

    def __init__(self, registry: Registry, server: Server, puller: Puller) -> None:
        self.registry, self.server, self.puller = registry, server, puller
        self.slept: list[float] = []
        self.when_asleep: Callable[[], Awaitable[None]] | None = None
        puller.client.delays, puller.client.patience = DELAYS, PATIENCE
        puller.client.attempts = 1 + len(PATIENCE)  # of downloads, whose waits are then the same
        puller.client.sleep = self._sleep

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self.when_asleep is not None:
            await self.when_asleep()

    async def pull(self) -> None:
        await self.puller.pull(f"{self.server.host}/a/b")
        assert self.puller.stage.images.get(f"{self.server.host}/a/b:t").id == IMAGE.id

    async def push(self) -> None:
        name = f"{self.server.host}/a/b:t"
        await self.puller.stage.load(docker_archive(Image(IMAGE.layers, [name])))
        sending = await self.puller.remote.push(name, "", NOBODY)
        async for _ in sending.run():
            pass
        manifest = json.loads(self.registry.taken["manifest"])
        assert all(each["digest"] in self.registry.taken for each in (*manifest["layers"], manifest["config"]))

    def outlived(self, rounds: int) -> bool:
        """True if the client slept as long as dockerd or longer before each retry. A request whose
        connection was closed is sent again at once on another one, which takes a round, too. With
        a short timeout, a busy machine may add retries.
        """
        most = len(ALL) if self.puller.client.stall == BRIEF else rounds
        return rounds // 2 <= len(self.slept) <= most and all(
            wanted <= slept <= wanted * 1.2 for wanted, slept in zip(ALL, self.slept, strict=False)
        )


@contextlib.asynccontextmanager
async def site(
    root: Path, where: Callable[[Ask], bool], trouble: Script, rounds: int, stall: float = 30
) -> AsyncIterator[Site]:
    registry = Registry(where, trouble, rounds)
    async with Server(registry) as server, Puller(root) as puller:
        puller.client.stall = stall
        yield Site(registry, server, puller)


# --- kinds of trouble -----------------------------------------------------------------------------


def status(number: int, body: bytes = b"", **headers: str) -> Script:
    return lambda ask: ask.answer(number, body, **headers)


async def closes(ask: Ask) -> None:
    raise Close


async def resets(ask: Ask) -> None:
    ask.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise Close


async def stalls(ask: Ask) -> None:
    await asyncio.Event().wait()


async def is_no_http(ask: Ask) -> None:
    await ask.send(b"220 smtp.example ESMTP\r\n")
    raise Close


def within(end: Script, *, chunked: bool = False) -> Script:
    """Some bytes of an answer, and then trouble."""

    async def trouble(ask: Ask) -> None:
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 300000"
        await ask.send(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n" + (b"100\r\nab" if chunked else b"ab"))
        await end(ask)

    return trouble


PASSING = {
    "503": status(503),
    "500": status(500, b"<html>oops</html>"),
    "502": status(502),
    "504": status(504),
    "429": status(429, b'{"errors":[{"code":"TOOMANYREQUESTS","message":"later"}]}'),
    "closed": closes,
    "reset": resets,
    "stalled": stalls,
    "not HTTP": is_no_http,
}
IN_ANSWERS = {
    "closed within": within(closes),
    "reset within": within(resets),
    "stalled within": within(stalls),
    "cut chunk": within(closes, chunked=True),
    "redirected to nothing": status(307, Location="http://127.0.0.1:1/x"),
}
STALLED = {"stalled", "stalled within"}


def is_config(ask: Ask) -> bool:
    return ask.path == f"/v2/a/b/blobs/{IMAGE.id}"


def is_layer(ask: Ask) -> bool:
    return ask.method == "GET" and "/blobs/" in ask.path and not is_config(ask)


PUSHES = {
    "look-up": lambda ask: ask.method == "HEAD",
    "begin": lambda ask: ask.method == "POST",
    "bytes": lambda ask: ask.method == "PATCH",
    "end": lambda ask: ask.method == "PUT" and ask.path.startswith(UPLOAD),
    "manifest": lambda ask: ask.method == "PUT" and "/manifests/" in ask.path,
}


@pytest.mark.parametrize("trouble", [*PASSING, *IN_ANSWERS])
@pytest.mark.parametrize("where", [is_config, is_layer])
def test_a_pull_outlives_trouble(tmp_path: Path, where: Callable[[Ask], bool], trouble: str) -> None:
    async def work() -> None:
        stall = BRIEF if trouble in STALLED else 30
        async with site(tmp_path, where, (PASSING | IN_ANSWERS)[trouble], rounds=4, stall=stall) as found:
            await found.pull()
            assert found.outlived(4), found.slept

    run(work)


@pytest.mark.parametrize("trouble", PASSING)
@pytest.mark.parametrize("where", PUSHES)
def test_a_push_outlives_trouble(tmp_path: Path, where: str, trouble: str) -> None:
    async def work() -> None:
        stall = BRIEF if trouble in STALLED else 30
        async with site(tmp_path, PUSHES[where], PASSING[trouble], rounds=4, stall=stall) as found:
            await found.push()
            assert found.outlived(4), found.slept

    run(work)


# --- how long -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [is_config, is_layer, *PUSHES.values()], ids=["config", "layer", *PUSHES])
def test_patience_has_an_end(tmp_path: Path, where: Callable[[Ask], bool]) -> None:
    """dockerd's five retries after 5, 10, 15, 20 and 25 seconds, after quick ones."""

    async def work() -> None:
        async with site(tmp_path, where, status(503), rounds=1000) as found:
            with pytest.raises(ServerError, match="503"):
                await (found.pull() if where in (is_config, is_layer) else found.push())
            assert len(found.slept) == len(ALL) and found.outlived(len(ALL)), found.slept

    run(work)


@pytest.mark.parametrize("attempts", [1, 2, 5, 7])
def test_a_layer_has_as_many_attempts_as_configured(tmp_path: Path, attempts: int) -> None:
    """After 5, 10, 15 seconds and so on, as dockerd's; the first one includes the quick retries."""

    async def work() -> None:
        async with site(tmp_path, is_layer, status(503), rounds=1000) as found:
            found.puller.remote.configure(Config(download_attempts=attempts))
            with pytest.raises(ServerError, match="503"):
                await found.pull()
            wanted = (*DELAYS, *(5 * number for number in range(1, attempts)))
            assert len(found.slept) == len(wanted) and 1000 - found.registry.rounds == len(wanted) + 1
            assert all(least <= slept <= least * 1.2 for least, slept in zip(wanted, found.slept, strict=True))

    run(work)


@pytest.mark.parametrize("where", [is_layer, PUSHES["bytes"]])
def test_bytes_that_arrive_renew_it(tmp_path: Path, where: Callable[[Ask], bool]) -> None:
    """A download that goes on begins with the first wait again; an upload sends all bytes again."""

    async def a_part(ask: Ask) -> None:
        data = registry.blobs[registry.layers[0]]
        begin = int(ask.headers.get("range", "bytes=0-")[6:-1])
        if ask.method == "PATCH":
            raise Close
        if not begin:
            await ask.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:70_000])
        else:
            head = f"Content-Length: {len(data) - begin}\r\nContent-Range: bytes {begin}-{len(data) - 1}/{len(data)}"
            await ask.send(f"HTTP/1.1 206 X\r\n{head}\r\n\r\n".encode() + data[begin : begin + 70_000])
        raise Close

    async def work() -> None:
        nonlocal registry
        async with site(tmp_path, where, a_part, rounds=3) as found:
            registry = found.registry
            await (found.pull() if where is is_layer else found.push())
            if where is is_layer:
                assert all(DELAYS[0] <= slept <= DELAYS[0] * 1.2 for slept in found.slept) and len(found.slept) == 3
            else:
                assert found.outlived(3), found.slept

    registry: Registry
    run(work)


@pytest.mark.parametrize(
    ("after", "slept"),
    [
        ("7", [7, 7, 7]),
        ("60", [60]),  # the second one would be longer than dockerd waits at all
        ("79", []),
        ("86400", []),
        ("inf", []),
        ("0", [0.2, 0.8, 2]),
        ("-5", [0.2, 0.8, 2]),
        ("nan", [0.2, 0.8, 2]),
        ("soon", [0.2, 0.8, 2]),
        ("Wed, 21 Oct 2065 07:28:00 GMT", [0.2, 0.8, 2]),
    ],
)
@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("where", [is_layer, PUSHES["begin"]], ids=["pull", "push"])
def test_retry_after(tmp_path: Path, where: Callable[[Ask], bool], code: int, after: str, slept: list[float]) -> None:
    async def work() -> None:
        async with site(tmp_path, where, status(code, Retry_After=after), rounds=3) as found:
            work = found.pull if where is is_layer else found.push
            if len(slept) == 3:
                await work()
            else:
                with pytest.raises(ServerError):
                    await work()
            assert all(wanted <= got <= wanted * 1.2 for wanted, got in zip(slept, found.slept, strict=True))

    run(work)


# --- a registry that goes and comes back ----------------------------------------------------------


@pytest.mark.parametrize("where", [is_config, is_layer, *PUSHES.values()], ids=["config", "layer", *PUSHES])
def test_a_registry_that_starts_again(tmp_path: Path, where: Callable[[Ask], bool]) -> None:
    """Its connections are closed and refused, until it listens again."""

    async def goes(ask: Ask) -> None:
        found.server.close()
        raise Close

    async def comes() -> None:
        if len(found.slept) == 5:
            await found.server.listen()

    async def work() -> None:
        nonlocal found
        async with site(tmp_path, where, goes, rounds=1) as found:
            found.when_asleep = comes
            await (found.pull() if where in (is_config, is_layer) else found.push())
            assert len(found.slept) == 5 and found.outlived(5), found.slept

    found: Site
    run(work)


@pytest.mark.parametrize("pushes", [False, True])
def test_a_registry_that_is_not_there(tmp_path: Path, pushes: bool) -> None:
    """As in dockerd, which asks for its version first."""

    async def work() -> None:
        async with site(tmp_path, lambda ask: False, closes, rounds=0) as found:
            found.server.close()
            with pytest.raises(ServerError, match="connect: connection refused"):
                await (found.push() if pushes else found.pull())
            assert not found.slept

    run(work)


@pytest.mark.parametrize("where", ["bytes", "end"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (404, "BLOB_UPLOAD_UNKNOWN"),
        (404, ""),
        (400, "BLOB_UPLOAD_INVALID"),
        (400, "DIGEST_INVALID"),
        (400, "SIZE_INVALID"),
    ],
)
def test_a_lost_or_spoilt_upload_begins_again(tmp_path: Path, where: str, code: int, error: str) -> None:
    body = json.dumps({"errors": [{"code": error, "message": "x"}]}).encode() if error else b""

    async def work() -> None:
        async with site(tmp_path, PUSHES[where], status(code, body), rounds=2) as found:
            await found.push()
            assert len(found.slept) == 2 and found.outlived(2), found.slept

    run(work)


# --- tokens that expire ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", [MANIFEST, is_config, is_layer, *PUSHES.values()])
def test_tokens_expire_at_any_time(tmp_path: Path, where: str | Callable[[Ask], bool]) -> None:
    """A registry that no longer accepts a token it has accepted for the requests before."""
    is_due = (lambda ask: ask.path == where) if isinstance(where, str) else where
    issued: list[str] = []
    valid: set[str] = set()

    async def work() -> None:
        async with site(tmp_path, lambda ask: False, closes, rounds=0) as found:
            plain = found.registry
            due = [True]

            async def guarded(ask: Ask) -> None:
                if ask.path == "/token":
                    issued.append(f"token{len(issued)}")
                    valid.add(issued[-1])
                    await ask.answer(200, json.dumps({"token": issued[-1], "expires_in": 300}).encode())
                    return
                token = ask.headers.get("authorization", "").removeprefix("Bearer ")
                if due and is_due(ask) and token in valid:
                    due.clear()
                    valid.clear()
                if token in valid:
                    await plain(ask)
                else:
                    realm = f'Bearer realm="http://{ask.headers["host"]}/token",service="x"'
                    await ask.answer(401, WWW_Authenticate=realm)

            found.server.script = guarded
            await (found.push() if where in PUSHES.values() else found.pull())
            assert not due and len(issued) == 2
            assert len(found.slept) == (1 if where is PUSHES["bytes"] else 0), "only its bytes cannot be sent again"

    run(work)


# --- what is final --------------------------------------------------------------------------------


async def circle(ask: Ask) -> None:
    await ask.answer(307, Location=ask.path)


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (status(404), "404"),
        (status(403), "denied"),
        (status(410), "410"),
        (status(501), "501"),
        (status(307), "307"),
        (circle, "more than 8 redirections"),
        (status(307, Location="http://192.0.2.1/x"), "plain HTTP is allowed only"),
        (status(307, Location="gopher://x/"), "redirects to an invalid address"),
        (status(307, Location=f"http://{'a' * 64}/"), "plain HTTP is allowed only"),
        (status(307, Location=f"https://{'a' * 64}/"), "its name is not valid"),
        (status(200, b"?" * 400_000), "larger than the|more than|verification failed"),
    ],
)
@pytest.mark.parametrize("where", [is_config, is_layer])
def test_final_failures_of_pulls(tmp_path: Path, where: Callable[[Ask], bool], trouble: Script, text: str) -> None:
    async def work() -> None:
        async with site(tmp_path, where, trouble, rounds=1000) as found:
            with pytest.raises(ServerError, match=text):
                await found.pull()
            assert not found.slept

    run(work)


@pytest.mark.parametrize("code", [400, 401, 403, 405, 413, 415, 501])
@pytest.mark.parametrize("where", PUSHES)
@pytest.mark.parametrize("early", [False, True])
def test_final_failures_of_pushes(tmp_path: Path, where: str, code: int, early: bool) -> None:
    """`early`: the registry answers before it has read the body, and closes the connection."""

    async def refuses(ask: Ask) -> None:
        body = b'{"errors":[{"code":"UNSUPPORTED","message":"the reason"}]}'
        await ask.answer(code, b"" if ask.method == "HEAD" else body, Connection="close")
        raise Close

    async def work() -> None:
        async with site(tmp_path, PUSHES[where], refuses, rounds=1000) as found:
            if early:
                found.server.unread = PUSHES[where]
            with pytest.raises(ServerError, match="the reason" if where != "look-up" else None):
                await found.push()
            assert not found.slept

    run(work)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_certificate_that_is_not_trusted(tmp_path: Path, trusted: bool) -> None:
    """It is neither tried again nor asked in the clear. `trusted`: the operator has its authority
    in the directory of the registry, otherwise another one.
    """

    async def work() -> None:
        authority, pair = certificate(tmp_path / "server", name="127.0.0.1")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair)
        async with site(tmp_path, lambda ask: False, closes, rounds=0) as found:
            found.server.close()
            async with Server(found.registry, context) as server:
                found.server = server
                vouched = authority if trusted else certificate(tmp_path / "other")[0]
                (tmp_path / "none" / server.host).mkdir(parents=True)
                shutil.copy(vouched, tmp_path / "none" / server.host / "ca.crt")
                if trusted:
                    await found.pull()
                    return
                with pytest.raises(ServerError, match="tls: failed to verify certificate: x509: "):
                    await found.pull()
                assert not found.slept and not server.asked

    run(work)

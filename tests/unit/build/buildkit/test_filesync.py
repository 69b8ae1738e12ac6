"""Files of a client as a tar stream."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.build.buildkit import filesync
from engine.build.buildkit.messages import Stat
from engine.errors import EngineError, InvalidParameter, NotFound, ServerError
from tests.support.builds import sessions
from tests.support.builds.sessions import DIRECTORY, LINK, Call, Handler, Node, field
from tests.unit.build.buildkit.test_session import opened

PIPE, DEVICE, CHARACTER = 1 << 25, 1 << 26, 1 << 21


def synced(handlers: Mapping[str, Handler], name: str = "context", **patterns: tuple[str, ...]) -> bytes:
    async def work() -> bytes:
        async with opened(handlers) as (session, _):
            return b"".join([chunk async for chunk in session.sync(name, **patterns)])

    return asyncio.run(work())


def members(archive: bytes) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened_archive:
        found = {}
        for member in opened_archive:
            content = opened_archive.extractfile(member) if member.isreg() else None
            found[member.name] = (member, content.read() if content else b"")
        return found


def test_each_kind_of_file() -> None:
    long = "/".join(["d" * 60] * 3)
    files = {
        "a": Node(b"content", 0o755 | 1 << 23 | 1 << 20, uid=7, gid=8, modified=1_600_000_000_999_999_999),
        "d": Node(mode=DIRECTORY | 0o750),
        "d/empty": Node(),
        "d/link": Node(mode=LINK | 0o777, target="../a"),
        "hard": Node(b"", 0o644, "a"),
        "pipe": Node(mode=PIPE | 0o600),
        "null": Node(mode=DEVICE | CHARACTER | 0o666),
        "socket": Node(mode=sessions.SOCKET | 0o666),
        long: Node(b"x" * 70_000),
        "café": Node(mode=LINK | 0o777, target="é" * 80),
        "old": Node(modified=1),
        "id": Node(uid=1 << 30, gid=1 << 31),
    }
    files["a"].xattrs["security.capability"] = b"\x01\0\0\x02\xff"
    archive = synced(sessions.of_files({"context": files}))
    assert archive.endswith(bytes(1024)) and len(archive) % 512 == 0
    found = members(archive)
    assert list(found) == [path for path in files if path != "socket"]
    head, content = found["a"]
    assert (head.mode, head.uid, head.gid, head.mtime, content) == (0o5755, 7, 8, 1_600_000_000, b"content")
    assert head.pax_headers["SCHILY.xattr.security.capability"].encode("utf-8", "surrogateescape") == b"\1\0\0\2\xff"
    assert found["d"][0].isdir() and found["d"][0].mode == 0o750
    assert (found["d/link"][0].type, found["d/link"][0].linkname) == (b"2", "../a")
    assert (found["hard"][0].type, found["hard"][0].linkname) == (b"1", "a")
    assert (found["pipe"][0].type, found["null"][0].type) == (b"6", b"3")
    assert found[long][1] == b"x" * 70_000
    assert found["café"][0].linkname == "é" * 80
    assert (found["id"][0].uid, found["id"][0].gid) == (1 << 30, 1 << 31)
    assert found["old"][0].mtime == 0


@given(
    st.dictionaries(st.text("abcdé/", min_size=1, max_size=12), st.binary(max_size=2000), max_size=90),
    st.integers(1, 5),
    st.sampled_from((1000, 32768)),
)
def test_contents_in_any_order(contents: dict[str, bytes], together: int, piece: int) -> None:
    archive = synced(sessions.of_files({"context": contents}, together=together, piece=piece))
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        read = [(each.size, each.isreg() and found.extractfile(each).read()) for each in found]  # type: ignore[union-attr]
    assert read == [(len(content), content) for content in contents.values()]


def test_a_large_file_is_passed_on_while_it_arrives() -> None:
    large = bytes(range(256)) * 40_000
    found = members(synced(sessions.of_files({"context": {"large": large, "small": b"x"}}, together=2)))
    assert found["large"][1] == large and found["small"][1] == b"x"


def test_patterns_are_the_clients_business() -> None:
    handlers = sessions.of_files({"context": {"a": b"1", "b": b"2", "é": b"3"}})
    assert list(members(synced(handlers, follow=("a", "c")))) == ["a"]
    assert list(members(synced(handlers, exclude=("b",)))) == ["a", "é"]
    seen = []

    def look(call: Call) -> None:
        seen.append({name: call.values(name) for name, _ in call.headers if not name.startswith(":")})
        raise sessions.Failed(2, "stop")

    with pytest.raises(ServerError, match="stop"):
        synced({sessions.DIFF_COPY: look}, exclude=("é b", "c"), include=("x y",), follow=("f",))
    assert seen[0]["exclude-patterns"] == ["%C3%A9%20b", "c"]
    assert seen[0]["exclude-patterns-encoded"] == ["1"]
    assert seen[0]["include-patterns"] == ["x y"] and "include-patterns-encoded" not in seen[0]
    assert seen[0]["followpaths"] == ["f"] and seen[0]["dir-name"] == ["context"]


def test_a_directory_that_the_client_does_not_give() -> None:
    with pytest.raises(NotFound, match="no access allowed to dir other"):
        synced(sessions.of_files({}), "other")


def packets(*sent: bytes) -> dict[str, Handler]:
    """A client that sends these packets whatever it is asked."""

    def copy(call: Call) -> None:
        for packet in sent:
            call.send(packet)

    return {sessions.DIFF_COPY: copy}


FILE, END = field(2, Node(b"abc").stat("f")), field(1, 0)


@pytest.mark.parametrize(
    ("sent", "kind", "words"),
    [
        ((), InvalidParameter, "ended the copy too early"),
        ((FILE, END), InvalidParameter, "ended the copy too early"),
        ((END, field(1, 4)), ServerError, "context: "),
        ((field(1, 4) + field(4, "it broke"),), ServerError, "context: it broke"),
        ((field(1, 3),), InvalidParameter, "ended the copy too early"),
        ((FILE, END, field(1, 2) + field(3, 1) + field(4, "x")), InvalidParameter, "which was not requested"),
        ((FILE, END, field(1, 2) + field(4, "abcd")), InvalidParameter, "size of f changed"),
        ((FILE, END, field(1, 2) + field(4, "ab"), field(1, 2)), InvalidParameter, "size of f changed"),
        ((FILE, END, FILE), InvalidParameter, "listed after the end"),
        ((field(2, field(1, "f") + field(5, (1 << 64) - 1)),), InvalidParameter, "size of f is negative"),
        ((b"\xff",), InvalidParameter, "malformed protobuf message Packet"),
    ],
)
def test_clients_that_break_the_protocol(sent: tuple[bytes, ...], kind: type[EngineError], words: str) -> None:
    with pytest.raises(kind, match=words):
        synced(packets(*sent))


def test_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesync, "FILES_LIMIT", 3)
    with pytest.raises(InvalidParameter, match="more than 3 files"):
        synced(sessions.of_files({"context": dict.fromkeys("abcd", b"")}))


@given(
    st.builds(
        Stat,
        path=st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=120),
        mode=st.integers(0, 0o777),
        uid=st.integers(0, (1 << 32) - 1),
        gid=st.integers(0, (1 << 32) - 1),
        size=st.integers(0, 1 << 40),
        modified=st.integers(-(1 << 62), 1 << 62),
    )
)
def test_headers(described: Stat) -> None:
    """Python's tarfile reads what was meant."""
    path = described.path.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    described.path = path
    read = tarfile.TarFile.open(fileobj=io.BytesIO(filesync.header(described) + bytes(1024))).next()
    assert read is not None
    assert (read.mode, read.uid, read.gid, read.size) == (described.mode, described.uid, described.gid, described.size)
    assert read.mtime == described.modified // 1_000_000_000
    assert read.name == path.rstrip("/")

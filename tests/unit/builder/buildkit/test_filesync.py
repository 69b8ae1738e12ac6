"""The receiving side of a copy of a client's files."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit import filesync
from engine.builder.buildkit.messages import Stat
from engine.builder.kept import Listed
from engine.errors import EngineError, InvalidParameter, NotFound, ServerError
from tests.support.builds import sessions
from tests.support.builds.sessions import DIRECTORY, LINK, Call, Handler, Node, field
from tests.unit.builder.buildkit.test_session import opened

PIPE, DEVICE, CHARACTER = 1 << 25, 1 << 26, 1 << 21


class Copied:
    """A receiver that wants everything, and checks what its methods promise."""

    def __init__(self) -> None:
        self.files: dict[str, Listed] = {}
        self.contents: dict[str, bytes] = {}
        self._incoming: dict[int, tuple[str, bytearray]] = {}

    def recall(self, stat: bytes) -> bool:
        return False

    def add(self, number: int, stat: bytes, file: Listed) -> bool:
        self.files[file.path] = file
        if file.kind == "0":
            self._incoming[number] = file.path, bytearray()
        return file.kind == "0"

    def write(self, number: int, data: bytes | memoryview) -> None:
        self._incoming[number][1].extend(data)

    def complete(self, number: int, *, whole: bool) -> None:
        path, content = self._incoming.pop(number)
        assert whole == (len(content) == self.files[path].size)
        self.contents[path] = bytes(content)

    def full(self) -> bool:
        return len(self.contents) % 2 == 1

    async def drained(self) -> None:
        pass


def synced(
    handlers: Mapping[str, Handler], name: str = "context", receiver: Any = None, **patterns: tuple[str, ...]
) -> Copied:
    async def work() -> None:
        async with opened(handlers) as (session, _):
            await session.sync(name, found, **patterns)

    found = receiver or Copied()
    asyncio.run(work())
    return cast(Copied, found)


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
        "disk": Node(mode=DEVICE | 0o666),
        "socket": Node(mode=sessions.SOCKET | 0o666),
        long: Node(b"x" * 70_000),
        "café": Node(mode=LINK | 0o777, target="é" * 80),
        "id": Node(uid=1 << 30, gid=1 << 31),
    }
    files["a"].xattrs["security.capability"] = b"\x01\0\0\x02\xff"
    copied = synced(sessions.of_files({"context": files}))
    found = copied.files
    assert [*found] == sorted({*files} - {"socket"}, key=lambda path: path.split("/"))
    capability = ((b"security.capability", b"\1\0\0\2\xff"),)
    assert found["a"] == Listed("a", "0", 0o5755, 7, 8, 7, 1_600_000_000_999_999_999, "", capability)
    assert (found["d"].kind, found["d"].mode) == ("5", 0o750)
    assert (found["d/link"].kind, found["d/link"].target) == ("2", "../a")
    assert (found["hard"].kind, found["hard"].target) == ("1", "a")
    assert [found[name].kind for name in ("pipe", "null", "disk")] == ["6", "3", "4"]
    assert found["café"].target == "é" * 80
    assert (found["id"].uid, found["id"].gid) == (1 << 30, 1 << 31)
    assert copied.contents == {"a": b"content", "d/empty": b"", long: b"x" * 70_000, "id": b""}


@given(
    st.dictionaries(st.text("abcdé/", min_size=1, max_size=12), st.binary(max_size=2000), max_size=90),
    st.integers(1, 5),
    st.sampled_from((1000, 32768)),
)
def test_contents_in_any_order(contents: dict[str, bytes], together: int, piece: int) -> None:
    assert synced(sessions.of_files({"context": contents}, together=together, piece=piece)).contents == contents


def test_what_is_known_is_not_requested() -> None:
    class Half(Copied):
        def recall(self, stat: bytes) -> bool:
            return b"old" in stat

    handlers = sessions.of_files({"context": {"a": b"1", "old": b"2", "older": b"3", "z": b"4"}})
    assert synced(handlers, receiver=Half()).contents == {"a": b"1", "z": b"4"}


def test_files_in_memory() -> None:
    tree = {
        "Dockerfile": Node(mode=LINK | 0o777, target="sub/../real"),
        "loop": Node(mode=LINK | 0o777, target="loop"),
        "real": b"FROM scratch",
        "same": Node(b"", target="real"),
        "sub": Node(mode=DIRECTORY | 0o755),
    }
    found = filesync.InMemory(100, "Dockerfile")
    synced(sessions.of_files({"context": tree}), receiver=found)
    assert [found.content(name) for name in ("Dockerfile", "/real", "same")] == [b"FROM scratch"] * 3
    assert [found.content(name) for name in ("loop", "sub", "none")] == [None] * 3
    with pytest.raises(InvalidParameter, match="Dockerfile: larger than 11 bytes"):
        synced(sessions.of_files({"context": tree}), receiver=filesync.InMemory(11, "Dockerfile"))


def test_patterns_are_the_clients_business() -> None:
    handlers = sessions.of_files({"context": {"a": b"1", "b": b"2", "é": b"3"}})
    assert list(synced(handlers, follow=("a", "c")).files) == ["a"]
    assert list(synced(handlers, exclude=("b",)).files) == ["a", "é"]
    seen = []

    def look(call: Call) -> None:
        seen.append({name: call.values(name) for name, _ in call.headers if not name.startswith(":")})
        raise sessions.Failed(2, "stop")

    with pytest.raises(ServerError, match="stop"):
        synced({sessions.DIFF_COPY: look}, exclude=("é b", "c", "\udcff"), follow=("f",))
    assert seen[0]["exclude-patterns"] == ["%C3%A9%20b", "c", "%FF"]
    assert seen[0]["exclude-patterns-encoded"] == ["1"]
    assert seen[0]["followpaths"] == ["f"] and "followpaths-encoded" not in seen[0]
    assert seen[0]["dir-name"] == ["context"]


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
        ((FILE, END, FILE), InvalidParameter, "listed after the end"),
        ((field(2, field(1, "f") + field(5, (1 << 64) - 1)),), InvalidParameter, "size of f is negative"),
        ((b"\xff",), InvalidParameter, "malformed protobuf message Packet"),
    ],
)
def test_clients_that_break_the_protocol(sent: tuple[bytes, ...], kind: type[EngineError], words: str) -> None:
    with pytest.raises(kind, match=words):
        synced(packets(*sent))


def test_the_end_of_the_list_as_clients_encode_it() -> None:
    """Without its fields, as these have the default values: an empty message."""
    sent = (FILE, b"", field(1, 2) + field(4, "abc"), field(1, 2), field(1, 3))
    assert synced(packets(*sent)).contents == {"f": b"abc"}


@pytest.mark.parametrize("data", ["", "ab", "abcd", "abc abc"])
def test_a_file_of_another_size(data: str) -> None:
    sent = (FILE, END, *(field(1, 2) + field(4, piece) for piece in data.split(" ") if piece), field(1, 2))

    class Incomplete(Copied):
        def complete(self, number: int, *, whole: bool) -> None:
            assert not whole
            self.contents["f"] = bytes(self._incoming.pop(number)[1])

    found = synced(packets(*sent, field(1, 3)), receiver=Incomplete())
    assert b"abc".startswith(found.contents["f"])
    with pytest.raises(InvalidParameter, match="the size of f changed"):
        synced(packets(*sent), receiver=filesync.InMemory(100, "f"))


def test_a_client_that_fails_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsutil's sender sees its own failure when it has received something."""
    monkeypatch.setattr(filesync, "SILENCE", 0.05)

    def copy(call: Call) -> None:
        call.send(FILE)
        call.send(END)
        while call.receive():  # the request
            pass
        raise sessions.Failed(2, "read f: is a directory")

    with pytest.raises(ServerError, match="read f: is a directory"):
        synced({sessions.DIFF_COPY: copy})


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

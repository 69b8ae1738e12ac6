"""The targets of the fuzzer, one per parser. A target takes a random source. It raises an error
that the parser must not raise, or fails an assertion, if it finds a bug.

A target makes its own input from well-formed seeds, and knows which errors the parser may raise for
it. For a parser of streams, the target also asserts that the split into pieces makes no difference;
for a writer and its reader, that the reader returns what was written.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import os
import random
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from engine._fast import cgroup, changes, frames, layer, pack, packed, tar, tarsplit, tree, wireform
from engine._fast.logreader import LogReader
from engine._fast.logwriter import LogWriter
from engine._fast.members import Members
from engine.api import parameters
from engine.builder import context, copying, ignore
from engine.builder.dockerfile import lines, stages
from engine.builder.dockerfile.scope import Platforms, Scope
from engine.builder.trees import DirectoryTree
from engine.errors import EngineError, InvalidParameter
from engine.http.framing import ChunkedReader
from engine.images import reference
from engine.images.instructions import effects, records
from engine.logs import cursor
from engine.manager import certificates, keys, tokens
from engine.monitor import messages
from engine.monitor.journal import Journal
from engine.networks.dns import messages as dns
from engine.swarm_session import messages as swarm
from engine.swarm_session.states import Role
from engine.wire.containers import Config
from engine.wire.nodes import NodeDescription
from tests.fuzz.mutate import mutated, mutated_tar, pieces
from tests.support.images import archives
from tests.support.images.archives import Node, directory, hard_link, symlink
from tests.unit.http.harness import feed

Noise = random.Random
TARGETS: dict[str, Callable[[Noise], None]] = {}


def target(function: Callable[[Noise], None]) -> Callable[[Noise], None]:
    TARGETS[function.__name__] = function
    return function


# --- archives -------------------------------------------------------------------------------------


class Drip:
    """A source that gives few bytes at a time."""

    def __init__(self, data: bytes, size: int = 1 << 20) -> None:
        self._data = io.BytesIO(data)
        self._size = size

    def readinto(self, buffer: memoryview) -> int:
        return self._data.readinto(memoryview(buffer)[: self._size])


@functools.cache
def _archives() -> list[bytes]:
    nodes = [
        directory("a/", mode=0o2755),
        Node("a/empty"),
        Node("a/small", b"x" * 700, uid=1000, gid=1 << 22, mtime=1.5),
        Node("a/" + "long" * 60, b"name"),
        Node("a/.wh.gone", b"with content"),
        Node("a/.wh..wh..opq"),
        symlink("way", "a"),
        symlink("up", "../../.."),
        Node("way/through", b"a link"),
        hard_link("again", "a/small"),
        hard_link("a/deep/again", "a/" + "long" * 60),
        Node("implied/parent/file", b"y" * 512),
        Node("dev", type=tarfile.CHRTYPE, device=(1, 3)),
        Node("fifo", type=tarfile.FIFOTYPE),
        Node("a/small", b"again", mode=0o4755),
        Node("tagged", b"t", pax=(("SCHILY.xattr.user.a", "b"), ("mtime", "1.123456789"))),
    ]
    nodes += [Node(f"many/f{at}", bytes([at]) * at) for at in range(100)]
    small = [directory("d/"), Node("d/f", b"content"), symlink("d/l", "f"), hard_link("d/h", "d/f")]
    found = [archives.tar(some, form) for some in (nodes, small) for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)]
    found.append(archives.tar(small, tarfile.USTAR_FORMAT))
    sparse = Node(
        "GNUSparseFile.0/sparse",
        b"2\n0\n5\n1000\n5\n".ljust(512, b"\0") + b"1234567890",
        pax=(
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "sparse"),
            ("GNU.sparse.realsize", "4096"),
        ),
    )
    older = Node(
        "older", b"1234567890", pax=(("GNU.sparse.map", "0,5,1000,5"), ("GNU.sparse.size", "4096"), ("size", "10"))
    )
    found.append(archives.tar([sparse, older]))
    return found


def _archive(noise: Noise) -> bytes:
    return mutated_tar(noise.choice(_archives()), noise, _archives())


@contextlib.contextmanager
def _directory() -> Iterator[tuple[Path, int]]:
    """An empty directory beside a file that must not change."""
    base = Path(tempfile.mkdtemp(prefix="engined-fuzz-"))
    (base / "outside").write_text("untouched")
    (base / "root").mkdir()
    descriptor = os.open(base / "root", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield base / "root", descriptor
        assert sorted(os.listdir(base)) == ["outside", "root"] and (base / "outside").read_text() == "untouched"
    finally:
        os.close(descriptor)
        above = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        tree.remove_tree(above, b"root")
        os.close(above)
        shutil.rmtree(base)


REFUSED = (tar.ArchiveError, OSError)


@target
def tar_index(noise: Noise) -> None:
    data = _archive(noise)
    answers = []
    for size in (1 << 20, noise.choice([1, 7, 511, 512, 513])):
        try:
            answers.append(repr(tar.Reader(Drip(data, size)).index(10_000)))
        except tar.ArchiveError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]


class Recorded:
    """Tar-split data in memory."""

    def __init__(self, root: int) -> None:
        self.data = b""
        self._root = root

    def write(self, data: bytes) -> None:
        self.data += data

    def inline_files(self) -> None:
        so_far = _reassembled(self.data, self._root)
        self.data = len(so_far).to_bytes(8, "little") + bytes(12) + so_far

    def finish(self, size: int) -> None:
        pass


def _reassembled(data: bytes, root: int, size: int = 1 << 20) -> bytes:
    stream = tarsplit.Stream(Drip(data, size), root)
    found = []
    buffer = bytearray(65_536)
    while got := stream.readinto(buffer):
        found.append(bytes(buffer[:got]))
    stream.close()
    return b"".join(found)


@target
def layer_apply(noise: Noise) -> None:
    """Extract a layer, reassemble its stream, pack the tree again and read that."""
    data = _archive(noise)
    with _directory() as (_, root):
        recorded = Recorded(root)
        digest = hashlib.sha256()
        try:
            layer.apply(Drip(data, noise.choice([1 << 20, 100, 513])), root, digest=digest, tar_split=recorded)
        except REFUSED:
            return
        assert _reassembled(recorded.data, root) == data
        assert digest.digest() == hashlib.sha256(data).digest()
        packer = pack.Packer(root, b"", top=False, layer=True, fine=bool(noise.randrange(2)))
        packed = b"".join(iter(lambda: packer.read(noise.choice([1, 512, 100_000])), b""))
        assert tar.Reader(Drip(packed)).skim() >= 0
        changes.changes(root, [])
        tree.usage(root)


@target
def layer_unpack(noise: Noise) -> None:
    data = _archive(noise)
    with _directory() as (path, root):
        (path / "at").mkdir()
        with contextlib.suppress(*REFUSED):
            layer.unpack(Drip(data), root, noise.choice([b"", b"at", b"none"]), keep_kinds=bool(noise.randrange(2)))


@target
def build_context(noise: Noise) -> None:
    """The index of a context, and the layer of a COPY of all of it; or of an ADD of it."""
    data = _archive(noise)
    with _directory() as (path, root), (path / "spool").open("w+b", buffering=0) as spool:
        spool.write(data)
        index = context.Index(links_out=bool(noise.randrange(2)))
        try:
            members = Members(Drip(data, noise.choice([1 << 20, 100, 513])))
            while batch := members.take(noise.choice([1, 256])):
                for member in batch:
                    index.add(member)
        except (tar.ArchiveError, InvalidParameter):
            index = context.Index(links_out=True)
        (path / "layer").mkdir()
        directory = os.open(path / "layer", os.O_RDONLY)
        stream = None
        try:
            if noise.randrange(2):
                received = context.Context(spool.fileno(), len(data), index)
                chosen = copying.select(received, ["."], destination_is_directory=True)
            else:
                inside = DirectoryTree(root)
                chosen = copying.select(inside, ["spool"], unpack=True, destination_is_directory=True)
            stream = copying.Stream(chosen, copying.destination(-1, "/at/"), root, now=0)
            layer.apply(stream, directory)
            assert sorted(os.listdir(path)) == ["layer", "spool"]
        except (tar.ArchiveError, EngineError, OSError):
            pass
        finally:
            if stream is not None:
                stream.close()
            os.close(directory)


@target
def ignore_patterns(noise: Noise) -> None:
    """Both ways to match a pattern agree, and a `.dockerignore` file is read or refused."""
    pattern = "".join(noise.choice(["a", "b", "*", "?", "**", "/", "**/", "[ab]", "[^a]", "\\*"]) for _ in range(9))
    path = "/".join("".join(noise.choice("ab*") for _ in range(noise.randrange(1, 4))) for _ in range(4))
    tokens = ignore._tokens(pattern, deep=True)
    assert ignore._by_states(tokens)(path) == ignore._by_expression(tokens)(path)
    with contextlib.suppress(InvalidParameter):
        raw = bytes(noise.choice(b"ab*?/![]\\^-#\n \xff.") for _ in range(noise.randrange(40)))
        ignore.Patterns.parse(raw).excluded(path)


@target
def tar_split(noise: Noise) -> None:
    with _directory() as (_, root):
        recorded = Recorded(root)
        layer.apply(Drip(noise.choice(_archives()[:2])), root, tar_split=recorded)
        data = mutated(recorded.data, noise)
        with contextlib.suppress(*REFUSED):
            # The sizes in the data may be huge, but the data that is read is not.
            stream = tarsplit.Stream(Drip(data, noise.choice([1, 100, 1 << 20])), root)
            buffer = bytearray(4096)
            for _ in range(2000):
                if not stream.readinto(buffer):
                    break


# --- logs -----------------------------------------------------------------------------------------

LOGS = [
    b'{"log":"a line\\n","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}\n',
    b'{"log":"\\ud83d\\ude00\\u00e9\\/\\b\\t\\"\\\\\\n","stream":"stderr",'
    b'"attrs":{"k":"v"},"time":"2024-02-29T01:02:04Z"}\n',
    b' { "log" : "b\\n" , "stream" : "stdout" , "time" : "2024-02-29T03:02:03.5+02:00" , "x" : {"y":[1,"}"]} } \r\n',
    b'{"log":"' + b"x" * 20_000 + b'","stream":"stdout","time":"2024-02-29T01:02:06.1Z"}\n',
]


@target
def log_read(noise: Noise) -> None:
    data = mutated(b"".join(noise.choices(LOGS, k=noise.randrange(1, 6))), noise, LOGS)
    directory = tempfile.mkdtemp(prefix="engined-fuzz-")
    try:
        path = os.path.join(directory, "log")
        Path(path).write_bytes(data)
        if noise.random() < 0.3:
            Path(path + ".1").write_bytes(mutated(noise.choice(LOGS), noise))
        answers = []
        options = {
            "stdout": noise.random() < 0.9,
            "stderr": noise.random() < 0.9,
            "since_ns": noise.choice([0, 0, 1709168523_000000000]),
            "timestamps": bool(noise.randrange(2)),
            "framed": bool(noise.randrange(2)),
        }
        tail = noise.choice([None, 0, 1, 3])
        for most in (1 << 20, noise.choice([1, 100, 4096])):
            reader = LogReader(os.fsencode(path), **options)  # type: ignore[arg-type]
            if tail is not None:
                reader.seek_tail(tail)
            found = []
            while piece := reader.read(most):
                found.append(piece)
            answers.append(b"".join(found))
            reader.position()
            reader.newest()
            reader.close()
        assert answers[0] == answers[1]
    finally:
        shutil.rmtree(directory)


@target
def log_packed(noise: Noise) -> None:
    """A damaged packed file: however it is read, each read ends, and the live file follows."""
    lines = [
        b"%d %d" % (number, noise.randrange(1 << noise.choice([8, 60]))) for number in range(noise.choice([1, 900]))
    ]
    directory = tempfile.mkdtemp(prefix="engined-fuzz-")
    try:
        path = os.path.join(directory, "log")
        for number, data in ((1, b"\n".join(lines) + b"\n"), (0, b"live\n")):
            writer = LogWriter(os.fsencode(path))
            writer.write(1, data)
            writer.close()
            if number:
                with open(path, "rb") as source, open(f"{path}.1.gz", "wb") as target:
                    packed.pack(source.fileno(), target.fileno())
                os.unlink(path)
        with open(f"{path}.1.gz", "r+b") as file:
            data = mutated(file.read(), noise)
            file.seek(0)
            file.truncate()
            file.write(data)
        for tail in (None, noise.choice([1, 3, 500, 2000])):
            reader = LogReader(os.fsencode(path), since_ns=noise.choice([0, 1, time.time_ns(), 1 << 62]))
            if tail is not None:
                reader.seek_tail(tail)
            most = noise.choice([1, 100, 1 << 20])
            while reader.read(most) or not reader.at_end:
                pass
            reader.close()
        found = LogReader(os.fsencode(path))
        assert b"".join(iter(lambda: found.read(1 << 16), b"")).endswith(b"live\n")
        found.close()
    finally:
        shutil.rmtree(directory)


@target
def cursor_decode(noise: Noise) -> None:
    seed = cursor.encode(cursor.Cursor(*(noise.randrange(1 << noise.choice([1, 62])) for _ in range(6))))
    data = mutated(seed, noise)
    found = cursor.decode(data)
    assert found is None or cursor.encode(found) == data


@target
def log_packed_read(noise: Noise) -> None:
    """A packed file of any lines is read as its original is."""
    with _directory() as (place, _):
        path, rotated, copy = place / "log", place / "log.1", place / "log.1.gz"
        path.write_bytes(noise.choice(LOGS))
        rotated.write_bytes(mutated(b"".join(noise.choices(LOGS, k=noise.randrange(1, 6))), noise, LOGS))
        with rotated.open("rb") as source, copy.open("w+b") as into:
            packed.pack(source.fileno(), into.fileno())
        data = copy.read_bytes()
        copy.unlink()
        options = {
            "stdout": noise.random() < 0.9,
            "since_ns": noise.choice([0, 0, 1709168523_000000000]),
            "timestamps": bool(noise.randrange(2)),
            "until_now": bool(noise.randrange(2)),
        }
        tail = noise.choice([None, 0, 1, 3])
        answers = []
        for content in (None, data):
            if content is not None:
                rotated.unlink(missing_ok=True)
                copy.write_bytes(content)
            reader = LogReader(os.fsencode(path), **options)  # type: ignore[arg-type]
            if tail is not None:
                reader.seek_tail(tail)
            found = []
            while piece := reader.read(1000):
                found.append(piece)
            answers.append(b"".join(found))
            reader.close()
        assert answers[0] == answers[1]


@target
def log_write(noise: Noise) -> None:
    """Any bytes, in any pieces, with rotations: each line is read back, as text."""
    text = mutated(
        b"one\ntwo \xc3\xa9\r\n<three>&\x01\xe2\x80\xa8\n" + b"y" * noise.choice([0, 16_383, 16_384, 40_000]), noise
    )
    directory = tempfile.mkdtemp(prefix="engined-fuzz-")
    try:
        path = os.fsencode(os.path.join(directory, "log"))
        rotated = noise.random() < 0.3
        writer = LogWriter(path, 5000 if rotated else 0, 3 if rotated else 1)
        for piece in pieces(text, noise):
            writer.write(1, piece)
        writer.end()
        writer.close()
        reader = LogReader(path)
        found = b"".join(iter(lambda: reader.read(1 << 16), b""))
        reader.close()
        if not rotated and b"\n" in text:
            assert found.count(b"\n") == text.count(b"\n")
            assert found.startswith(text.partition(b"\n")[0].decode("ascii", "ignore").encode()[:0])
        # A writer that opens the log again finds whole entries.
        LogWriter(path).close()
    finally:
        shutil.rmtree(directory)


@target
def log_messages(noise: Noise) -> None:
    """Any lines in a spool: valid messages of every protocol, the same ones in any split, and only
    of entries.
    """
    data = mutated(b"".join(noise.choices(LOGS, k=noise.randrange(1, 6))), noise, LOGS)
    found, consumed, count = wireform.entries(data, 0, 1 << 30)
    assert consumed == data.rfind(b"\n") + 1 and count == len(found)
    fixed = [noise.randbytes(noise.choice([0, 1, 5, 300])) for _ in range(8)]
    text = noise.randrange(4)
    partial = {wireform.MSGPACK_STR: wireform.FLUENTD, wireform.JOURNAL: wireform.JOURNALD}.get(text, 0)
    shape = wireform.Form(
        text=text,
        time=noise.randrange(10),
        frame=noise.randrange(5),
        head=(fixed[0], fixed[1]),
        middle=(fixed[2], fixed[3]),
        tail=(fixed[4], fixed[5]),
        part_middle=(fixed[6], fixed[7]),
        skip_empty=noise.random() < 0.3,
        skip_blank=noise.random() < 0.3,
        partial=noise.choice([wireform.NO_PARTIAL, partial]),
        longest=noise.choice([0, 0, 1, 50, 1000]),
    )
    whole = shape.format(data, 0, 0, 1 << 30)
    assert whole[1:3] == (consumed, count) and whole[4] <= count
    shape.state = (0, 0, 0, 0)
    at, total, split = 0, 0, []
    while at < consumed:
        piece, used, entries, _, _ = shape.format(data, at, total, noise.choice([0, 1, 500]))
        assert used and (entries or at + used == consumed)
        split.append(piece)
        at += used
        total += entries
    assert b"".join(split) == whole[0] and total == count
    plain = {"time": 0, "head": (b"", b""), "middle": (b"", b""), "tail": (b"", b"")}
    strings = wireform.Form(text=wireform.MSGPACK_STR, frame=wireform.CONCATENATED, **plain)  # type: ignore[arg-type]
    made = strings.format(data, 0, 0, 1 << 30)[0]
    logs = msgspec.msgpack.decode(b"\xdd" + count.to_bytes(4, "big") + made)
    assert [log.encode() for log in logs] == [log for _, _, log, _ in found]
    documents = wireform.Form(text=wireform.JSON, frame=wireform.NUL, **plain)  # type: ignore[arg-type]
    made = documents.format(data, 0, 0, 1 << 30)[0]
    assert [msgspec.json.decode(b'"' + each + b'"') for each in made.split(b"\0")[:-1]] == logs


# --- streams and messages -------------------------------------------------------------------------


@target
def frames_demultiplex(noise: Noise) -> None:
    seed = b"".join(frames.mux(noise.randrange(3), noise.randbytes(noise.choice([0, 1, 9, 70_000]))) for _ in range(4))
    data = mutated(seed, noise)
    answers = []
    for split in ([data], pieces(data, noise)):
        reader = frames.Demultiplexer()
        streams = [b"", b"", b""]
        try:
            for piece in split:
                for number, payload in reader.feed(piece):
                    streams[number] += payload
            answers.append((streams, reader.complete))
        except ValueError as error:
            answers.append((streams if len(split) == 0 else str(error), False))  # type: ignore[arg-type]
    if isinstance(answers[0][0], list):
        assert answers[0] == answers[1]


@target
def detach_keys(noise: Noise) -> None:
    sequence = noise.choice([b"\x10\x11", b"a", b"aab", b"abab", noise.randbytes(noise.randrange(1, 8))])
    data = mutated(b"some keys " + sequence[:-1] + b"x" + sequence, noise)
    answers = []
    for split in ([data], pieces(data, noise)):
        keys = frames.DetachKeys(sequence)
        forwarded = b""
        for piece in split:
            forwarded += keys.feed(piece)[0]
        answers.append((forwarded, keys.detached, keys.held()))
    assert answers[0] == answers[1]
    if not answers[0][1]:
        assert answers[0][0] + answers[0][2] == data


@target
def dns_message(noise: Noise) -> None:
    name = b"\x03www\x07example\x03com\x00"
    seed = (
        b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01"
        + name
        + b"\x00\x01\x00\x01"
        + b"\0\0\x29\x10\0\0\0\x80\0\0\0"
    )
    try:
        query = dns.parse(mutated(seed, noise))
    except dns.Malformed:
        return
    reply = dns.answer(query, (), limit=noise.choice([0, 512]))
    assert reply[:2] == query.id.to_bytes(2, "big")


@functools.cache
def _packets() -> list[bytes]:
    """An order and a report of each kind that needs no more than defaults, and some that do."""
    made: list[bytes] = []
    for kind in (*messages.Order.__args__, *messages.Report.__args__):
        values = []
        for field in msgspec.structs.fields(kind):
            if not field.required:
                break
            values.append({int: 7, str: "key", bytes: b"bytes", bool: True}.get(field.type, []))
        made.append(messages.encode(kind(*values)))
    return made


@target
def monitor_message(noise: Noise) -> None:
    data = mutated(noise.choice(_packets()), noise, _packets())
    for decode in (messages.decode_order, messages.decode_report):
        try:
            message = decode(data)
        except messages.NOT_A_MESSAGE:
            continue
        assert decode(messages.encode(message)) == message


@target
def monitor_journal(noise: Noise) -> None:
    """A journal that is truncated or damaged anywhere: it is cut there, and accepts new entries."""
    directory = tempfile.mkdtemp(prefix="engined-fuzz-")
    path = os.path.join(directory, "journal")

    def opened() -> Journal:
        journal = Journal(path)
        stack.callback(lambda: os.close(journal._file))
        return journal

    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        journal = opened()
        for number in range(3):
            journal.add(f"key{number}", number, number << 40)
        Path(path).write_bytes(mutated(Path(path).read_bytes(), noise))
        again = opened()
        kept = dict(again.exits)
        again.add("new", 1, 2)
        assert opened().exits == {**kept, "new": (1, 2)}


# --- clients and registries -----------------------------------------------------------------------

REQUESTS = [
    b"GET /sync?a=b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nbody\r\n3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n",
    b"POST /hijack HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\nearly",
    b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /ignore HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
]


@target
def http_requests(noise: Noise) -> None:
    data = mutated(b"".join(noise.choices(REQUESTS, k=noise.randrange(1, 4))), noise, REQUESTS, 4096)
    split = noise.choice([[data], pieces(data, noise)])
    transport, _ = feed(split, eof=bool(noise.randrange(2)))
    out = bytes(transport.out)
    assert not out or out.startswith(b"HTTP/1.1 ")


class Payload:
    def __init__(self) -> None:
        self.data = b""

    def feed(self, chunk: bytes) -> None:
        self.data += chunk


@target
def http_chunks(noise: Noise) -> None:
    data = mutated(b"4\r\nbody\r\n3;x=y\r\nabc\r\n00a\r\n0123456789\r\n0\r\nA: b\r\n\r\ntail", noise)
    answers = []
    for split in ([data], pieces(data, noise)):
        reader, payload, used = ChunkedReader(), Payload(), 0
        failed = ""
        try:
            for piece in split:
                if not reader.done:
                    used += reader.read(piece, 0, payload)
        except InvalidParameter as error:
            failed = str(error)
        answers.append((failed, payload.data, reader.done, used if not failed else 0))
    assert answers[0] == answers[1]


@target
def image_reference(noise: Noise) -> None:
    seeds = [
        b"busybox",
        b"user/name:tag",
        b"localhost:5000/a/b@sha256:" + b"0123456789abcdef" * 4,
        b"docker.io/library/a",
    ]
    text = mutated(noise.choice(seeds), noise, seeds, 1000).decode("utf-8", "surrogateescape")
    try:
        found = reference.parse(text)
    except InvalidParameter:
        return
    assert reference.parse(found.canonical) == found and reference.parse(found.familiar) == found


@target
def cgroup_text(noise: Noise) -> None:
    seeds = {
        "numbers": b"12 0 7\n",
        "flat": b"usage_usec 12\nuser_usec 99\n",
        "io_v1": b"8:0 Read 12\n8:0 Write 3\nTotal 15\n",
        "io_v2": b"8:0 rbytes=12 wbytes=0 rios=1\n253:1 rbytes=max\n",
        "interfaces": b"Inter-|\n face |\n  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n",
        "processors": b"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1\n",
    }
    form = noise.choice(list(seeds))
    for name, major, minor, value in cgroup.parse(form, mutated(seeds[form], noise)):  # type: ignore[arg-type]
        assert isinstance(name, bytes) and 0 <= major < 1 << 32 and 0 <= minor < 1 << 32 and 0 <= value < 1 << 64


@target
def filters(noise: Noise) -> None:
    seeds = [b'{"label":["a=b"],"name":{"x":true}}', b'{"dangling":["true"]}', b"{}"]
    text = mutated(noise.choice(seeds), noise, seeds, 1000).decode("utf-8", "surrogateescape")
    with contextlib.suppress(EngineError):
        parameters.decode_json(text.encode("utf-8", "surrogateescape"), dict)


@target
def dockerfile(noise: Noise) -> None:
    """Parsed, or refused; each instruction is expanded, or refused. The configuration is JSON."""
    seeds = [
        b"# syntax=docker/dockerfile:1\n# escape=`\nARG V=1\nFROM --platform=$BUILDPLATFORM a:${V:-2} AS b\n",
        b"FROM a\nRUN --mount=type=cache,target=/x,id=${A#*b} cat <<E\nx $A\nE\nCOPY <<-'F' a /b/\n\tx\n\tF\n",
        b'FROM a\nENV A=b C=\'d $A\' E="${A//b/c}"\nLABEL a b c\nEXPOSE 80 81-82/udp $P\nVOLUME ["/a", "/b"]\n',
        b'FROM a AS b\nONBUILD COPY --from=b --chmod=u+x a b\nUSER $A\nWORKDIR /a \\\n# c\n  b\nFROM b\nCMD ["x"] y\n',
        b'FROM a\nHEALTHCHECK --interval=1m --retries=3 CMD a b\nSHELL ["a"]\nSTOPSIGNAL SIGINT\nENTRYPOINT a\n',
    ]
    raw = mutated(noise.choice(seeds), noise, seeds, 4000)
    try:
        found = stages.read(
            lines.parse(raw), {"A": "ab", "P": "1"}, Platforms(build="linux/amd64", target="linux/arm64")
        )
        stages.needed(found, "")
    except InvalidParameter:
        return
    for stage in found.stages:
        config, scope = Config(), Scope(found.arguments)
        for instruction in stage.instructions:
            with contextlib.suppress(InvalidParameter):
                one = records.expand(instruction, scope.variables(config.env), found.escape)
                if isinstance(one, records.Arg):
                    scope.declare(one)
                if isinstance(one, records.Run):
                    records.script(one)
                config = effects.configured(config, one, cmd_set=False)
                msgspec.json.encode((one.text, effects.recorded(one, config)))
        msgspec.json.encode(config)


# --- swarm ----------------------------------------------------------------------------------------


@functools.cache
def _swarm_pems() -> tuple[bytes, bytes, bytes]:
    """A root certificate, one that it issued, and a request."""
    now = time.time_ns()
    root = certificates.Root(*certificates.new_root(now))
    csr = keys.request(keys.new_key())
    subject = certificates.Subject("n" * 25, Role.MANAGER, "s" * 25)
    issued = root.issue(
        certificates.request_key(csr), subject, address="10.0.0.1:2377", now=now, lifetime=3600 * 1_000_000_000
    )
    return root.pem.encode(), issued.encode(), csr.encode()


@target
def swarm_certificates(noise: Noise) -> None:
    """PEM of peers, also with changed DER inside: read, or refused."""
    seeds = _swarm_pems()
    pem = noise.choice(seeds)
    if noise.random() < 0.5:
        begin, *body, end = pem.strip().split(b"\n")
        der = mutated(base64.b64decode(b"".join(body)), noise)
        pem = b"\n".join((begin, base64.b64encode(der), end))
    else:
        pem = mutated(pem, noise, seeds)
    text = pem.decode("ascii", "replace")
    with contextlib.suppress(InvalidParameter):
        certificates.request_key(text)
    with contextlib.suppress(InvalidParameter):
        certificates.Root(text)
    with contextlib.suppress(InvalidParameter):
        for found in certificates.certificates(text):
            certificates.issued_by(found, certificates.certificates(seeds[0].decode())[0])
            keys.signed(found, "", b"")
            certificates.subject_of(found)


@target
def swarm_token(noise: Noise) -> None:
    seeds = [tokens.token("root", tokens.new_secret()).encode()]
    text = mutated(seeds[0], noise, seeds, 200).decode("utf-8", "replace")
    with contextlib.suppress(InvalidParameter):
        assert tokens.token("root", tokens.parse(text).secret).endswith(text[-25:])


@target
def swarm_messages(noise: Noise) -> None:
    """Messages of a peer are decoded or refused. Decoded messages can be encoded."""
    seeds = [
        msgspec.msgpack.encode(each)
        for each in (
            swarm.FetchRoot(seq=1),
            swarm.Join(seq=2, csr="x", token="y", availability="drain"),
            swarm.Hello(seq=3, description=NodeDescription(hostname="h")),
            swarm.Statuses(seq=4, of=(swarm.Status(task="t", state=512, since=1, ready=True),)),
            swarm.Refused(seq=5, kind="NotFound", message="no"),
            swarm.AddMember(seq=6, peer_url="https://10.0.0.1:7946"),
            swarm.LogLines(seq=-1, lines=(swarm.LogLine(task="t", stream=1, time=2, data=b"x"),)),
        )
    ]
    try:
        message = msgspec.msgpack.decode(mutated(noise.choice(seeds), noise, seeds, 4000), type=swarm.ANY)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    msgspec.msgpack.encode(message)

"""The table of Dockerfiles in tests/data/build: what each must become, and a runner of one case.

A case has a Dockerfile, its context, and the config, file tree, history and output that the image
must have, or the words of the error. The tree is exact: it lists every path that differs from the
base image in type, mode, owner or content, and no other. So is the config. A runner needs only the
HTTP API, so the same cases run on another engine:

    python -m tests.support.builds.table [--engine engined] [NAME …]

starts dockerd (the host's, by default) or engined and compares each case that it can build. `later`
marks cases that Docker's classic builder refuses, `differs` gives the reason why engined does
something else.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import functools
import gzip
import http.client
import io
import json
import lzma
import re
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
import zstandard

from tests.support import ROOT
from tests.support.engine import client
from tests.support.engine.client import Answer
from tests.support.images.archives import Node, directory, hard_link, symlink, tar

TABLE = ROOT / "tests" / "data" / "build"
FIELDS = (
    *("User", "ExposedPorts", "Env", "Cmd", "Healthcheck", "Volumes", "WorkingDir", "Entrypoint"),
    *("OnBuild", "Labels", "StopSignal", "Shell"),
)
"""The config of an image that a Dockerfile can change."""
PATH_ENTRY = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
"""The environment of the base image."""
TAR = {"Content-Type": "application/x-tar"}

Ask = Callable[[str, str, Any, Mapping[str, str]], Answer]
"""One request: method, target, body, headers."""


class Archive(msgspec.Struct, forbid_unknown_fields=True):
    """An archive file of a context."""

    entries: str
    compression: str = ""
    cut: int = 0
    """Bytes that are missing at its end."""


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """One row of the table."""

    name: str
    dockerfile: str = ""
    context: str = ""
    """A listing, see `listing`."""
    archives: dict[str, Archive] = {}
    """Archives by their path in the context."""
    query: dict[str, str | list[str]] = {}
    before: str = ""
    """Dockerfile of the image `before`, which is built first and is then the base."""
    base: str = "busybox"
    env: list[str] | None = None
    """The environment after PATH_ENTRY."""
    config: dict[str, Any] = {}
    """Fields that differ from the base image."""
    tree: str = ""
    """A listing of the paths that differ from the base image; `- path` is one that is removed."""
    author: str | None = None
    history: list[str] = []
    """The last entries of the history, oldest first. `<hash>` stands for a digest."""
    output: str = ""
    """Lines of the streams, in this order, or their beginnings. `<12>` stands for a short id."""
    silent: list[str] = []
    """Words that are not in the streams."""
    error: str = ""
    """Words of the error with which the build ends."""
    code: int | None = None
    later: bool = False
    differs: str = ""

    def listed(self) -> list[Node]:
        """The entries of the context."""
        nodes = [] if not self.dockerfile else [Node("Dockerfile", self.dockerfile.encode("utf-8", "surrogateescape"))]
        nodes += listing(self.context)
        for name, archive in self.archives.items():
            data = compressed(tar(listing(archive.entries)), archive.compression)
            nodes.append(Node(name, data[: len(data) - archive.cut]))
        return nodes


def compressed(data: bytes, form: str) -> bytes:
    """The data in a compression that contexts and ADD have; "" for none."""
    match form:
        case "":
            return data
        case "gzip":
            return gzip.compress(data, 6, mtime=0)
        case "bzip2":
            return bz2.compress(data)
        case "xz":
            return lzma.compress(data)
        case "zstd":
            return zstandard.compress(data)
    raise ValueError(form)


@functools.cache
def table() -> list[Case]:
    """All cases, in the order of the files and in them."""
    found: list[Case] = []
    for path in sorted(TABLE.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        assert list(document) == ["case"], path
        found += msgspec.convert(document["case"], list[Case])
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "two cases of one name: " + str({n for n in names if names.count(n) > 1})
    return found


_LINE = re.compile(
    r"""(?:(?P<mode>[0-7]{3,4})\s+)?(?:(?P<uid>\d+):(?P<gid>\d+)\s+)?
        (?P<path>.+?)(?:(?P<directory>/)|\s*(?P<kind>=>|->|=)\s?(?P<rest>.*)|\s+(?P<special>fifo|null))$""",
    re.VERBOSE,
)


def listing(text: str) -> list[Node]:
    r"""Entries, one a line: an optional mode and owner, then `path/` for a directory,
    `path = content` for a file, `path -> target` for a symbolic link, `path => name` for a hard
    link, `path fifo`, or `path null` for a character device. `\n`, `\t` and `\xHH` stand for bytes.
    """
    return [_node(line) for line in text.splitlines() if line.strip()]


def _node(line: str) -> Node:
    found = _LINE.match(line.strip())
    assert found, line
    path = os_path(found["path"])
    mode = int(found["mode"], 8) if found["mode"] else 0o644
    owner = {"uid": int(found["uid"] or 0), "gid": int(found["gid"] or 0)}
    if found["directory"]:
        return directory(path, int(found["mode"] or "755", 8), **owner)
    if found["kind"] == "->":
        return symlink(path, found["rest"], **owner)
    if found["kind"] == "=>":
        return hard_link(path, found["rest"], mode=mode, **owner)
    if found["special"] == "fifo":
        return Node(path, type=tarfile.FIFOTYPE, mode=mode, **owner)
    if found["special"]:
        return Node(path, type=tarfile.CHRTYPE, mode=mode, device=(1, 3), **owner)
    return Node(path, _unescaped(found["rest"]), mode=mode, **owner)


def os_path(text: str) -> str:
    return _unescaped(text).decode("utf-8", "surrogateescape")


def _unescaped(text: str) -> bytes:
    named = {b"n": b"\n", b"t": b"\t", b"\\": b"\\"}
    return re.sub(
        rb"\\(n|t|\\|x[0-9a-f]{2})",
        lambda match: named.get(match[1]) or bytes([int(match[1][1:], 16)]),
        text.encode(),
    )


# --- file trees -----------------------------------------------------------------------------------

KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "link",
    tarfile.FIFOTYPE: "fifo",
    tarfile.CHRTYPE: "device 1:3",
}
Entry = tuple[str, str, int, int, bytes | str]
"""Type, octal mode, uid, gid, and content or target."""


def files(saved: bytes) -> dict[str, Entry]:
    """The file tree of the only image in an archive of `docker save`."""
    tree: dict[str, Entry] = {}
    with tarfile.open(fileobj=io.BytesIO(saved)) as archive:
        member = archive.extractfile("manifest.json")
        assert member is not None
        (image,) = json.load(member)
        for name in image["Layers"]:
            layer = archive.extractfile(name)
            assert layer is not None, name
            apply(tree, layer.read())
    return tree


def apply(tree: dict[str, Entry], layer: bytes) -> None:
    """Change the tree as extracting a layer over it would."""
    changes = _changes(layer)
    for path in changes:
        parent, _, name = path.rpartition("/")
        if name == ".wh..wh..opq":
            removed = [one for one in tree if one.startswith(f"{parent}/")]
        elif name.startswith(".wh."):
            gone = f"{parent}/{name[4:]}"
            removed = [one for one in tree if one == gone or one.startswith(f"{gone}/")]
        else:
            continue
        for one in removed:
            del tree[one]
    for path, entry in changes.items():
        if path.rpartition("/")[2].startswith(".wh."):
            continue
        if entry[0] != "directory":
            for one in [one for one in tree if one.startswith(f"{path}/")]:
                del tree[one]
        tree[path] = entry


@functools.lru_cache(300)
def _changes(layer: bytes) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        for info in archive:
            path = "/" + info.name.strip("/").removeprefix("./")
            if path in ("/", "/."):
                continue
            found[path] = _entry(archive, info)
    return found


def _entry(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Entry:
    kind, content = "file", b""
    if info.isdir():
        kind = "directory"
    elif info.issym():
        return ("link", "777", info.uid, info.gid, info.linkname)
    elif info.isfile() or info.islnk():
        data = archive.extractfile(info)
        assert data is not None
        content = data.read()
    else:
        kind = "fifo" if info.isfifo() else f"device {info.devmajor}:{info.devminor}"
    return (kind, f"{info.mode & 0o7777:o}", info.uid, info.gid, content)


def expected(base: Mapping[str, Entry], tree: str) -> dict[str, Entry]:
    """The tree that the listing of a case means."""
    found = dict(base)
    for line in map(str.strip, tree.splitlines()):
        if line.startswith("- "):
            del found[line[2:]]
        elif line:
            node = _node(line)
            kind = KINDS[node.type]
            content = node.link if kind == "link" else node.data
            found[node.name] = (kind, f"{node.mode:o}", node.uid, node.gid, content)
    return found


def changed(base: Mapping[str, Entry], tree: Mapping[str, Entry]) -> dict[str, Entry | None]:
    """The paths of `tree` that differ from `base`; None for one that is missing."""
    found: dict[str, Entry | None] = {path: tree[path] for path in tree if tree[path] != base.get(path)}
    return dict(sorted((found | {path: None for path in base if path not in tree}).items()))


# --- one build ------------------------------------------------------------------------------------


class Built(msgspec.Struct):
    """The answer to a build."""

    status: int
    text: str
    """All streams, joined."""
    error: str
    code: int | None
    image: str
    """Id of `Successfully built`."""
    objects: list[dict[str, Any]]


def build(ask: Ask, nodes: Iterable[Node] | bytes, query: Mapping[str, str | list[str]] | None = None) -> Built:
    """POST /build of a context."""
    body = nodes if isinstance(nodes, bytes) else tar(nodes)
    target = "/v1.24/build?" + urlencode(dict(query or {}), doseq=True)
    return read(ask("POST", target, body, TAR))


def read(answer: Answer) -> Built:
    """The answer to a build, read."""
    if answer.status != 200:
        return Built(answer.status, "", answer.json()["message"], None, "", [])
    objects = [json.loads(line) for line in answer.body.splitlines() if line]
    text = "".join(one.get("stream", "") for one in objects)
    errors = [one for one in objects if "error" in one]
    assert not errors or errors == objects[-1:], objects
    error = errors[0]["error"] if errors else ""
    assert not errors or errors[0]["errorDetail"]["message"] == error, errors
    built = re.search(r"^Successfully built ([0-9a-f]{12})$", text, re.MULTILINE)
    code = errors[0]["errorDetail"].get("code") if errors else None
    return Built(200, text, error, code, built[1] if built else "", objects)


def cached(text: str) -> list[int]:
    """The numbers of the steps that came from the cache."""
    return [int(step) for step in re.findall(r"^Step (\d+)[^\n]*\n ---> Using cache$", plain(text), re.MULTILINE)]


class Building:
    """A build whose answer is read while it runs, on a connection of its own."""

    def __init__(
        self, path: str, nodes: Iterable[Node] | bytes, query: Mapping[str, str | list[str]] | None = None
    ) -> None:
        """Send the whole context."""
        body = nodes if isinstance(nodes, bytes) else tar(nodes)
        self.answer = b""
        """What was received so far, from the head on."""
        self._connection = client.connect(path, 60)
        self._connection.sendall(head(len(body), query) + body)

    def until(self, words: str) -> None:
        """Read until these words have arrived. Raises AssertionError when the answer ends before
        that.
        """
        while words.encode() not in self.answer:
            received = self._connection.recv(65536)
            assert received, (words, self.answer)
            self.answer += received

    def said(self, line: str) -> None:
        """Read until a program has written this line. It must not be the end of an instruction."""
        self.until(f"{line}\\n")

    def rest(self) -> str:
        """Read to the end and return everything that was received. A reset is an end."""
        with self._connection, contextlib.suppress(ConnectionResetError):
            while received := self._connection.recv(65536):
                self.answer += received
        return self.answer.decode()

    def close(self) -> None:
        """Leave, as a client that was killed."""
        self._connection.close()


def head(size: int, query: Mapping[str, str | list[str]] | None = None) -> bytes:
    """The head of a request to build, after whose answer the connection ends."""
    target = "/v1.24/build?" + urlencode(dict(query or {}), doseq=True)
    return (
        f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-tar\r\nConnection: close\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


def plain(text: str) -> str:
    """Output without what differs from build to build and between API versions: the number of
    steps, ids, the colour of stderr.
    """
    text = re.sub(r"^(Step \d+)/\d+ :", r"\1 :", text, flags=re.MULTILINE)
    text = re.sub(r"\x1b\[\d*m", "", text)
    return re.sub(r"\b[0-9a-f]{12}\b", "<12>", text)


class Runner:
    """Runs cases on one engine, which has busybox."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._trees: dict[str, dict[str, Entry]] = {}

    def differences(self, case: Case) -> Iterator[str]:
        """What the engine does otherwise than the case says, a line each."""
        if case.before:
            made = build(self._ask, [Node("Dockerfile", case.before.encode())], {"t": "before"})
            if made.error:
                yield f"before: {made.error}"
                return
        name = f"case-{case.name.lower()}"
        query = {"t": name, "forcerm": "1"} | case.query
        built = build(self._ask, case.listed(), query)
        yield from self._said(case, built)
        if case.error or built.error:
            return
        if "q" not in case.query and not built.image:
            yield f"no image in {built.text!r}"
            return
        base = "before" if case.before else case.base
        try:
            shown = self.inspect(name)
            yield from self._configured(case, base, shown)
            if case.author is not None and shown["Author"] != case.author:
                yield f"author {shown['Author']!r}"
            tree = self.tree(name)
            below = {} if base == "scratch" else self.tree(base) if base == "before" else self._tree(base)
            wanted, got = changed(below, expected(below, case.tree)), changed(below, tree)
            for path in sorted(wanted.keys() | got.keys()):
                if wanted.get(path, 0) != got.get(path, 0):
                    yield f"{path}: {got.get(path, 'as in the base')}, not {wanted.get(path, 'as in the base')}"
            if case.history:
                yield from self._recorded(case, name)
        finally:
            self._ask("DELETE", f"/v1.24/images/{name}?force=1", None, {})

    def _said(self, case: Case, built: Built) -> Iterator[str]:
        if case.error:
            if case.error.casefold() not in plain(built.error).casefold():
                yield f"error {built.error!r}, not {case.error!r}; {built.text!r}"
            if case.code is not None and built.code != case.code:
                yield f"code {built.code}, not {case.code}"
        elif built.error:
            yield f"error {built.status} {built.error!r} after {built.text!r}"
        text = plain(built.text)
        at = 0
        for words in case.output.splitlines():
            found = text.find(words, at)
            if found < 0:
                yield f"not said: {words!r} in {text[at:]!r}"
                break
            at = found + len(words)
        for words in case.silent:
            if words in text:
                yield f"said: {words!r} in {text!r}"

    def _configured(self, case: Case, base: str, shown: Any) -> Iterator[str]:
        wanted = {} if base == "scratch" else dict(self.inspect(base)["Config"])
        if base == "before":
            wanted["OnBuild"] = None
        wanted |= case.config
        if case.env is not None:
            wanted["Env"] = [PATH_ENTRY, *case.env]
        for field in FIELDS:
            # empty and missing mean the same
            found, value = shown["Config"].get(field) or None, wanted.get(field) or None
            if found != value:
                yield f"{field} {found!r}, not {value!r}"

    def _recorded(self, case: Case, name: str) -> Iterator[str]:
        answer = self._ask("GET", f"/v1.24/images/{name}/history", None, {})
        lines = [re.sub(r"[0-9a-f]{64}", "<hash>", one["CreatedBy"]) for one in answer.json()][::-1]
        if lines[-len(case.history) :] != case.history:
            yield f"history {lines!r}, not {case.history!r}"

    def inspect(self, name: str) -> Any:
        """The image. Raises AssertionError when there is none."""
        answer = self._ask("GET", f"/v1.24/images/{name}/json", None, {})
        assert answer.status == 200, answer
        return answer.json()

    def tree(self, name: str) -> dict[str, Entry]:
        """The file tree of an image."""
        answer = self._ask("GET", f"/v1.24/images/{name}/get", None, {})
        # dockerd refuses to save an image without layers
        if answer.status == 500 and "empty export" in answer.message:
            return {}
        assert answer.status == 200, answer
        return files(answer.body)

    def _tree(self, name: str) -> dict[str, Entry]:
        if name not in self._trees:
            self._trees[name] = self.tree(name)
        return self._trees[name]


def main() -> int:
    from bench.engines import Engined, HostDockerd  # bench imports tests
    from bench.run import load_image
    from tests.support.engine.harness import busybox_archive

    parser = argparse.ArgumentParser(prog="tests.support.builds.table", description=__doc__)
    parser.add_argument("--engine", choices=("dockerd", "engined"), default="dockerd")
    parser.add_argument("--all", action="store_true", help="cases that dockerd is not expected to build, too")
    parser.add_argument("name", nargs="*")
    arguments = parser.parse_args()
    cases = [case for case in table() if not arguments.name or any(part in case.name for part in arguments.name)]
    if arguments.engine == "dockerd" and not arguments.all:
        cases = [case for case in cases if not case.later and not case.differs]
    engine = (HostDockerd if arguments.engine == "dockerd" else Engined)()
    wrong = 0
    try:
        engine.start()
        load_image(engine)
        client.request(engine.socket, "POST", "/v1.24/images/load?quiet=1", busybox_archive(), TAR)
        runner = Runner(functools.partial(client.request, engine.socket))
        for case in cases:
            try:
                found = list(runner.differences(case))
            except (AssertionError, OSError, http.client.HTTPException) as error:
                found = [repr(error)]
            wrong += bool(found)
            for line in found:
                print(f"{case.name}: {line}", flush=True)
    finally:
        engine.close()
    print(f"{len(cases) - wrong} of {len(cases)} cases as {engine.name} has them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checkouts from real servers of Git: every kind of server and ref, submodules, and what a hostile
repository or server tries. Nothing is left behind: no process, directory or descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import select
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from engine.builder.git import Checkout, Limits, agent_of, checkout, source_of_add, source_of_context
from engine.errors import EngineError, InvalidParameter, ServerError
from engine.system import sealed
from tests.support.builds.repositories import Repository, daemon, dumb, git, silent, smart

SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "daemon": daemon,
    "smart": smart,
    "old": lambda top: smart(top, old=True),
    "dumb": dumb,
}


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await work()

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def checked_out(
    url: str, directory: Path, *, keep: bool = False, commit: str = "", limits: Limits | None = None
) -> AsyncIterator[Checkout]:
    source = source_of_context(url)
    assert source is not None
    source = source._replace(keep_git_dir=keep or source.keep_git_dir, commit=commit or source.commit)
    async with checkout(source, directory, limits=limits or Limits()) as found:
        yield found


def tree(found: Checkout) -> dict[str, bytes | str]:
    """The files by path, links as their targets."""
    files: dict[str, bytes | str] = {}
    for path, directories, names, descriptor in os.fwalk(".", dir_fd=found.root):
        for name in (*names, *directories):
            where = os.path.normpath(os.path.join(path, name))
            kind = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if stat.S_ISLNK(kind):
                files[where] = os.readlink(name, dir_fd=descriptor)
            elif stat.S_ISREG(kind):
                with open(os.open(name, os.O_RDONLY, dir_fd=descriptor), "rb") as file:
                    files[where] = file.read()
    return files


def content(url: str, directory: Path, *, keep: bool = False, commit: str = "") -> tuple[str, dict[str, bytes | str]]:
    """A checkout's commit and files."""
    result: list[tuple[str, dict[str, bytes | str]]] = []

    async def work() -> None:
        async with checked_out(url, directory, keep=keep, commit=commit) as found:
            result.append((found.commit, tree(found)))

    run(work)
    return result[0]


def refusal(url: str, directory: Path, *, commit: str = "", limits: Limits | None = None) -> EngineError:
    """The error of a checkout that fails."""
    caught: list[EngineError] = []

    async def work() -> None:
        with pytest.raises(EngineError) as error:
            async with checked_out(url, directory, commit=commit, limits=limits):
                raise AssertionError("it was fetched")
        caught.append(error.value)

    run(work)
    return caught[0]


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """The directory of the repositories."""
    return tmp_path / "served"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The directory for checkouts, as private as the engine's. It is empty afterwards."""
    directory = tmp_path / "root" / "tmp"
    directory.mkdir(parents=True)
    directory.parent.chmod(0o700)
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    yield directory
    assert os.listdir(directory) == []
    assert len(os.listdir("/proc/self/fd")) == before


def children(pid: int) -> set[int]:
    """Processes that threads of a process have started."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):
            found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


# --- servers and refs -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SERVERS)
def test_every_kind_of_ref(top: Path, place: Path, kind: str) -> None:
    repository = Repository(top, "r")
    first = repository.commit({"a": b"first", "dir/x": b"x"})
    git(repository.path, "tag", "light")
    second = repository.commit({"a": b"second"})
    git(repository.path, "tag", "--annotate", "--message=t", "v1.0")
    git(repository.path, "branch", "topic/one")
    git(repository.path, "update-ref", "refs/pull/7/head", first)
    third = repository.commit({"a": b"third"})
    with SERVERS[kind](top) as server:
        url = f"{server}/r.git"
        for ref, commit in (
            ("", third),
            ("#", third),
            ("#HEAD", third),
            ("#trunk", third),
            ("#refs/heads/trunk", third),
            ("#topic/one", second),
            ("#v1.0", second),
            ("#refs/tags/v1.0", second),
            ("#light", first),
            ("#pull/7/head", first),
            (f"#{third}", third),
            (f"#{first}", first),
            (f"#{second[:9]}", second),
            ("#trunk~1", second),
            ("#v1.0^{}", second),
            ("#HEAD~2", first),
            ("#@", third),
        ):
            text = {first: b"first", second: b"second", third: b"third"}[commit]
            assert content(url + ref, place) == (commit, {"a": text, "dir/x": b"x"}), ref
        assert content(f"{url}#light:dir", place) == (first, {"x": b"x"})
        for ref in ("nothing", "refs/heads/nothing", "f" * 40, "abcdef0", "trunk~9"):
            error = refusal(f"{url}#{ref}", place)
            assert isinstance(error, ServerError)
            assert error.message.startswith("Error trying to use git: "), error.message
        missing = refusal(f"{server}/missing.git", place)
        assert missing.message.startswith("Error trying to use git: exit status 128 (fatal: "), missing.message


def test_files_modes_and_links(top: Path, place: Path) -> None:
    repository = Repository(top, "r")
    name = os.fsdecode(b"\xff \xc3\xbc")
    repository.commit({"run": b"#!", "plain": b"", "link": "/etc/passwd", "deep/er/f": b"f", name: b"n"})
    (repository.path / "run").chmod(0o755)
    repository.commit({})

    async def work() -> None:
        with daemon(top) as server:
            async with checked_out(f"{server}/r.git", place) as found:
                assert tree(found) == {
                    "run": b"#!",
                    "plain": b"",
                    "link": "/etc/passwd",
                    "deep/er/f": b"f",
                    name: b"n",
                }
                for path, mode in ((".", 0o755), ("run", 0o755), ("plain", 0o644), ("deep", 0o755)):
                    assert stat.S_IMODE(os.stat(path, dir_fd=found.root).st_mode) == mode

    run(work)


def test_subdirectories(top: Path, place: Path) -> None:
    repository = Repository(top, "r")
    repository.commit({"a/b/f": b"f", "file": b"", "in": "a/b", "up": "..", "out": "/etc", "deep/x": "/a/b"})
    with daemon(top) as server:
        url = f"{server}/r.git#"
        for inside in (":a/b", ":/a/b/", ":./a//b", ":a/../a/b", ":in", ":deep/x", ":up/a/b"):
            assert content(url + inside, place)[1] == {"f": b"f"}, inside
        for outside in (":..", ":../x", ":a/../../x", ":/../a"):
            error = refusal(url + outside, place)
            assert isinstance(error, InvalidParameter)
            assert error.message == f'Error setting git context, "{outside[1:]}" not within git root'
        assert refusal(f"{url}:file", place).message == "Error setting git context, not a directory: file"
        for missing in ("out", "none", "a/b/none", "file/x"):
            assert missing in refusal(f"{url}:{missing}", place).message


def test_many_at_once(top: Path, place: Path) -> None:
    repository = Repository(top, "r")
    commit = repository.commit({"a": b"a"})

    async def one(server: str) -> None:
        async with checked_out(f"{server}/r.git", place) as found:
            assert found.commit == commit

    async def work() -> None:
        with daemon(top) as server:
            await asyncio.gather(*(one(server) for _ in range(8)))

    run(work)


@pytest.mark.parametrize("kind", ["daemon", "dumb"])
def test_a_commit_that_must_match(top: Path, place: Path, kind: str) -> None:
    repository = Repository(top, "r")
    commit = repository.commit({"a": b"a"})
    git(repository.path, "tag", "--annotate", "--message=t", "v1")
    tag = git(repository.path, "rev-parse", "v1")
    with SERVERS[kind](top) as server:
        url = f"{server}/r.git"
        for right in (commit, commit[:7]):
            assert content(url, place, commit=right)[0] == commit
        assert content(f"{url}#v1", place, commit=tag)[0] == commit
        wrong = "0" * 40
        for ref in ("", "#v1", "#trunk~0"):
            error = refusal(url + ref, place, commit=wrong)
            assert error.message == f"expected checksum to match {wrong}, got {commit}"


# --- `.git` ---------------------------------------------------------------------------------------


def test_git_is_kept_on_request(top: Path, place: Path) -> None:
    repository = Repository(top, "r")
    commit = repository.commit({"a": b"a"})
    git(repository.path, "tag", "v1")

    async def work() -> None:
        with smart(top, user="me:secret") as server:
            url = server.replace("//", "//me:secret@") + "/r.git"
            for ref, head in (("#v1", f"{commit}\n"), ("#trunk", "ref: refs/heads/trunk\n"), ("", f"{commit}\n")):
                async with checked_out(url + ref, place, keep=True) as found:
                    files = {name: data for name, data in tree(found).items() if isinstance(data, bytes)}
                    assert files["a"] == b"a"
                    assert files[".git/HEAD"] == head.encode()
                    assert f"url = {server}/r.git".encode() in files[".git/config"]
                    assert not any(b"secret" in data for data in files.values())
                    assert not any(re.search("hooks|logs|FETCH_HEAD", name) for name in files)
                    path = Path(f"/proc/{os.getpid()}/fd/{found.root}")
                    assert git(path, "status", "--porcelain") == ""
                    assert git(path, "rev-parse", "HEAD") == commit
                    if ref == "#v1":
                        assert git(path, "describe", "--tags") == "v1"

    run(work)


# --- submodules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("keep", [False, True])
def test_submodules(top: Path, place: Path, kind: str, keep: bool) -> None:
    """Nested ones too, with relative addresses, and at commits that no ref names."""
    inner, middle, outer = (Repository(top, name) for name in ("inner", "middle", "outer"))
    wanted = inner.commit({"i": b"old"})
    inner.commit({"i": b"new"})
    middle.commit({"m": b"m"})
    middle.submodule("lib/inner", "../inner.git", wanted)
    outer.commit({"o": b"o"})
    outer.submodule("middle", "../middle.git", middle.head())
    with SERVERS[kind](top) as server:
        _, files = content(f"{server}/outer.git", place, keep=keep)
    del files[".gitmodules"], files["middle/.gitmodules"]
    if keep:
        assert files["middle/.git"] == b"gitdir: ../.git/modules/middle\n"
        files = {name: data for name, data in files.items() if ".git" not in name}
    assert files == {"o": b"o", "middle/m": b"m", "middle/lib/inner/i": b"old"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{top}/secret.git", "transport 'file' not allowed"),
        ("file://{top}/secret.git", "transport 'file' not allowed"),
        ("ext::sh -c touch% {top}/done", "transport 'ext' not allowed"),
        ("-oProxyCommand=touch {top}/done", ""),
        ("ssh://-oProxyCommand=touch/x", ""),
        ("ftp://127.0.0.1/x", "transport 'ftp' not allowed"),
    ],
)
def test_submodules_of_other_protocols_are_refused(place: Path, url: str, words: str) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # git cannot see /tmp
        top = Path(directory)
        top.chmod(0o755)
        secret, outer = Repository(top, "secret"), Repository(top, "outer")
        secret.commit({"s": b"s"})
        outer.commit({"o": b"o"})
        outer.submodule("x", url.format(top=top), secret.head())
        with daemon(top) as server:
            error = refusal(f"{server}/outer.git", place)
        assert isinstance(error, ServerError)
        assert words in error.message
        assert not (top / "done").exists()


def test_nothing_of_a_repository_is_executed(top: Path, place: Path) -> None:
    """Filters and hooks need a configuration, which a repository cannot bring along."""
    inner = Repository(top, "inner")
    inner.commit({"i": b"i"})
    files = {
        ".gitattributes": b"* filter=bad diff=bad merge=bad ident text=auto\n",
        ".gitconfig": b'[filter "bad"]\nsmudge = touch /tmp/temporary/done; false\n',
        ".git-hooks/post-checkout": b"#!/bin/sh\ntouch done\n",
        "config": b'[filter "bad"]\nsmudge = touch done; false\n',
    }
    with daemon(top) as server:
        for update, refused in (("!touch done", True), ("checkout", False)):
            outer = Repository(top, f"outer-{update[0]}")
            outer.commit(files)
            outer.submodule("x", "../inner.git", inner.head(), update=update)
            url = f"{server}/{outer.name}"
            if refused:  # by git itself
                assert "invalid value for 'submodule.x.update'" in refusal(url, place).message
                continue
            _, found = content(url, place)
            assert found["x/i"] == b"i"
            assert found.keys() - {"x/i", ".gitmodules"} == files.keys()


# --- users ----------------------------------------------------------------------------------------


def test_users_and_passwords(top: Path, place: Path) -> None:
    inner, outer = Repository(top, "inner"), Repository(top, "outer")
    inner.commit({"i": b"i"})
    outer.commit({"o": b"o"})
    outer.submodule("x", "../inner.git", inner.head())
    with smart(top, user="m@e:s:e cret") as server:
        url = server.replace("//", "//m%40e:s%3Ae%20cret@")
        assert content(f"{url}/outer.git", place)[1]["x/i"] == b"i"
        for user in ("", "m%40e@", "token@", "m%40e:wrong-secret@"):
            error = refusal(server.replace("//", f"//{user}") + "/outer.git", place)
            assert isinstance(error, ServerError)
            assert "wrong-secret" not in error.message
            assert "token" not in error.message


def test_ssh_with_the_agent_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that stands for ssh asks the agent and runs the command here."""
    program = """
        import os, socket, sys
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(os.environ["SSH_AUTH_SOCK"])
            assert agent.recv(100) == b"key"
        assert sys.argv[-2] == "me@host.invalid", sys.argv
        command = sys.argv[-1].replace("'/", "'" + os.path.dirname(sys.argv[0]) + "/", 1)
        os.execv("/bin/sh", ["sh", "-c", command])
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # git cannot see /tmp
        top, place = Path(directory), Path(directory, "private", "tmp")
        place.mkdir(parents=True)
        place.chmod(0o700)
        top.chmod(0o755)
        (top / "ssh.py").write_text(textwrap.dedent(program))
        repository = Repository(top, "r")
        commit = repository.commit({"a": b"a"})
        for path, names, _ in os.walk(repository.path):
            for each in (path, *(os.path.join(path, name) for name in names)):
                os.chown(each, sealed.USER, sealed.GROUP)
        monkeypatch.setattr("engine.builder.git._SSH", f"/usr/bin/python3 {top}/ssh.py")
        asked: list[str] = []

        class Session:
            @contextlib.asynccontextmanager
            async def ssh(self, name: str, directory: str, *, uid: int, gid: int) -> AsyncIterator[str]:
                def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    asked.append(name)
                    writer.write(b"key")
                    writer.close()

                path = os.path.join(directory, "socket")
                async with await asyncio.start_unix_server(answer, path):
                    os.chown(path, uid, gid)
                    os.chmod(path, 0o600)
                    yield path
                os.unlink(path)

        class Sessions:
            async def find(self, session_id: str) -> Session:
                assert session_id == "it"
                return Session()

        async def work() -> None:
            sessions = cast(Any, Sessions())
            for address in ("me@host.invalid:/r.git", "ssh://me@host.invalid/r.git"):
                source = source_of_add(address)
                assert source is not None
                async with contextlib.AsyncExitStack() as stack:
                    assert await agent_of(source, sessions, "", place, stack) is None
                    agent = await agent_of(source, sessions, "it", place, stack)
                    found = await stack.enter_async_context(checkout(source, place, agent=agent))
                    assert (found.commit, tree(found)) == (commit, {"a": b"a"})
            web = source_of_add("http://h/r.git")
            assert web is not None
            async with contextlib.AsyncExitStack() as stack:
                assert await agent_of(web, sessions, "it", place, stack) is None

        run(work)
        assert set(asked) == {""}
        assert os.listdir(place) == []


def test_ssh_without_an_agent(place: Path) -> None:
    """A host without keys, and a server that cannot be reached: the words are ssh's."""
    error = refusal("ssh://git@127.0.0.1:1/r.git", place)
    assert "Connection refused" in error.message


def test_the_environment_is_not_inherited(top: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(top, "r")
    commit = repository.commit({"a": b"a"})
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_EXEC_PATH", "LD_PRELOAD", "HOME"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    with daemon(top) as server:
        for name in ("LD_PRELOAD", "GIT_DIR"):
            assert os.environ[name]
        assert content(f"{server}/r.git", place)[0] == commit


def test_a_proxy_is_used_but_not_for_loopback(top: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(top, "r")
    commit = repository.commit({"a": b"a"})
    with smart(top) as server:
        monkeypatch.setenv("http_proxy", server)
        assert content("http://repositories.invalid/r.git", place)[0] == commit
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert content(f"{server}/r.git", place)[0] == commit


def test_without_git(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "PATH", "/nonexistent")
    error = refusal("git://127.0.0.1:1/r", place)
    assert error.message == 'Error trying to use git: exec: "git": executable file not found in $PATH'


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["git", "http"])
def test_a_client_that_leaves(place: Path, scheme: str) -> None:
    async def work() -> None:
        with silent() as (address, begun):
            before = children(os.getpid())  # servers of other tests

            async def fetch() -> None:
                async with checked_out(f"{scheme}://{address}/r.git", place):
                    raise AssertionError("it was fetched")

            task = asyncio.create_task(fetch())
            await asyncio.to_thread(begun.wait)
            (pid,) = children(os.getpid()) - before
            assert b"fetch" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")  # noqa: ASYNC240
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert children(os.getpid()) == before

    run(work)


def test_a_client_that_leaves_at_any_time(top: Path, place: Path) -> None:
    repository = Repository(top, "r")
    repository.commit({"a": b"a"})

    async def work() -> None:
        with daemon(top) as server:
            before = children(os.getpid())

            async def fetch() -> None:
                async with checked_out(f"{server}/r.git", place):
                    pass

            for pause in range(0, 120, 8):
                task = asyncio.create_task(fetch())
                await asyncio.sleep(pause / 1000)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert children(os.getpid()) == before
                assert os.listdir(place) == []

    run(work)


def test_a_daemon_that_is_killed(place: Path) -> None:
    program = """
        import asyncio, sys
        from pathlib import Path
        from engine.builder.git import checkout, source_of_context

        async def main():
            async with checkout(source_of_context(sys.argv[1]), Path(sys.argv[2])):
                pass

        asyncio.run(main())
    """
    with silent() as (address, begun):
        engine = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), f"git://{address}/r.git", str(place)]
        )
        begun.wait()
        (pid,) = children(engine.pid)
        pidfd = os.pidfd_open(pid)
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
    (left,) = place.iterdir()  # the next daemon removes it, with the directory around it
    subprocess.run(["rm", "-r", str(left)], check=True)


def test_a_server_that_is_silent(place: Path) -> None:
    with silent() as (address, _):
        before = children(os.getpid())  # servers of other tests
        error = refusal(f"git://{address}/r.git", place, limits=Limits(seconds=0.3))
        assert error.message == "Error trying to use git: no end within 0.3 s"
        assert children(os.getpid()) == before


@pytest.mark.parametrize("server", ["daemon", "dumb"])
def test_a_large_repository(top: Path, place: Path, server: str) -> None:
    repository = Repository(top, "r")
    repository.commit({"a": os.urandom(3 << 20)})
    with SERVERS[server](top) as url:
        error = refusal(f"{url}/r.git", place, limits=Limits(size=1 << 20))
        assert isinstance(error, ServerError)
        assert error.message.startswith("Error trying to use git: ")


def test_a_repository_that_grows_at_its_checkout(top: Path, place: Path) -> None:
    repository = Repository(top, "r")
    repository.commit({f"{number}": bytes(1 << 20) for number in range(20)})
    with daemon(top) as server:
        error = refusal(f"{server}/r.git", place, limits=Limits(size=4 << 20))
        assert error.message == f"Error trying to use git: the repository takes more than {4 << 20} bytes"
        error = refusal(f"{server}/r.git", place, limits=Limits(entries=10))
        assert error.message == "Error trying to use git: the repository has more than 10 files"


def test_words_of_a_server_are_shown_plainly(place: Path) -> None:
    """A server's error may have control characters."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        text = "ERR \x1b]0;owned\x07 no such thing\n"
        writer.write(f"{len(text) + 4:04x}{text}".encode())
        await writer.drain()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(ServerError) as caught:
                async with checked_out(f"git://127.0.0.1:{port}/r", place):
                    raise AssertionError("it was fetched")
        assert "no such thing" in caught.value.message
        assert caught.value.message.isprintable()

    run(work)

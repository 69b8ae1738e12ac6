"""Builds whose context or sources are elsewhere: `remote=` of repositories, ADD of URLs and of
repositories, on a real engine with real servers.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_build_parameters import served
from tests.support import PATIENCE
from tests.support.builds.building import Built, build, context, post, query, read
from tests.support.builds.repositories import Repository, daemon, git, silent, smart
from tests.support.engine.harness import TempEngine, until

FILE = b"FROM busybox\nCOPY . /src/\nRUN cd /src && find . | sort\n"


@pytest.fixture(scope="module")
def builder() -> Iterator[TempEngine]:
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


def found(built: Built) -> list[str]:
    """What find(1) has printed."""
    assert built.error is None, built.objects
    return [line for line in built.lines if line == "." or line.startswith("./")]


def failure(builder: TempEngine, body: bytes = b"", **parameters: Any) -> str:
    """The words of a build that fails, before or after its stream has begun."""
    answer = post(builder, body, **parameters)
    if answer.status != 200:
        return answer.message
    error = read(answer).error
    assert error is not None
    return str(error["error"])


# --- contexts -------------------------------------------------------------------------------------


def test_a_repository_is_the_context(builder: TempEngine, tmp_path: Path) -> None:
    repository = Repository(tmp_path, "r")
    repository.commit({"Dockerfile": FILE, "a": b"a", "tests/x": b"x", ".dockerignore": b"tests\n*.md\n", "y.md": b""})
    git(repository.path, "tag", "v1")
    repository.commit({"sub/Dockerfile": FILE, "sub/b": b"b", "other/File": b"FROM busybox\nLABEL from=other\n"})
    with daemon(tmp_path) as server:
        url = f"{server}/r.git"
        built = read(post(builder, b"", remote=f"{url}#v1"))
        assert found(built) == [".", "./.dockerignore", "./Dockerfile", "./a"]
        built = read(post(builder, b"", remote=f"{url}#:sub"))
        assert found(built) == [".", "./Dockerfile", "./b"]
        built = read(post(builder, b"", remote=url, dockerfile="other/File"))
        assert "LABEL from=other" in built.text
        again = read(post(builder, b"", remote=f"{url}#v1"))
        assert again.lines.count(" ---> Using cache") == 2
        kept = read(post(builder, b"", remote=url, buildargs={"BUILDKIT_CONTEXT_KEEP_GIT_DIR": "1"}))
        assert "./.git/HEAD" in found(kept)
        for remote, words in (
            (f"{url}#none", "couldn't find remote ref none"),
            (f"{url}#:none", "Error setting git context, none: no such file or directory"),
            (f"{url}#:../x", 'Error setting git context, "../x" not within git root'),
            (f"{url}#:other", "Cannot locate specified Dockerfile"),
            (f"{url}#--x", "invalid refspec: --x"),
            (f"{server}/none.git", "Error trying to use git: exit status 128"),
            ("ftp://x/y", "remoteURL (ftp://x/y) could not be recognized as URL"),
        ):
            assert words in failure(builder, remote=remote), remote


def test_docker_py_and_compose_name_repositories(builder: TempEngine, tmp_path: Path) -> None:
    repository = Repository(tmp_path, "r")
    repository.commit({"d/Dockerfile": b"FROM busybox\nCOPY a /\nRUN cat /a\n", "d/a": b"from git\n"})
    with daemon(tmp_path) as server:
        url = f"{server}/r.git#trunk:d"
        image, lines = builder.client().images.build(path=url, tag="mine:py")
        assert image.tags == ["mine:py"]
        assert any("from git" in line.get("stream", "") for line in lines)
        project = tmp_path / "project"
        project.mkdir()
        document = {"version": "2.4", "services": {"one": {"build": {"context": url}, "image": "mine:compose"}}}
        (project / "docker-compose.yml").write_text(json.dumps(document))
        done = subprocess.run(
            ["docker-compose", "build", "--no-cache"],
            cwd=project,
            env=builder.environment | {"COMPOSE_DOCKER_CLI_BUILD": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert builder.request("GET", "/v1.24/images/mine:compose/json").json()["Parent"]


def test_the_progress_of_an_archive(builder: TempEngine) -> None:
    archive = b"FROM scratch\nLABEL a=b\n" + b"#" * 1_000_000
    with served({"/File": ("text/plain", archive)}) as url:
        built = read(post(builder, b"", remote=f"{url}/File"))
    (last,) = [each for each in built.objects if each.get("progressDetail", {}).get("current") == len(archive)]
    assert last["id"] == "Downloading context"
    assert last["status"] == f"{url}/File"
    assert last["progressDetail"]["total"] == len(archive)
    assert last["progress"].startswith("[=====")


# --- ADD ------------------------------------------------------------------------------------------


def test_add_of_a_url(builder: TempEngine) -> None:
    content = {"body": b"one", "time": "Tue, 14 Nov 2023 22:13:20 GMT"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if "missing" not in self.path else 404)
            self.send_header("Content-Length", str(len(content["body"])))
            if content["time"]:
                self.send_header("Last-Modified", str(content["time"]))
            self.end_headers()
            self.wfile.write(bytes(content["body"]))

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        file = f"FROM busybox\nADD {url}/x.tar {url}/y /d/\nADD {url}/z /z\nRUN stat -c '%n %a %u %Y %s' /d/* /z\n"
        built = build(builder, file)
        assert [line for line in built.lines if line.startswith(("/d", "/z"))] == [
            "/d/x.tar 600 0 1700000000 3",
            "/d/y 600 0 1700000000 3",
            "/z 600 0 1700000000 3",
        ]
        assert any(each.get("status") == "Downloading" for each in built.objects)
        assert build(builder, file).lines.count(" ---> Using cache") == 3
        content["time"] = ""  # the time is not part of the content
        assert build(builder, file).lines.count(" ---> Using cache") == 3
        content["body"] = b"two"
        built = build(builder, file)
        assert " ---> Using cache" not in built.lines
        assert "/z 600 0 0 3" in built.lines
        digest = hashlib.sha256(b"two").hexdigest()
        built = build(builder, f"FROM busybox\nADD --checksum=sha256:{digest} {url}/x /x\nRUN cat /x\n")
        assert "two" in built.text
        for line, words in (
            (f"ADD --checksum=sha256:{'0' * 64} {url}/x /x", f"digest mismatch sha256:{digest}: sha256:{'0' * 64}"),
            (f"ADD --checksum=x {url}/x /x", "invalid checksum"),
            (f"ADD {url}/ /d/", f"cannot determine filename from url: {url}/"),
            (f"ADD {url}/missing /x", "Got HTTP status code >= 400: 404 Not Found"),
            (f"COPY {url}/x /x", "source can't be a URL for COPY"),
        ):
            assert words in failure(builder, context(f"FROM busybox\n{line}\n")), line
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_add_of_a_repository(builder: TempEngine, tmp_path: Path) -> None:
    repository = Repository(tmp_path, "r")
    first = repository.commit({"a": b"first", "d/x": b"x", "l": "a"})
    git(repository.path, "tag", "v1")
    repository.commit({"a": b"second"})
    with smart(tmp_path, user="me:secret") as server:
        url = server.replace("//", "//me:secret@") + "/r.git"

        file = f"FROM busybox\nADD {url}#v1 /src/\nRUN cd /src && find . | sort && cat a && stat -c %a-%u-%g a\n"
        built = build(builder, file)
        assert found(built) == [".", "./a", "./d", "./d/x", "./l"]
        assert any("first644-0-0" in line for line in built.lines)
        assert build(builder, file).lines.count(" ---> Using cache") == 2
        built = build(builder, f"FROM busybox\nADD {url}#v1:d /src\nRUN cd /src && find .\n")
        assert found(built) == [".", "./x"]
        file = f"FROM busybox\nADD --keep-git-dir=true {url}#v1 /src\nRUN cd /src && find . && cat .git/HEAD\n"
        kept = build(builder, file)
        assert "./.git/config" in found(kept)
        assert first in kept.lines
        assert build(builder, f"FROM busybox\nADD --checksum={first} {url}#v1 /src\n").id
        error = build(builder, f"FROM busybox\nADD --checksum={first} {url} /src\n").error
        assert error is not None and f"expected checksum to match {first}, got" in error["error"]


# --- ends -----------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """git processes of the engine."""
    pids: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    found: list[int] = []
    for child in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"fetch" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                found.append(child)
    return found


@contextlib.contextmanager
def waiting(builder: TempEngine, remote: str) -> Iterator[socket.socket]:
    """A client of a build that waits for a server."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(builder.socket)
        head = f"POST /v1.24/build?{query({'remote': remote})} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
        yield connection


def test_a_client_that_leaves_during_a_fetch(builder: TempEngine) -> None:
    temporary = Path(builder.root, "tmp")
    with silent() as (address, begun):
        with waiting(builder, f"git://{address}/r.git"):
            assert begun.wait(30 * PATIENCE)
            (pid,) = children(builder.pid)
            pidfd = os.pidfd_open(pid)
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
        until("its directory is gone", lambda: not list(temporary.iterdir()))


def test_the_daemon_is_killed_during_a_fetch(builder: TempEngine, tmp_path: Path) -> None:
    repository = Repository(tmp_path, "r")
    repository.commit({"Dockerfile": FILE, "a": b"a"})
    temporary = Path(builder.root, "tmp")
    with silent() as (address, begun), waiting(builder, f"git://{address}/r.git"):
        assert begun.wait(30 * PATIENCE)
        (pid,) = children(builder.pid)
        pidfd = os.pidfd_open(pid)
        builder.kill9()
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
    builder.start()
    assert list(temporary.iterdir()) == []
    with daemon(tmp_path) as server:
        assert found(read(post(builder, b"", remote=f"{server}/r.git"))) == [".", "./Dockerfile", "./a"]

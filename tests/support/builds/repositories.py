"""Git repositories for tests, and real servers of them on loopback: git daemon, a smart web server
(git http-backend) and a dumb one, which only has files.

Needs git(1).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.builds.web import serving
from tests.support.engine.harness import free_ports, until

_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_{what}": "tests@example.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    **{f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")},
}


def git(directory: Path, *words: str) -> str:
    """The output of a git command."""
    command = ["git", "-c", "protocol.file.allow=always", "-c", "safe.directory=*", *words]
    done = subprocess.run(command, cwd=directory, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout.strip()


class Repository:
    """A repository below the servers' directory, whose default branch is `trunk`. `objects`: the
    hash that names its objects.
    """

    def __init__(self, top: Path, name: str, *, objects: str = "sha1") -> None:
        self.name = f"{name}.git"
        self.path = top / self.name
        self.path.mkdir(parents=True)
        git(self.path, "init", "--quiet", "--initial-branch=trunk", f"--object-format={objects}")

    def commit(self, files: Mapping[str, bytes | str], message: str = "change") -> str:
        """Commit files: bytes, or the target of a symbolic link. Returns the commit's id."""
        for name, content in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.symlink_to(content)
            else:
                path.write_bytes(content)
        git(self.path, "add", "--all")
        git(self.path, "commit", "--quiet", "--allow-empty", f"--message={message}")
        return self.head()

    def head(self) -> str:
        return git(self.path, "rev-parse", "HEAD")

    def submodule(self, path: str, url: str, commit: str, **options: str) -> None:
        """Commit a submodule without fetching it. No `commit` may follow, which would remove it."""
        git(self.path, "update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
        for name, value in {"path": path, "url": url, **options}.items():
            git(self.path, "config", "--file=.gitmodules", f"submodule.{path}.{name}", value)
        git(self.path, "add", ".gitmodules")
        git(self.path, "commit", "--quiet", f"--message=submodule {path}")


# --- servers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def daemon(top: Path) -> Iterator[str]:
    """git daemon; yields the URL of `top`."""
    (port,) = free_ports(1)
    command = ["git", "-c", "safe.directory=*", "daemon", "--reuseaddr", "--listen=127.0.0.1", f"--port={port}"]
    command += ["--export-all", f"--base-path={top}", str(top)]
    # The child of this process is git; the daemon is its child, and so is every service.
    server = subprocess.Popen(command, env={**_ENVIRONMENT, "HOME": str(top)}, start_new_session=True, stderr=-3)
    try:

        def answers() -> bool:
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        until("git daemon answers", answers)
        yield f"git://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait()


class _Quiet:
    def log_message(self, *_: object) -> None:
        """Nothing."""


class _Dumb(_Quiet, http.server.SimpleHTTPRequestHandler):
    pass


class _Smart(_Quiet, http.server.BaseHTTPRequestHandler):
    """The interface between a web server and git http-backend(1), as far as fetches need it."""

    top: Path
    user: str
    """`name:password`, or empty."""
    old: bool
    """Speak only version 0 of the protocol, in which a client gets only what refs name."""

    def _respond(self) -> None:
        # The whole body is read before any answer: closing a connection with unread bytes resets
        # it, and the client may lose the answer.
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.user:
            wanted = f"Basic {base64.b64encode(self.user.encode()).decode()}"
            if self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="x"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        # A proxy gets the whole URL.
        path, _, query = re.sub("^http://[^/]*", "", self.path).partition("?")
        environment = {
            **_ENVIRONMENT,
            "GIT_PROJECT_ROOT": str(self.top),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": "" if self.old else self.headers.get("Git-Protocol", ""),
        }
        command = ["git", "http-backend"]
        done = subprocess.run(command, input=body, env=environment, capture_output=True, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _respond


@contextlib.contextmanager
def smart(top: Path, *, user: str = "", old: bool = False) -> Iterator[str]:
    """A web server with git http-backend; yields the URL of `top`."""
    with serving(type("Smart", (_Smart,), {"top": top, "user": user, "old": old})) as url:
        yield url


@contextlib.contextmanager
def dumb(top: Path) -> Iterator[str]:
    """A web server of the files: fetches get everything, object by object."""
    for repository in top.iterdir():
        git(repository, "update-server-info")
        git(repository, "config", "core.bare", "true")
        if not (repository / "HEAD").exists():  # its URL is that of the directory of git
            for path in (repository / ".git").iterdir():
                path.rename(repository / path.name)
    with serving(functools.partial(_Dumb, directory=str(top))) as url:
        yield url


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, threading.Event]]:
    """A server that accepts connections and says nothing; its address, and an event that is set
    by the first connection.
    """
    begun = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as connections:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.enter_context(listener.accept()[0])
                    begun.set()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", begun
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()

"""A reload: what is in force afterwards, what waits for a restart, and what an invalid file
changes: nothing. And the protocol with the service manager, sd_notify(3) and sd_listen_fds(3).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from engine.system.tls import verifying_context
from tests.support import PATIENCE, ROOT
from tests.support.engine.harness import TempEngine, free_ports, until
from tests.support.plugins.protocol import AuthzPlugin
from tests.unit.http.test_tls import _authority, _issue

pytestmark = pytest.mark.own


class Configured(TempEngine):
    """An engine with a file of dockerd's keys."""

    def __init__(self, *arguments: str, **keys: Any) -> None:
        super().__init__(*arguments)
        self.file = self.base / "daemon.json"
        self.arguments += ("--config", str(self.file))
        self.write(**keys)

    def write(self, **keys: Any) -> None:
        self.file.write_text(json.dumps({key.replace("_", "-"): value for key, value in keys.items()}))

    def reload(self, status: int = 0) -> str:
        """Run `engined reload`; returns its standard error."""
        done = subprocess.run(
            [sys.executable, "-m", "engine", "reload", "--run", str(self.run)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == status, done
        return done.stderr

    def info(self) -> Any:
        return self.request("GET", "/v1.44/info").json()


def test_what_is_in_force_afterwards(tmp_path: Path) -> None:
    program = tmp_path / "other"
    program.write_text("#!/bin/sh\necho other version 1\n")
    program.chmod(0o755)
    with Configured(labels=["zone=a"]) as engine:
        engine.load_busybox()
        container = engine.started("sleep", "600")
        pid = engine.pid
        assert engine.info()["Labels"] == ["zone=a"] and not engine.info()["Debug"]
        engine.write(
            labels=["zone=b", "disk=ssd"],
            debug=True,
            registry_mirrors=["https://mirror.example"],
            insecure_registries=["10.0.0.0/8", "r.example:5000"],
            runtimes={"other": {"path": str(program)}},
            live_restore=False,
            mtu=0,
            log_driver="local",
        )
        log = len(engine.log())
        assert engine.reload() == "engined: log-driver: the new value is in force after a restart\n"
        info = engine.info()
        assert info["Labels"] == ["zone=b", "disk=ssd"] and info["Debug"]
        assert info["RegistryConfig"]["Mirrors"] == ["https://mirror.example/"]
        assert "10.0.0.0/8" in info["RegistryConfig"]["InsecureRegistryCIDRs"]
        assert "r.example:5000" in info["RegistryConfig"]["IndexConfigs"]
        assert info["Runtimes"]["other"]["path"] == str(program)
        said = engine.log(log)
        assert "live-restore has no meaning here" in said
        assert "log-driver: the new value is in force after a restart" in said
        assert engine.pid == pid and engine.inspect(container)["State"]["Running"]
        engine.write()
        engine.reload()
        info = engine.info()
        assert not info["Labels"] and not info["Debug"] and not info["RegistryConfig"]["Mirrors"]
        assert "other" not in info["Runtimes"]
        chosen = quote(json.dumps({"type": ["daemon"]}))
        events = engine.request("GET", f"/events?since=1&until={int(time.time()) + 1}&filters={chosen}")
        first, second = map(json.loads, events.body.splitlines())
    assert (first["Action"], first["Type"]) == ("reload", "daemon")
    attributes = first["Actor"]["Attributes"]
    assert attributes["labels"] == '["zone=b","disk=ssd"]' and attributes["debug"] == "true"
    assert attributes["insecure-registries"] == '["10.0.0.0/8","r.example:5000"]'
    assert attributes["name"] == info["Name"] and first["Actor"]["ID"] == info["ID"]
    assert second["Actor"]["Attributes"]["labels"] == "[]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1, column 2"),
        ('{"labels": 5}', "labels: expected array, got integer"),
        ('{"labels": ["new=1"], "no-such-key": 1}', "no-such-key is not known"),
        ('{"labels": ["new=1"], "runtimes": {"x": {}}}', "runtimes x: has neither path nor BinaryName"),
        ('{"labels": ["new=1"], "authorization-plugins": ["missing"]}', "missing"),
    ],
)
def test_an_invalid_file_changes_nothing(own_configured: Configured, text: str, words: str) -> None:
    engine = own_configured
    engine.file.write_text(text)
    said = engine.reload(1)
    assert said.count("\n") == 1 and said.startswith("engined: not reloaded: ") and words in said
    assert engine.info()["Labels"] == ["zone=a"]


@pytest.fixture(scope="module")
def own_configured() -> Iterator[Configured]:
    with Configured(labels=["zone=a"]) as engine:
        yield engine


def test_a_file_that_is_none(own_configured: Configured) -> None:
    """A FIFO does not stop the reloads that follow."""
    own_configured.file.unlink()
    os.mkfifo(own_configured.file)
    assert "is not a regular file" in own_configured.reload(1)
    own_configured.file.unlink()
    own_configured.write(labels=["zone=a"])
    assert own_configured.reload() == ""


def test_a_file_that_is_gone(own_configured: Configured) -> None:
    own_configured.file.unlink()
    assert "no such file" in own_configured.reload(1)
    own_configured.write(labels=["zone=a"])
    assert own_configured.reload() == ""


def test_a_runtime_that_does_not_exist(own_configured: Configured) -> None:
    own_configured.write(default_runtime="none", labels=["zone=a"])
    assert "the default runtime 'none' does not exist" in own_configured.reload(1)
    own_configured.write(labels=["zone=a"])
    assert own_configured.reload() == ""


def test_without_a_daemon(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "reload", "--run", str(tmp_path)], cwd=ROOT, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (1, f"engined: no engine is running in {tmp_path}\n")


def test_authorization_begins_and_ends_on_a_connection_that_is_open() -> None:
    engine, plugin = Configured(), AuthzPlugin()
    plugin.listen(engine.base / "sockets" / "gate.sock")
    engine.arguments += ("--plugin-socket-directory", str(engine.base / "sockets"))
    with contextlib.closing(plugin), engine:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(engine.socket)

        def ping() -> int:
            connection.request("GET", "/_ping")
            answer = connection.getresponse()
            answer.read()
            return answer.status

        assert ping() == 200 and not plugin.calls
        engine.write(authorization_plugins=["gate"])
        engine.reload()
        plugin.deny = lambda method, body: "not today"
        assert ping() == 403
        engine.write()
        engine.reload()
        assert ping() == 200
        connection.close()


def test_certificates_are_read_again(tmp_path: Path) -> None:
    """An old client is refused afterwards, because its CA is not trusted any more."""
    clients = []
    kept = {name: str(tmp_path / name) for name in ("ca", "cert", "key")}
    (port,) = free_ports(1)

    def renew(name: str) -> None:
        (tmp_path / name).mkdir()
        authority, issuer = _authority(tmp_path / name, "authority")
        made = authority, *_issue(tmp_path / name, "server", issuer)
        for source, target in zip(made, kept.values(), strict=True):
            Path(target).write_bytes(Path(source).read_bytes())
        context = verifying_context(authority=authority)
        context.load_cert_chain(*_issue(tmp_path / name, "client", issuer))
        clients.append(context)

    def ping(context: ssl.SSLContext) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30 * PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", "/_ping")
            return connection.getresponse().status

    renew("old")
    keys = {"tlsverify": True, "tlscacert": kept["ca"], "tlscert": kept["cert"], "tlskey": kept["key"]}
    with Configured(hosts=[f"tcp://127.0.0.1:{port}"], **keys) as engine:
        assert ping(clients[0]) == 200
        renew("new")
        assert ping(clients[0]) == 200
        engine.reload()
        assert ping(clients[1]) == 200
        with pytest.raises(ssl.SSLError):
            ping(clients[0])
        Path(kept["key"]).write_text("no key")
        assert kept["key"] in engine.reload(1)
        assert ping(clients[1]) == 200


def _after(code: str) -> tuple[str, ...]:
    """A command that runs code, and then becomes the command that follows it."""
    return sys.executable, "-c", f"import os, sys\n{code}\nos.execvp(sys.argv[1], sys.argv[1:])"


def test_a_request_waits_while_the_daemon_restarts(tmp_path: Path) -> None:
    """The service manager holds the socket. Here, this test does."""
    path = tmp_path / "held.sock"
    with socket.socket(socket.AF_UNIX) as held, ThreadPoolExecutor(1) as pool:
        held.bind(str(path))
        held.listen(64)
        take = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
taken = libc.syscall(438, os.pidfd_open({os.getpid()}), {held.fileno()}, 0)  # pidfd_getfd(2)
assert taken > 0, os.strerror(ctypes.get_errno())
if taken != 3:
    os.dup2(taken, 3)
    os.close(taken)
os.set_inheritable(3, True)
os.environ |= {{"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "api"}}
"""
        engine = TempEngine("--socket", "fd://api")
        engine.within = _after(take)
        with engine:
            assert f"listening on {path}" in engine.log()
            assert engine.docker("-H", f"unix://{path}", "version", "--format", "{{.Server.Version}}").line
            engine.terminate()
            assert path.exists()
            waiting = pool.submit(engine.docker, "-H", f"unix://{path}", "version", "--format", "{{.Server.Version}}")
            engine.start()
            assert "+engined." in waiting.result().line
            engine.within = ()


def test_no_socket_is_passed() -> None:
    engine = TempEngine("--socket", "fd://")
    with pytest.raises(AssertionError, match="fd://: the service manager has passed no such socket"):
        engine.start()
    engine.close()


def test_what_the_service_manager_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30 * PATIENCE)
        engine = Configured()
        engine.within = ("env", f"NOTIFY_SOCKET={tmp_path / 'notify'}", "WATCHDOG_USEC=200000")
        with engine:
            assert manager.recv(4096) == b"READY=1"
            assert [manager.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            engine.reload()
            told = []
            while not told or told[-1] != b"READY=1":
                if (message := manager.recv(4096)) != b"WATCHDOG=1":
                    told.append(message)
            assert told[0].startswith(b"RELOADING=1\nMONOTONIC_USEC=") and told[1:] == [b"READY=1"]
            inherited = Path(f"/proc/{engine.monitor_pid()}/environ").read_bytes()
            assert b"PATH=" in inherited and b"NOTIFY_SOCKET" not in inherited and b"WATCHDOG" not in inherited
            engine.terminate()
            until("it says that it ends", lambda: manager.recv(4096) == b"STOPPING=1")
            engine.start()

"""What a sealed program can do: read the host's public files, use the network, and write to its
directory; and what it cannot. It and its descendants end with `run`.
"""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.system.sealed import GROUP, PATH, PLACE, USER, Ended, Stop, Stopped, run

NEVER = 1e9


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for a program, in one that only root may enter."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as parent:
        directory = Path(parent) / "place"
        directory.mkdir()
        os.chown(directory, USER, GROUP)
        yield directory


@pytest.fixture
def stop() -> Iterator[Stop]:
    made = Stop()
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    yield made
    assert len(os.listdir("/proc/self/fd")) == before
    made.close()


def shell(script: str, place: Path, stop: Stop, *, until: float = NEVER, watch: object = None) -> Ended:
    argv = ("/bin/sh", "-c", script)
    environment = {"PATH": PATH, "NAME": "value"}
    looked = watch if callable(watch) else lambda: None
    return run(argv, environment, place, stop, until=until, largest=1 << 20, watch=looked)


def test_its_output_and_status(place: Path, stop: Stop) -> None:
    assert shell("echo out; echo err >&2; exit 3", place, stop) == Ended(3, b"out\n", b"err\n")
    assert shell("kill -9 $$", place, stop).status == 0  # the first process of its namespace
    assert shell("sh -c 'kill -9 $$'; exit $?", place, stop).status == 137
    long = shell("yes | head -c 1000000; yes n | head -c 1000000 >&2; echo end >&2", place, stop)
    assert long.stdout == b"y\n" * (32 << 10)
    assert long.stderr == (b"n\n" * (32 << 10) + b"end\n")[-(64 << 10) :]


def test_who_and_where_it_is(place: Path, stop: Stop) -> None:
    (place / "file").write_bytes(b"x")
    script = "id -u; id -G; pwd; ls; env; echo $$; umask; ls /proc/self/fd; "
    script += "grep -E 'Cap(Prm|Eff|Amb)|NoNew' /proc/self/status"
    lines = shell(script, place, stop).stdout.decode().splitlines()
    assert lines[:4] == [str(USER), str(GROUP), PLACE, "file"]
    end = lines.index("1")
    assert sorted(line for line in lines[4:end] if not line.startswith(("_=", "PWD=", "OLDPWD=", "SHLVL="))) == [
        "NAME=value",
        f"PATH={PATH}",
    ]
    assert lines[end + 1 : end + 6] == ["0022", "0", "1", "2", "3"]  # 3: ls's own
    assert [line.split() for line in lines[end + 6 :]] == [
        ["CapPrm:", "0" * 16],
        ["CapEff:", "0" * 16],
        ["CapAmb:", "0" * 16],
        ["NoNewPrivs:", "1"],
    ]


def test_it_has_no_terminal(place: Path, stop: Stop) -> None:
    """It is in a session of its own, so it cannot put words into the daemon's."""
    assert int(shell("cut -d' ' -f6 /proc/self/stat", place, stop).stdout) != os.getsid(0)


@pytest.mark.parametrize(
    "script",
    [
        "cat /etc/shadow",
        "ls /root",
        "echo x > /var/tmp/x",
        "echo x > /dev/shm/x",
        "ls {place}",
        "mount -t tmpfs none /tmp",
        "kill -9 -1",  # there is no other process
        "chroot / true",
        "mknod x b 1 1",
        "head -c 2000000 /dev/zero > large",
        "ulimit -f unlimited",
        "ls /tmp/engined* /tmp/pytest*",
    ],
)
def test_what_it_cannot(place: Path, stop: Stop, script: str) -> None:
    assert shell(f"{script.format(place=place)} || exit 7; exit 0", place, stop).status == 7


def test_what_it_can(place: Path, stop: Stop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"cat /etc/passwd > copy && mkdir a && ln -s x a/y && git ls-remote http://127.0.0.1:{port}/x"

        def accept() -> None:
            server.accept()[0].close()

        accepted = threading.Thread(target=accept)
        accepted.start()
        shell(script, place, stop)
        accepted.join()
    assert (place / "copy").read_bytes() == Path("/etc/passwd").read_bytes()
    assert (place / "a" / "y").is_symlink()
    assert not Path(PLACE, "copy").exists()


def test_setuid_gives_no_rights(place: Path, stop: Stop) -> None:
    program = place / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    program.chmod(0o4755)
    assert shell("./id -u", place, stop).stdout == f"{USER}\n".encode()


def test_descendants_end_with_it(place: Path, stop: Stop) -> None:
    ended = shell("setsid sleep 1000 & sleep 1000 & echo done", place, stop)
    assert ended == Ended(0, b"done\n", b"")


def test_it_is_stopped(place: Path, stop: Stop) -> None:
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with pytest.raises(Stopped):
        shell("setsid sleep 1000 & sleep 1000", place, stop)
    timer.join()
    with pytest.raises(Stopped):  # so is every later one
        shell("sleep 1000", place, stop)


def test_it_takes_too_long(place: Path, stop: Stop) -> None:
    for script in ("sleep 1000", "exec >&- 2>&-; sleep 1000", "trap '' TERM; yes"):
        with pytest.raises(TimeoutError):
            shell(script, place, stop, until=time.monotonic() + 0.1)


def test_it_is_watched(place: Path, stop: Stop) -> None:
    class Full(Exception):
        pass

    looks = []

    def watch() -> None:
        looks.append(len(list(place.iterdir())))
        if looks[-2:] == [1, 1]:
            raise Full

    with pytest.raises(Full):
        shell("touch a; sleep 1000", place, stop, watch=watch)
    assert looks[-2:] == [1, 1] and set(looks[:-2]) <= {0}, looks


def test_what_cannot_be_started(place: Path, stop: Stop) -> None:
    children = Path("/proc/thread-self/children")
    before = children.read_text()
    for argv, directory in ((("/nonexistent",), place), (("/etc",), place), (("/bin/sh",), place / "none")):
        with pytest.raises(OSError, match=argv[0]):
            run(argv, {}, directory, stop, until=NEVER, largest=1 << 20, watch=lambda: None)
    assert children.read_text() == before  # no zombie of a failed one

"""How the monitor finds exits, with real processes and without its event loop."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from engine.monitor.process import exit_of_zombie
from tests.support import PATIENCE
from tests.support.engine.harness import until

BEGIN = """
import os, select, socket, time
from types import SimpleNamespace
from engine._fast.pump import Loop
from engine._fast.spawn import become_subreaper
from engine.monitor import messages
from engine.monitor.monitor import Monitor
from engine.monitor import process as module
from engine.monitor.process import Process

become_subreaper()
read, write = os.pipe()
hold, let_go = os.pipe()
between = os.fork()
if between == 0:
    process = os.fork()
    if process == 0:
        os._exit(7)
    os.write(write, str(process).encode())
    os.close(let_go)
    os.read(hold, 1)
    os._exit(0)
pid = int(os.read(read, 32))
pidfd = os.pidfd_open(pid)
assert select.select([pidfd], [], [], 30)[0]

concluded = []
monitor = SimpleNamespace(loop=Loop(), by_pid={}, concluded=lambda process, status: concluded.append(status))
found = Process(monitor, "key")
monitor.processes = {"key": found}
found.start(pid, pidfd, {}, None, False, None)
found.stdio.begin()
client, theirs = socket.socketpair()
client.setblocking(False)
found.stdio.attach(theirs.detach(), False, True, True, True, b"", b"", b"", False)
"""

NOT_YET = """
module.exit_of_zombie = lambda pid, pidfd: None  # as without the right to see it
found.exited()
try:
    raise AssertionError(f"a client asks for the exit code at the end of its stream: {client.recv(1)}")
except BlockingIOError:
    pass
assert found.status is None and pid in monitor.by_pid, "its parent is another one"
"""

BECOMES_A_CHILD = """
os.close(let_go)
os.waitpid(between, 0)
assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid == pid
found.exited()
"""

THE_DAEMON_TELLS = """
found.tries_end = time.monotonic() - 1
Monitor._reaped(monitor, SimpleNamespace(send=lambda report: None), messages.Reaped(1, "key", 7), [])
"""

ITS_PARENT_IS_SLOW = """
found.exited()
assert open(f"/proc/{pid}/stat").read().split(") ")[1][0] == "Z", "it is not reaped"
"""

END = """
assert concluded == [7] and not monitor.by_pid, (concluded, monitor.by_pid)
"""


@pytest.mark.parametrize(
    "then",
    [NOT_YET + BECOMES_A_CHILD, NOT_YET + THE_DAEMON_TELLS, ITS_PARENT_IS_SLOW],
    ids=["becomes-a-child", "the-daemon-tells", "its-parent-is-slow"],
)
def test_a_process_that_was_no_child_at_its_end(then: str) -> None:
    """A runtime has an intermediate process that may end last; another parent may have reaped it,
    or PID 1 may not have reaped it yet."""
    command = [sys.executable, "-c", textwrap.dedent(BEGIN + then + END)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("end", "wanted"), [("os._exit(7)", 7 << 8), ("os._exit(0)", 0), ("os.abort()", 6)])
def test_exit_status_of_a_zombie(end: str, wanted: int) -> None:
    script = f"import os, time\nif (pid := os.fork()) == 0:\n    {end}\nprint(pid, flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            assert select.select([pidfd], [], [], 30 * PATIENCE)[0]
            assert exit_of_zombie(pid, pidfd) & ~0x80 == wanted  # without the mark of a core dump
            assert exit_of_zombie(parent.pid, pidfd) is None, "it runs"
            parent.kill()
            parent.wait()
            until("it is reaped", lambda: reaped(pidfd))
            assert exit_of_zombie(os.getpid(), pidfd) is None, "the number may be another's by now"
        finally:
            os.close(pidfd)


def reaped(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False

"""How the monitor finds exits, with real processes and without its event loop."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import os, select, socket, time
from types import SimpleNamespace
from engine._fast.pump import Loop
from engine._fast.spawn import become_subreaper
from engine.monitor import messages
from engine.monitor.monitor import Monitor
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

END = """
assert concluded == [7] and not monitor.by_pid, (concluded, monitor.by_pid)
"""


@pytest.mark.parametrize("then", [BECOMES_A_CHILD, THE_DAEMON_TELLS], ids=["becomes-a-child", "the-daemon-tells"])
def test_a_process_that_was_no_child_at_its_end(then: str) -> None:
    """A runtime has an intermediate process that may end last; and another parent may have reaped
    it."""
    command = [sys.executable, "-c", textwrap.dedent(BEGIN + then + END)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

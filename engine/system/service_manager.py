"""What systemd and a service say to each other: readiness, reloads and the watchdog, sd_notify(3);
listening sockets, sd_listen_fds(3).

The variables are taken out of the environment, so that no program that is started later acts on
them.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

from engine.errors import ServerError

FIRST = 3
"""Number of the first inherited descriptor."""


class Notifier:
    """Tells the service manager about this service. Does nothing where there is none."""

    def __init__(self, address: str, watchdog: float = 0.0) -> None:
        """`watchdog`: seconds after which a service that says nothing counts as dead; 0 for
        never.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of_environment(cls) -> Notifier:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        wanted = microseconds.isascii() and microseconds.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if wanted else 0.0)

    def ready(self) -> None:
        """The service serves, for the first time or after `reloading`. From now on the loop shows
        twice in each period of the watchdog that it still runs.
        """
        self._send("READY=1")
        if self._watchdog and self._timer is None:
            self._pet()

    def reloading(self) -> None:
        """A reload has begun. `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The service ends."""
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pet(self) -> None:
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._watchdog / 2, self._pet)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # without waiting: what systemd does not read now, it does not need
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notifier,
            contextlib.suppress(OSError),
        ):
            notifier.sendto(text.encode(), self._address)


def inherited() -> dict[str, list[int]]:
    """The listening sockets that this process was started with: descriptors by name, in their
    order. Programs that it starts do not get them.
    """
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[int]] = {}
    if not (count.isascii() and count.isdigit()) or pid != str(os.getpid()):
        return found
    for index in range(min(int(count), 1024)):
        os.set_inheritable(FIRST + index, False)
        found.setdefault(names[index] if index < len(names) and names[index] else "unknown", []).append(FIRST + index)
    return found


def chosen(found: dict[str, list[int]], wanted: str) -> list[int]:
    """The descriptors of `fd://WANTED`: all, those of a name, or the one of this number.

    Raises ServerError if there are none.
    """
    everything = [each for group in found.values() for each in group]
    chosen = found.get(wanted, [int(wanted)] if wanted.isdecimal() and int(wanted) in everything else [])
    if wanted in ("", "*"):
        chosen = everything
    if not chosen:
        raise ServerError(f"fd://{wanted}: the service manager has passed no such socket")
    return chosen

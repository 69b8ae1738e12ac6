"""systemd-journald in a mount namespace of its own, and its entries as journalctl shows them.

The namespace exists as long as its holder, a process that sleeps. /run is an empty tmpfs there, and
/etc has a configuration and a machine id of its own, so that nothing of the host's journal is
touched.

Owns:    the holder and the journal's process.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.support.logs.targets.programs import UNPACKED, Server, environment

_SETUP = """
set -eu
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/systemd/journal /run/log /run/etc/above /run/etc/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/above,workdir=/run/etc/work none /etc
echo 11111111111111111111111111111111 >/etc/machine-id
mkdir -p /etc/systemd
rm -rf /etc/systemd/journald.conf.d
cat >/etc/systemd/journald.conf <<'CONF'
[Journal]
Storage=volatile
RateLimitIntervalSec=0
RateLimitBurst=0
RuntimeMaxUse=1G
RuntimeMaxFileSize=256M
ReadKMsg=no
Audit=no
ForwardToSyslog=no
ForwardToKMsg=no
ForwardToConsole=no
ForwardToWall=no
CONF
echo ready
exec sleep infinity
"""


class Namespace:
    """A mount namespace for a journal and its clients."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", _SETUP], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        if said != b"ready\n":
            self.close()
            raise AssertionError(f"no namespace for the journal: {said!r}")

    @property
    def within(self) -> tuple[str, ...]:
        """A command that runs another one inside."""
        return ("nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--")

    def path(self, inside: str) -> str:
        """A path of the namespace as this process reaches it."""
        return f"/proc/{self._holder.pid}/root{inside}"

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Journal(Server):
    """The journal of a namespace."""

    def __init__(self, directory: Path, namespace: Namespace) -> None:
        super().__init__(directory)
        self.namespace = namespace

    def start(self) -> None:
        for name in ("socket", "stdout", "dev-log"):
            path = self.namespace.path(f"/run/systemd/journal/{name}")
            if os.path.exists(path):
                os.unlink(path)

        def ready() -> bool:
            places = ("/run/systemd/journal/socket", "/run/log/journal")
            return all(os.path.exists(self.namespace.path(path)) for path in places)

        self.run([str(UNPACKED / "lib/systemd/systemd-journald")], ready, self.namespace.within)

    def entries(self, *matches: str) -> list[dict[str, Any]]:
        """Entries with these fields (`NAME=value`), oldest first. Values are text, or lists of
        numbers if they are no printable UTF-8."""
        arguments = [
            *(str(UNPACKED / "bin/journalctl"), "-D", self.namespace.path("/run/log/journal")),
            *("-o", "json", "--all", "--no-pager", "-q"),
        ]
        done = subprocess.run([*arguments, *matches], env=environment(), capture_output=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]


def value(entry: dict[str, Any], name: str) -> bytes:
    """A field as bytes."""
    found = entry[name]
    return bytes(found) if isinstance(found, list) else str(found).encode()

"""A system bus of the tests' own: dbus-daemon (package dbus)."""

from __future__ import annotations

import subprocess
from pathlib import Path

_CONFIGURATION = """<busconfig>
<listen>unix:path={socket}</listen><auth>EXTERNAL</auth>
<policy context="default">
<allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>
</policy>
</busconfig>"""


class Bus:
    """dbus-daemon at a socket in a directory."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "bus"
        self._configuration = directory / "bus.conf"
        self._configuration.write_text(_CONFIGURATION.format(socket=self.socket))
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        command = ["dbus-daemon", f"--config-file={self._configuration}", "--nofork", "--nopidfile", "--print-address"]
        self.daemon = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.daemon.stdout is not None
        assert self.daemon.stdout.readline(), "it has not begun to listen"

    def stop(self) -> None:
        """Its clients lose their connections."""
        if self.daemon is not None:
            self.daemon.terminate()
            self.daemon.communicate()
            self.daemon = None

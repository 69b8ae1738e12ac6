"""The program of the tests' managed plugins. It runs in a container root (`plugin_images.py`) and
has the modules that are imported here.

    python -m tests.support.plugins.program CLASS SOCKET [ARGUMENT...]

CLASS is one of this module, `plugins.py` or `network_plugins.py`. It listens on SOCKET. If there is
a directory /control, each call is appended to its file `calls` (a line of JSON), and its file
`faults` (JSON, method → fault) says which calls fail: `hang`, `garbage`, `error`, `unserved` (404),
`die` before the call or `die after` it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.plugins import networks as network_plugins
from tests.support.plugins import protocol as plugins

CONTROL = Path("/control")
DATA = Path("/data")
"""The PropagatedMount of volume plugins."""
STATE, STORE = Path("/state.json"), Path("/store")
"""In the plugin's own writable root: they must outlive its process."""
MS_BIND = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class MountingVolumes(plugins.VolumePlugin):
    """A volume is a directory of the plugin's root, which is bound below the PropagatedMount while
    it is mounted. Which volumes exist is kept in a file, as real plugins do.
    """

    def __init__(self) -> None:
        super().__init__(DATA)
        if STATE.exists():
            self.volumes, self.mounted = json.loads(STATE.read_text())

    def _answer(self, method: str, body: plugins.Answer) -> tuple[int, bytes]:
        answer = super()._answer(method, body)
        STATE.write_text(json.dumps([self.volumes, self.mounted]))
        return answer

    def _mount(self, body: plugins.Answer) -> plugins.Answer:
        path = self._path(body["Name"])
        store = STORE / path.name
        store.mkdir(parents=True, exist_ok=True)
        if not self.mounted.get(body["Name"]) and _libc.mount(bytes(store), bytes(path), None, MS_BIND, None) < 0:
            return {"Err": f"mount: {os.strerror(ctypes.get_errno())}"}
        return super()._mount(body)

    def _unmount(self, body: plugins.Answer) -> plugins.Answer:
        answer = super()._unmount(body)
        if not self.mounted.get(body["Name"]) and _libc.umount2(bytes(self._path(body["Name"])), 0) < 0:
            return {"Err": f"umount: {os.strerror(ctypes.get_errno())}"}
        return answer


def controlled(of: type[Any]) -> type[Any]:
    """The class, with the calls and faults of /control."""

    class Controlled(of):  # type: ignore[misc]
        def _answer(self, method: str, body: Any) -> tuple[int, bytes]:
            with open(CONTROL / "calls", "a") as calls:
                calls.write(json.dumps([method, body]) + "\n")
            faults = CONTROL / "faults"
            fault = json.loads(faults.read_text()).get(method) if faults.exists() else None
            if fault == "hang":
                time.sleep(3600)
            if fault == "die":
                os._exit(3)
            answer: tuple[int, bytes] = super()._answer(method, body)
            if fault == "die after":
                os._exit(4)
            faulty = {
                "garbage": (200, b'{"Err": '),
                "error": (200, b'{"Err": "refused by the test"}'),
                "unserved": (404, b"404 page not found\n"),
            }
            return faulty.get(fault, answer)

    return Controlled


def main(name: str, address: str, *arguments: str) -> None:
    of: Any = {**vars(plugins), **vars(network_plugins), **globals()}[name]
    plugin = (controlled(of) if CONTROL.is_dir() else of)(*arguments)
    plugin.listen(Path(address))
    print(f"{name} listens on {address}", flush=True)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    plugin.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

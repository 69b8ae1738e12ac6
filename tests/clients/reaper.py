"""An image that stands in for Testcontainers' reaper, `testcontainers/ryuk`.

It speaks the reaper's protocol on port 8080: each line is a filter, and each is acknowledged. When
the client that sent filters has closed the connection, it removes the containers, networks and
volumes that match, and ends. The real one waits for other clients first. It is a shell script
with curl, which talks to the engine's socket at /var/run/docker.sock.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

from tests.support.images.archives import Image, Node, busybox_layer, directory, docker_archive, tar

NAME = "reaper/stand-in:1"

_MAIN = """#!/bin/sh
echo Started!
while :; do
    nc -l -p 8080 -e /session
    [ ! -s /filters ] || exec /reap
done
"""
_SESSION = """#!/bin/sh
while read -r line; do
    printf '%s\\n' "$line" | tr -d '\\r' >>/filters
    echo ACK
done
"""
_REAP = """#!/bin/sh
ask() { curl -s --unix-socket /var/run/docker.sock "$@"; }
ids() { grep -oE '"Id":"[0-9a-f]{64}"' | cut -d '"' -f 4; }
sort -u /filters | while read -r filter; do
    wanted="filters={\\"label\\":[\\"${filter#label=}\\"]}"
    ask -G --data-urlencode "$wanted" 'http://engine/containers/json?all=1' | ids | while read -r id; do
        case $id in
            "$HOSTNAME"*) ;;
            *) ask -X DELETE "http://engine/containers/$id?force=1&v=1" ;;
        esac
    done
    ask -G --data-urlencode "$wanted" http://engine/networks | ids | while read -r id; do
        ask -X DELETE "http://engine/networks/$id"
    done
    ask -G -X POST --data-urlencode "${wanted%?},\\"all\\":[\\"true\\"]}" http://engine/volumes/prune
done
"""


def _programs() -> tuple[str, ...]:
    """curl, the libraries that it is linked with, and their loader."""
    curl = shutil.which("curl")
    assert curl is not None
    linked = subprocess.run(["ldd", curl], check=True, capture_output=True, text=True).stdout
    return (curl, *sorted(set(re.findall(r"(?:=> |\t)(/\S+)", linked))))


@functools.cache
def archive() -> bytes:
    """The image in the format of `docker save`."""
    files = [Path(path) for path in _programs()]
    folders = sorted({str(parent)[1:] for path in files for parent in path.parents if parent != Path("/")})
    script = {"main": _MAIN, "session": _SESSION, "reap": _REAP}
    layer = tar(
        [
            *(directory(name + "/") for name in folders),
            *(Node(str(path)[1:], path.read_bytes(), mode=0o755) for path in files),
            *(Node(name, text.encode(), mode=0o755) for name, text in script.items()),
        ]
    )
    return docker_archive(Image([busybox_layer(), layer], (NAME,), {"Cmd": ["/main"]}))

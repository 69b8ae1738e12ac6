"""Managed plugins of the tests as images: a root with Python, `tests/support/plugins/protocol.py`
and `tests/support/plugins/program.py`, and a config, which are put into a registry.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support import ROOT
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, digest, directory, tar
from tests.support.images.registry import DOCKER_MANIFEST, Put, Registry

CONFIG_TYPE = "application/vnd.docker.plugin.v1+json"
LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar.gzip"

_HOME = "/usr"
_LISTED = """
import sys
sys.path.insert(0, sys.argv[1])
import encodings.idna, runpy, tests.support.plugins.program, tests.support.logs.targets.log_plugin
for module in [*sys.modules.values()]:
    name = getattr(module, '__file__', None)
    if name:
        print(name)
"""


@functools.cache
def root() -> bytes:
    """The tar archive of the root: the Python that runs the tests, and the modules that the program
    imports.
    """
    listed = subprocess.run(
        [sys.executable, "-S", "-E", "-c", _LISTED, str(ROOT)], check=True, capture_output=True, text=True
    ).stdout.split()
    python = os.path.realpath(sys.executable)
    files = {"/bin/python": python}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in listed:
        if path.startswith(str(ROOT)):
            files[f"/app/{Path(path).relative_to(ROOT)}"] = path
        else:
            files[f"{_HOME}/lib/{version}/{path.partition(f'/{version}/')[2]}"] = path
    if ip := shutil.which("ip"):  # for network plugins
        files["/bin/ip"] = os.path.realpath(ip)
    for binary in [*filter(None, (python, files.get("/bin/ip"))), *(path for path in listed if ".so" in path)]:
        for library in re.findall(r"(/\S+)", subprocess.check_output(["ldd", binary], text=True)):
            files[library] = library
    names = {str(parent) for path in files for parent in Path(path).parents} | {"/tmp", "/data", "/control", "/run"}
    nodes = [directory(name.lstrip("/") or ".") for name in sorted(names)]
    nodes += [
        Node(target.lstrip("/"), _stripped(source), mode=0o755 if os.access(source, os.X_OK) else 0o644)
        for target, source in sorted(files.items())
    ]
    return tar(nodes)


def _stripped(path: str) -> bytes:
    """The file. Debugging symbols are most of a library's size, and each test would unpack them."""
    with tempfile.NamedTemporaryFile() as stripped:
        if ".so" in path:
            subprocess.run(["strip", "-o", stripped.name, path], check=True, capture_output=True)
            path = stripped.name
        return Path(path).read_bytes()


@functools.cache
def _packed_root() -> bytes:
    return gzip.compress(root(), 1, mtime=0)


def config(of: str, *types: str, control: Path | None = None, **more: Any) -> dict[str, Any]:
    """The config of a plugin with the class `of` (see `plugin_program`); `types` such as
    `docker.volumedriver/1.0`. `control`: the host's directory that the plugin sees as /control.
    """
    mounts = []
    if control is not None:
        mounts.append(
            {
                "Name": "control",
                "Description": "calls and faults",
                "Settable": ["source"],
                "Source": str(control),
                "Destination": "/control",
                "Type": "bind",
                "Options": ["rbind"],
            }
        )
    found: dict[str, Any] = {
        "Description": f"{of} of the tests",
        "Documentation": "",
        "Interface": {"Types": list(types), "Socket": "plugin.sock"},
        "Entrypoint": ["/bin/python", "-m", "tests.support.plugins.program", of, "/run/docker/plugins/plugin.sock"],
        "WorkDir": "/app",
        "Network": {"Type": "none"},
        "Env": [
            {"Name": "PYTHONHOME", "Value": _HOME, "Description": "", "Settable": None},
            {"Name": "DEBUG", "Value": "0", "Description": "more output", "Settable": ["value"]},
        ],
        "Args": {"Name": "args", "Description": "", "Settable": ["value"], "Value": []},
        "Mounts": mounts,
        "Linux": {"Capabilities": ["CAP_SYS_ADMIN"], "AllowAllDevices": False, "Devices": []},
        "rootfs": {"type": "layers", "diff_ids": [digest(root())]},
    }
    if "docker.volumedriver/1.0" in types:
        found["PropagatedMount"] = "/data"
    return {**found, **more}


def put(
    registry: Registry,
    repository: str,
    tag: str,
    document: dict[str, Any],
    *,
    layer: bytes | None = None,
    config_type: str = CONFIG_TYPE,
) -> Put:
    """Put a plugin into the registry. `layer`: another root, as a tar archive."""
    raw = json.dumps(document).encode()
    packed = _packed_root() if layer is None else gzip.compress(layer, 1, mtime=0)
    manifest = {
        "schemaVersion": 2,
        "mediaType": DOCKER_MANIFEST,
        "config": {"mediaType": config_type, "size": len(raw), "digest": registry.put_blob(repository, raw)},
        "layers": [{"mediaType": LAYER_TYPE, "size": len(packed), "digest": registry.put_blob(repository, packed)}],
    }
    sent = registry.put_manifest(repository, tag, manifest, DOCKER_MANIFEST)
    return Put(sent, DOCKER_MANIFEST, (str(digest(packed)),))


class Installed:
    """A plugin in one engine, with its calls and faults. `name`: `NAME:TAG` in a registry.
    `control`: its directory on the host.
    """

    def __init__(self, engine: TempEngine, name: str, control: Path) -> None:
        self.engine = engine
        self.name = name
        self.control = control

    def request(self, method: str, path: str = "", body: Any = None, status: int | None = None) -> Any:
        answer = self.engine.request(method, f"/v1.41/plugins/{self.name}{path}", body)
        assert status is None or answer.status == status, answer
        return answer

    def install(self) -> None:
        remote = quote(self.name, safe="")
        privileges = self.engine.request("GET", f"/v1.41/plugins/privileges?remote={remote}").json()
        answer = self.engine.request("POST", f"/v1.41/plugins/pull?remote={remote}", privileges)
        assert answer.status == 200 and b"error" not in answer.body, answer

    @property
    def pid(self) -> int:
        """Of its process, which is the only one that sees `control` at /control; 0: it does not
        run.
        """
        inode = self.control.stat().st_ino
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    same = Path(f"/proc/{name}/root/control").stat().st_ino == inode
                    if same and b"/bin/python" in Path(f"/proc/{name}/cmdline").read_bytes():
                        return int(name)
                except OSError:
                    continue
        return 0

    def faults(self, **of: str) -> None:
        """Faults by method; see `plugin_program`."""
        (self.control / "faults.new").write_text(json.dumps(of))
        (self.control / "faults.new").rename(self.control / "faults")

    def calls(self) -> list[tuple[str, Any]]:
        path = self.control / "calls"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

"""skopeo's `docker-daemon:` both ways: into the engine, and out of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, busybox_layer, docker_archive


def skopeo(*arguments: str) -> str:
    """`skopeo ARGUMENTS`. Raises AssertionError if it fails."""
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def test_both_ways(clean: TempEngine, tmp_path: Path) -> None:
    host = f"unix://{clean.socket}"
    given = Image([busybox_layer()], ("given:1",), {"Cmd": ["echo", "hi"], "Labels": {"a": "b"}})
    (tmp_path / "given.tar").write_bytes(docker_archive(given))
    skopeo("copy", "--dest-daemon-host", host, f"docker-archive:{tmp_path}/given.tar", "docker-daemon:put:1")
    image = clean.request("GET", "/images/put:1/json").json()
    assert image["Id"] == given.id and image["Config"]["Labels"] == {"a": "b"}
    assert clean.docker("run", "--rm", "--network", "none", "put:1").out == "hi\n"

    seen = json.loads(skopeo("inspect", "--daemon-host", host, "docker-daemon:put:1"))
    assert seen["Labels"] == {"a": "b"} and len(seen["Layers"]) == 1
    skopeo("copy", "--src-daemon-host", host, "docker-daemon:put:1", f"docker-archive:{tmp_path}/got.tar:got:1")
    skopeo("copy", "--src-daemon-host", host, f"docker-daemon:{given.id}", f"oci:{tmp_path}/layout:1")
    clean.request("DELETE", "/images/put:1")
    skopeo("copy", "--dest-daemon-host", host, f"oci:{tmp_path}/layout:1", "docker-daemon:again:1")
    assert clean.docker("run", "--rm", "--network", "none", "again:1").out == "hi\n"
    names = json.loads(skopeo("inspect", f"docker-archive:{tmp_path}/got.tar"))
    assert names["Layers"] == [f"sha256:{seen['Layers'][0].removeprefix('sha256:')}"]

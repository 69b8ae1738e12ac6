"""Dockerfiles as people write them (tests/data/build/dockerfiles), built by buildx on an engine:
what the client shows of the build, and what the image is.

    python -m tests.support.builds.dockerfiles [NAME…]   # compare engined with dockerd

They are in the manner of official images and of common guides, without `set -x`, whose lines
dockerd mixes with the output. Nothing comes from a network: the base images are busybox under their
names, in which package managers and compilers are one script.

Needs `make bench-peers`, and docker's clients of Debian forky.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.builder.state import DEFAULT_PATH
from tests.support import PATIENCE, ROOT
from tests.support.builds.building import TAR
from tests.support.engine import client
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, Node, busybox_layer, directory, docker_archive, symlink, tar

FILES = ROOT / "tests/data/build/dockerfiles"
CLIENT = ROOT / ".venv/clients/forky"

_TOOL = b"""#!/bin/sh
# Takes the place of a package manager or a compiler: it names its arguments and writes its output.
name=${0##*/}
echo "$name $*"
case $name in
composer) mkdir -p vendor && echo made >vendor/autoload.php ;;
npm) mkdir -p node_modules dist && echo made >node_modules/index.js && echo made >dist/index.html ;;
bundle) mkdir -p /usr/local/bundle && echo made >/usr/local/bundle/gem ;;
esac
while [ $# -gt 0 ]; do
    case $1 in
    -o | --recipe-path) mkdir -p "$(dirname "$2")" && echo "$name" >"$2" ;;
    esac
    shift
done
"""
_TOOLS = (
    *("apk", "apt-get", "bundle", "cargo", "composer", "docker-php-ext-install", "dotnet", "go", "gradle", "groupadd"),
    *("addgroup", "adduser", "make", "mvn", "npm", "pip", "python3", "useradd", "uv"),
)
_BASES: dict[str, dict[str, Any]] = {
    "alpine:3.20": {"Cmd": ["/bin/sh"]},
    "composer:2": {"Env": [DEFAULT_PATH, "COMPOSER_HOME=/tmp"], "WorkingDir": "/app", "Entrypoint": ["/docker.sh"]},
    "debian:bookworm-slim": {"Cmd": ["bash"]},
    "eclipse-temurin:21-jre": {"Env": [f"PATH=/opt/java/bin:{DEFAULT_PATH[5:]}", "JAVA_HOME=/opt/java"]},
    "gcr.io/distroless/static:nonroot": {"User": "65532", "WorkingDir": "/home/nonroot"},
    "ghcr.io/astral-sh/uv:0.5": {"Entrypoint": ["/uv"]},
    "golang:1.23-alpine": {"Env": [DEFAULT_PATH, "GOPATH=/go"], "WorkingDir": "/go"},
    "gradle:8-jdk21": {"Cmd": ["gradle"]},
    "maven:3.9-eclipse-temurin-21": {"Entrypoint": ["/usr/local/bin/mvn-entrypoint.sh"], "Cmd": ["mvn"]},
    "mcr.microsoft.com/dotnet/aspnet:8.0": {"Env": [DEFAULT_PATH, "ASPNETCORE_HTTP_PORTS=8080"]},
    "mcr.microsoft.com/dotnet/sdk:8.0": {"Env": [DEFAULT_PATH, "DOTNET_RUNNING_IN_CONTAINER=true"]},
    "nginx:1.27-alpine": {"ExposedPorts": {"80/tcp": {}}, "Cmd": ["nginx", "-g", "daemon off;"]},
    "node:22-alpine": {"Env": [DEFAULT_PATH, "NODE_VERSION=22"], "Entrypoint": ["docker-entrypoint.sh"]},
    "node:onbuild": {
        "OnBuild": [
            "ARG NODE_ENV",
            "ENV NODE_ENV=$NODE_ENV",
            "WORKDIR /usr/src/app",
            "COPY package.json /usr/src/app/",
            "RUN npm install && npm cache clean --force",
            "COPY . /usr/src/app",
        ],
        "Cmd": ["npm", "start"],
    },
    "php:8.3-apache": {"WorkingDir": "/var/www/html", "StopSignal": "SIGWINCH"},
    "php:8.3-fpm-alpine": {"WorkingDir": "/var/www/html", "ExposedPorts": {"9000/tcp": {}}},
    "python:3.12-slim": {"Env": [DEFAULT_PATH, "LANG=C.UTF-8"], "Cmd": ["python3"]},
    "ruby:3.3-slim": {"Cmd": ["irb"]},
    "rust:1.82": {"Env": [DEFAULT_PATH, "CARGO_HOME=/usr/local/cargo"]},
    "ubuntu:24.04": {"Labels": {"org.opencontainers.image.version": "24.04"}, "Cmd": ["/bin/bash"]},
}
_CONTEXT = {
    **{name: f"the content of {name}\n" for name in ("app.csproj", "app.py", "go.mod", "go.sum", "main.go", "pom.xml")},
    **{name: f"the content of {name}\n" for name in ("composer.json", "composer.lock", "Gemfile", "Gemfile.lock")},
    **{name: f"the content of {name}\n" for name in ("package.json", "package-lock.json", "pyproject.toml", "uv.lock")},
    **{name: f"the content of {name}\n" for name in ("requirements.txt", "nginx.conf", "server.js", "README.md")},
    "docker-entrypoint.sh": '#!/bin/sh\nexec "$@"\n',
    "conf.d/site.conf": "listen 80\n",
    "public/index.html": "<p>hello</p>\n",
    "src/lib.go": "package lib\n",
    "src/nested/deep.go": "package deep\n",
    "node_modules/left-out/index.js": "never\n",
    ".dockerignore": "# what is made\nnode_modules\n*.md\n.git\n",
}


def names() -> list[str]:
    """Of all files."""
    return sorted(path.name.removesuffix(".Dockerfile") for path in FILES.iterdir())


@functools.cache
def _archive() -> bytes:
    """The bases in the format of `docker save`."""
    users = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n"
    users += (
        b"node:x:1000:1000::/home/node:/bin/sh\ngradle:x:1001:1001::/:/bin/sh\napp:x:1002:1002::/home/app:/bin/sh\n"
    )
    users += b"nonroot:x:65532:65532::/home/nonroot:/bin/sh\n"
    groups = re.sub(rb"(?m)^(\w+):x:\d+:(\d+):.*$", rb"\1:x:\2:", users)
    tools = tar(
        [
            Node("etc/passwd", users),
            Node("etc/group", groups),
            directory("usr/local/"),
            directory("usr/local/bin/"),
            Node("usr/bin/tool", _TOOL, mode=0o755),
            *(symlink(f"usr/bin/{name}", "tool") for name in _TOOLS),
        ]
    )
    layers = [busybox_layer(), tools]
    return docker_archive(
        *(Image(layers, (name,), {"Env": [DEFAULT_PATH], **config}) for name, config in _BASES.items())
    )


def prepare(socket: str) -> None:
    """Give an engine the bases."""
    answer = client.request(socket, "POST", "/v1.24/images/load?quiet=1", _archive(), TAR)
    assert answer.status == 200 and b"error" not in answer.body, answer


def build(socket: str, name: str) -> dict[str, Any]:
    """Build a file twice. Returns what the client shows, and the image; both without what differs
    from run to run.
    """
    with tempfile.TemporaryDirectory() as directory:
        config, context = Path(directory, "config"), Path(directory, "context")
        config.mkdir()
        (config / "cli-plugins").symlink_to(CLIENT / "cli-plugins")
        for path, text in _CONTEXT.items():
            file = context / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if path.endswith(".sh") else 0o644)
        text = (FILES / f"{name}.Dockerfile").read_text()
        # dockerd would fetch it
        (context / "Dockerfile").write_text(text.partition("\n")[2] if text.startswith("# syntax=") else text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "BUILD"))}
        shown = []
        for _ in range(2):
            done = subprocess.run(
                [CLIENT / "bin/docker", "build", "--progress=plain", "-t", f"test/{name}", context],
                env=kept | {"DOCKER_HOST": f"unix://{socket}", "DOCKER_CONFIG": str(config)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=120 * PATIENCE,
                check=False,
            )
            shown.append({"status": done.returncode, **progress(done.stderr.decode())})
            if done.returncode:
                break
    for lines in shown[0]["steps"].values():  # other files may have the same steps
        lines[:] = ["DONE"] if lines == ["CACHED"] else lines
    found: dict[str, Any] = dict(zip(("first", "again"), shown, strict=False))
    answer = client.request(socket, "GET", f"/v1.47/images/test/{name}/json")
    if answer.status == 200:
        image = answer.json()
        found["config"] = {key: value for key, value in image["Config"].items() if value}
        history = client.request(socket, "GET", f"/v1.47/images/test/{name}/history").json()
        found["history"] = [f"{'layer' if each['Size'] else 'empty'} {each['CreatedBy']}" for each in history]
    return found


_LINE = re.compile(r"#(\d+) (.*)")
_VARIES = (
    # before the first and the last of the warnings, whose order varies
    (re.compile(r"\x1b\[[0-9]*m"), ""),
    # each engine says this in its own words
    (re.compile(r"(?:failed to compute cache key: )?failed to calculate checksum .*: not found"), "NOT FOUND"),
    (re.compile(r"COPY failed: file not found in build context .*"), "NOT FOUND"),
    (re.compile(r"^\d+\.\d{3} "), ""),
    (re.compile(r"sha256:[0-9a-f]{64}"), "sha256:…"),
    (re.compile(r"\b[0-9.]+(?:B|kB|MB)\b"), "SIZE"),
    (re.compile(r"(?: \d+\.\d+s)(?= done$|$)"), ""),
)
_OWN = "[internal] preparing inline document"
"""A step of BuildKit that engined does not have."""
_PASSING = re.compile(r"WARN: |(?:transferring|exporting layers|writing image|naming to)(?!.* done$)")
"""Lines that a client prints or not, by chance. It repeats the warnings at the end."""


def progress(text: str) -> dict[str, Any]:
    """`steps`: the lines of each step by its name. `end`: the lines after the steps. Neither is in
    order: that is a race of steps, and of the two outputs of a program.
    """
    steps: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    end = []
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            end.append(_plain(line))
            continue
        number, rest = found[1], found[2]
        if number not in titles:
            title = _plain(rest)
            while title in steps:
                title += " (again)"
            titles[number] = rest
            steps[title] = lines[number] = []
        elif rest not in (titles[number], "..."):
            shown = _plain(rest)
            if shown not in lines[number] and not _PASSING.match(shown):
                lines[number].append(shown)
    kept = {title: sorted(found) for title, found in sorted(steps.items()) if not title.startswith(_OWN)}
    for title, found in kept.items():
        if "FROM " in title:  # BuildKit finds some bases in its cache
            found[:] = sorted({"DONE" if line == "CACHED" else line for line in found})
    return {"steps": kept, "end": sorted(filter(None, end))}


def _plain(line: str) -> str:
    for pattern, text in _VARIES:
        line = pattern.sub(text, line)
    return line.rstrip()


def differences(one: str, other: str, chosen: Sequence[str] = ()) -> Iterator[str]:
    """What differs between the engines of two sockets, a text for each file."""
    for name in chosen or names():
        texts = [
            json.dumps(build(socket, name), indent=1, ensure_ascii=False, sort_keys=True).splitlines()
            for socket in (one, other)
        ]
        lines = [*difflib.unified_diff(*texts, "dockerd", "engined", n=1, lineterm="")]
        if lines:
            yield "\n".join((f"=== {name}", *lines))


def main() -> int:
    from bench.engines import Dockerd  # bench imports tests

    parser = argparse.ArgumentParser(prog="tests.support.builds.dockerfiles", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    dockerd, engined = Dockerd(), TempEngine()
    try:
        dockerd.start()
        engined.start()
        for socket in (dockerd.socket, engined.socket):
            prepare(socket)
        found = list(differences(dockerd.socket, engined.socket, arguments.names))
    finally:
        dockerd.close()
        engined.close()
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

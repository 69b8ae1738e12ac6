"""`docker buildx bake`, `docker build --file URL` and `docker compose up --build` with the buildx
and compose of each suite: 0.13 and 2.26 of Debian trixie, 0.29 and 2.40 of forky.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import programs
from tests.clients.conftest import Docker
from tests.support.builds.web import served
from tests.support.engine.harness import TempEngine
from tests.support.images import archives
from tests.support.nightly import nightly

BAKE = """
group "default" {
  targets = ["base", "one", "two"]
}
target "base" {
  context = "."
  dockerfile-inline = "FROM busybox\\nRUN echo from the base >/base"
  tags = ["baked/base"]
}
target "one" {
  context = "."
  contexts = { base = "target:base" }
  tags = ["baked/one:1"]
  args = { WORD = "one" }
}
target "two" {
  inherits = ["one"]
  tags = ["baked/two:1", "baked/two:2"]
  args = { WORD = "two" }
  no-cache = true
}
"""
COMPOSE = """
services:
  first:
    build: {context: ., additional_contexts: {base: docker-image://busybox}, args: {WORD: composed}}
    command: [cat, /word]
    network_mode: none
  second:
    build:
      context: .
      dockerfile_inline: |
        FROM busybox
        RUN --mount=type=secret,id=word cp /run/secrets/word /kept
      secrets: [word]
    command: [sh, -c, "cat /kept; echo"]
    network_mode: none
secrets: {word: {environment: WORD}}
"""


@pytest.fixture(params=[*nightly(programs.TRIXIE), programs.FORKY], ids=lambda program: program.name)
def docker(request: pytest.FixtureRequest, clean: TempEngine) -> Docker:
    return Docker(request.param, clean)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text("FROM base\nARG WORD\nRUN touch /base && echo $WORD >/word\nCOPY . /context\n")
    (tmp_path / "docker-bake.hcl").write_text(BAKE)
    (tmp_path / "compose.yaml").write_text(COMPOSE)
    return tmp_path


def test_bake(docker: Docker, project: Path) -> None:
    shown = docker("buildx", "bake", "--progress=plain", cwd=project).err
    assert "[two 2/3] RUN touch /base && echo two >/word" in shown
    for image, word in (("baked/one:1", "one"), ("baked/two:1", "two"), ("baked/two:2", "two")):
        assert docker("run", "--rm", "--network=none", image, "cat", "/base", "/word").out == f"from the base\n{word}\n"
    again = docker("buildx", "bake", "--progress=plain", "one", cwd=project).err
    assert "CACHED" in again and "ERROR" not in again


def test_a_dockerfile_of_a_web_server(docker: Docker, tmp_path: Path) -> None:
    """Without the .dockerignore beside it, as in Docker."""
    (tmp_path / "file").write_text("text")
    text = b"# syntax=docker/dockerfile:1\nFROM busybox\nCOPY file /\nCMD cat /file\n"
    files = {
        "/x.Dockerfile": ("text/plain", text),
        "/x.Dockerfile.dockerignore": ("text/plain", b"file\n"),
        "/context.tar": ("application/x-tar", archives.tar([archives.Node("file", b"text of an archive")])),
    }
    with served(files) as url:
        for context, content in ((str(tmp_path), "text"), (f"{url}/context.tar", "text of an archive")):
            docker("build", "--file", f"{url}/x.Dockerfile", "-t", "built", context)
            assert docker("run", "--rm", "--network=none", "built").out == content
        failed = docker("build", "--file", f"{url}/none", str(tmp_path), status=1)
    assert f"{url}/none: Got HTTP status code >= 400: 404" in failed.err


def test_compose_builds(docker: Docker, project: Path) -> None:
    docker("compose", "up", "--build", cwd=project, WORD="secret")
    logs = docker("compose", "logs", "--no-log-prefix", cwd=project, WORD="secret").out
    words = sorted(logs.replace("\x1b[2K", "").split())  # 2.26 clears the line first
    assert words == ["composed", "secret"]
    docker("compose", "down", cwd=project, WORD="secret")

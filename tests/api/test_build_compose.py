"""compose 1.29 (Debian's docker-compose) builds the images of its services with the classic
builder.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.builds.building import image
from tests.support.engine.harness import TempEngine

PROJECT = """
version: "2.1"
services:
  web:
    build:
      context: web
      dockerfile: File
      args: {who: me}
    image: built:web
    network_mode: none
  job:
    build: job
    network_mode: none
    depends_on: [web]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "docker-compose.yml": PROJECT,
        "web/File": "FROM busybox\nARG who\nCOPY page /\nRUN echo built by $who > /by\nCMD cat /page /by\n",
        "web/page": "page\n",
        "job/Dockerfile": 'FROM built:web\nENTRYPOINT ["cat", "/by"]\nCMD []\n',
    }.items():
        path = tmp_path / "shop" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path / "shop"


@pytest.fixture(params=["0", "1"], ids=["docker-py", "docker-cli"])
def builds_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """compose builds with docker-py or, by default, with the docker CLI."""
    monkeypatch.setenv("COMPOSE_DOCKER_CLI_BUILD", request.param)
    return str(request.param)


def compose(engine: TempEngine, project: Path, *arguments: str, status: int = 0) -> str:
    """Runs docker-compose. Returns its output and its errors."""
    done = subprocess.run(
        ["docker-compose", "--no-ansi", *arguments],
        cwd=project,
        env=engine.environment | {"DOCKER_BUILDKIT": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert done.returncode == status, (arguments, done.stdout)
    return done.stdout


def test_build_up_and_rebuild(project: Path, builds_with: str, builder: TempEngine) -> None:
    out = compose(builder, project, "build")
    assert "Successfully built" in out and "Successfully tagged built:web" in out
    first = image(builder, "built:web")["Id"]
    assert image(builder, "shop_job")["Parent"]
    out = compose(builder, project, "up")
    assert "built by me" in out and "page" in out
    compose(builder, project, "build")
    assert image(builder, "built:web")["Id"] == first, "nothing has changed"
    (project / "web" / "page").write_text("another page\n")
    out = compose(builder, project, "up", "--build")
    assert "another page" in out
    assert image(builder, "built:web")["Id"] != first
    compose(builder, project, "down", "--rmi", "all")


def test_options(project: Path, builds_with: str, builder: TempEngine) -> None:
    out = compose(
        builder, project, "build", "--no-cache", "--force-rm", "--memory", "64m", "--build-arg", "who=you", "web"
    )
    assert "Using cache" not in out
    assert builder.docker("run", "--rm", "--network", "none", "built:web").out == "page\nbuilt by you\n"
    compose(builder, project, "build", "--quiet", "web")


def test_a_failure_is_the_service_s(project: Path, builds_with: str, builder: TempEngine) -> None:
    (project / "web" / "File").write_text("FROM busybox\nRUN echo said; exit 3\n")
    out = compose(builder, project, "build", "web", status=1)
    assert "Service 'web' failed to build" in out
    assert "returned a non-zero code: 3" in out

"""Testcontainers for Python and for Node.js, with a stand-in for the reaper's image, which is not
in any package registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import programs, reaper
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def engine_with_reaper(bare: TempEngine, clean: TempEngine) -> Iterator[TempEngine]:
    sent = bare.request("POST", "/images/load", reaper.archive(), {"Content-Type": "application/x-tar"})
    assert sent.status == 200 and b"error" not in sent.body, sent
    yield bare


def used(engine: TempEngine, *command: str) -> Any:
    """Runs a script of a user. Returns what it prints, after everything that it made is gone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DOCKER_", "TESTCONTAINERS_", "RYUK_"))
    }
    environment = kept | {
        "DOCKER_HOST": f"unix://{engine.socket}",
        "DOCKER_CONFIG": str(engine.base / "docker"),
        "RYUK_CONTAINER_IMAGE": reaper.NAME,
        "TESTCONTAINERS_DOCKER_SOCKET_OVERRIDE": engine.socket,
        "HOME": str(engine.base),
        "TMPDIR": str(engine.base),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120 * PATIENCE, check=False, cwd=engine.base
    )
    assert done.returncode == 0, (done.stdout, done.stderr, engine.containers())
    until("the reaper has removed everything", lambda: not engine.containers() and not engine.networks())
    return json.loads(done.stdout.splitlines()[-1])


def test_python(engine_with_reaper: TempEngine) -> None:
    seen = used(engine_with_reaper, sys.executable, str(SCRIPTS / "with_testcontainers.py"))
    assert seen["published"] == seen["by name"] == "served\n"
    assert seen["environment"] == "b\n" and "with_testcontainers.py" in seen["mounted"]
    assert seen["logs"] == "ready\n" and seen["built"] == 0
    assert "org.testcontainers.session-id" in seen["labels"]


def test_node(engine_with_reaper: TempEngine) -> None:
    seen = used(engine_with_reaper, *programs.node(engine_with_reaper, SCRIPTS / "with_testcontainers.mjs"))
    assert seen == {
        "published": "served\n",
        "by name": "served\n",
        "environment": "c\n/tmp\n7\n",
        "status": 3,
        "logs": "ready",
        "built": 64,
    }

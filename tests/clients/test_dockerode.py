"""dockerode: paths without a version, as it sends them by default, and with two versions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients import programs
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parent / "scripts" / "with_dockerode.mjs"


@pytest.mark.parametrize("version", ["", "v1.44", "v1.24"])
def test_a_life(bare: TempEngine, clean: TempEngine, version: str) -> None:
    done = subprocess.run(
        [*programs.node(bare, SCRIPT), version],
        env=os.environ | {"DOCKER_HOST": f"unix://{bare.socket}"},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "version": "1.55",
        "ping": "OK",
        "run": [3, "out\n", "err\n"],
        "address": True,
        "port": True,
        "exec": ["typed", "b\n", 0],
        "stats": "/long",
        "listed": [["/long"]],
        "archive": True,
        "waited": 0,
        "events": "0",
        "logs": True,
        "built": "Successfully tagged made-by-dockerode:1",
        "history": True,
        "missing": [404, "No such container: nothing"],
    }

"""The docker CLIs of the tests, with their compose and buildx, and the node that runs scripts.

`.ci/clients` unpacks those of Debian's suites and of npm; one docker is the host's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support import PATIENCE
from tests.support.engine.harness import Result, TempEngine
from tests.support.nightly import nightly

UNPACKED = Path(__file__).resolve().parent.parent.parent / ".venv" / "clients"


@dataclass(frozen=True)
class Program:
    """One docker CLI."""

    name: str
    path: str
    api: str
    """The newest version of the API that it knows."""
    plugins: str = ""
    """Folder of its compose and buildx; empty if it has none."""

    def environment(self, engine: TempEngine) -> dict[str, str]:
        """Only this engine, this program's plugins, and no version: it negotiates."""
        config = engine.base / f"docker-{self.name}"
        config.mkdir(exist_ok=True)
        plugins = config / "cli-plugins"
        if self.plugins and not plugins.exists():
            plugins.symlink_to(self.plugins)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        return kept | {"DOCKER_HOST": f"unix://{engine.socket}", "DOCKER_CONFIG": str(config)}

    def run(
        self,
        engine: TempEngine,
        *arguments: str,
        input: str | None = None,
        status: int | None = 0,
        cwd: Path | None = None,
        timeout: float = 60,
        **environment: str,
    ) -> Result:
        """Run it. Raises AssertionError unless it exits with `status` (None: any)."""
        done = subprocess.run(
            [self.path, *arguments],
            env=self.environment(engine) | environment,
            input=None if input is None else input.encode(),
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            cwd=cwd,
            timeout=timeout * PATIENCE,
            check=False,
        )
        result = Result(done.returncode, *(text.decode(errors="replace") for text in (done.stdout, done.stderr)))
        assert status is None or result.status == status, (self.name, arguments, result)
        return result

    def run_bytes(self, engine: TempEngine, *arguments: str, timeout: float = 60) -> bytes:
        """Run it and return its output. Raises CalledProcessError unless it exits with 0."""
        return subprocess.run(
            [self.path, *arguments],
            env=self.environment(engine),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=timeout * PATIENCE,
            check=True,
        ).stdout


def _unpacked(suite: str, api: str) -> Program:
    home = UNPACKED / suite
    plugins = home / "cli-plugins"
    return Program(suite, str(home / "bin" / "docker"), api, str(plugins) if suite != "bookworm" else "")


BOOKWORM = _unpacked("bookworm", "1.41")
TRIXIE = _unpacked("trixie", "1.45")
FORKY = _unpacked("forky", "1.51")
HOST = Program("host", shutil.which("docker") or "docker", "1.50")
PARAMETERS = [BOOKWORM, *nightly(TRIXIE, HOST), FORKY]
"""The oldest and the newest for each change, all of them each night."""


def node(engine: TempEngine, script: Path) -> tuple[str, str]:
    """The command that runs a script with the packages of npm.

    node looks for packages beside the script, so the folder of scripts is copied beside them.
    """
    beside = engine.base / "npm"
    if not beside.exists():
        beside.mkdir()
        (beside / "node_modules").symlink_to(UNPACKED / "npm" / "node_modules")
        shutil.copytree(script.parent, beside / "scripts")
    return str(UNPACKED / "npm" / "node_modules" / ".bin" / "node"), str(beside / "scripts" / script.name)

"""`docker build --check` and `--call`, and the warnings of a build, as buildx shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import programs
from tests.clients.conftest import Docker
from tests.support import PATIENCE, ROOT
from tests.support.builds import checks
from tests.support.engine.harness import TempEngine

TEXT = "FROM busybox AS Base\nENV a b\nCMD x\n"


@pytest.fixture
def buildx(clean: TempEngine) -> Docker:
    return Docker(programs.FORKY, clean)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text(TEXT)
    return tmp_path


def test_check(buildx: Docker, context: Path) -> None:
    checked = buildx("build", "--check", str(context), status=1)
    assert "Check complete, 3 warnings have been found!" in checked.out
    assert "WARNING: StageNameCasing - https://docs.docker.com/go/dockerfile/rule/stage-name-casing/" in checked.out
    assert "   2 | >>> ENV a b" in checked.out
    (context / "Dockerfile").write_text("FROM busybox\n")
    assert "no warnings found" in buildx("build", "--check", str(context)).out


def test_a_build_shows_its_warnings(buildx: Docker, context: Path) -> None:
    built = buildx("build", "--progress=plain", str(context))
    assert "3 warnings found" in built.err
    assert "LegacyKeyValueFormat:" in built.err
    (context / "Dockerfile").write_text(f"# check=error=true\n{TEXT}RUN touch /never\n")
    failed = buildx("build", "--progress=plain", str(context), status=1)
    assert "lint violation found for rules: StageNameCasing, LegacyKeyValueFormat, JSONArgsRecommended" in failed.err
    assert "RUN touch" not in failed.err


def test_calls(buildx: Docker, context: Path) -> None:
    assert "TARGET:" in buildx("build", "--call=outline", str(context)).out
    assert buildx("build", "--call=targets", str(context)).out.splitlines()[1].startswith("base (default)")
    assert "List all targets" in buildx("build", "--call=subrequests.describe", str(context)).out
    refused = buildx("build", "--call=nonsense", str(context), status=1)
    assert "unsupported request frontend.nonsense" in refused.err


@pytest.mark.nightly
def test_every_recorded_answer(clean: TempEngine) -> None:
    """Through buildx, with its exit status."""
    checks.prepare(clean.socket)
    assert list(checks.differences(clean.socket)) == []


@pytest.mark.nightly
def test_dockerd_answers_as_recorded() -> None:
    command = [sys.executable, "-m", "tests.support.builds.checks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600 * PATIENCE, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)


@pytest.mark.nightly
def test_dockerfiles_as_people_write_them() -> None:
    """engined and dockerd show the same, and make the same images."""
    command = [sys.executable, "-m", "tests.support.builds.dockerfiles"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200 * PATIENCE, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)

"""What several files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builds.project import Project
from tests.support.engine.harness import TempEngine


@pytest.fixture(scope="module")
def project_engine() -> Iterator[TempEngine]:
    """An engine for the projects of one file."""
    with TempEngine() as made:
        made.load_busybox()
        yield made


@pytest.fixture
def project(project_engine: TempEngine, tmp_path: Path) -> Project:
    """A directory that buildx builds."""
    return Project(project_engine, tmp_path / "project")

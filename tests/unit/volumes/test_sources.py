"""Parts of volumes and images, and what they are refused for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import EngineError, InvalidParameter, NotFound
from engine.system import files
from engine.volumes import sources


@pytest.mark.parametrize(
    ("subpath", "kind", "words"),
    [
        ("d", None, ""),
        ("link", None, ""),
        ("no", NotFound, "cannot access path v/no: no such file or directory"),
        ("d/f/x", NotFound, "cannot access path v/d/f/x: not a directory"),
        ("out", InvalidParameter, "v/out: path concatenation escapes the base directory"),
        ("..", InvalidParameter, "v/..: path concatenation escapes the base directory"),
    ],
)
def test_parts(tmp_path: Path, subpath: str, kind: type[EngineError] | None, words: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").touch()
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "out").symlink_to("/")
    top = files.open_directory(tmp_path)
    try:
        if kind is None:
            found = sources.open_below(top, "v", subpath)
            assert os.listdir(f"/proc/self/fd/{found}") == ["f"]
            os.close(found)
            return
        with pytest.raises(kind) as caught:
            sources.open_below(top, "v", subpath)
        assert caught.value.message == words
    finally:
        os.close(top)

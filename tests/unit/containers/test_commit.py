"""Packing a container's changes for a commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.containers import commit
from engine.errors import ServerError


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The archive's file has no name, so the message names the directory alone."""
    (tmp_path / "file").write_bytes(b"x")
    spool = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(ServerError) as raised:
            commit.pack_changes(tmp_path, spool)
    finally:
        os.close(spool)
    assert raised.value.message == f"packing the changes in {tmp_path}: no space left on device"

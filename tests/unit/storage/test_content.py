"""Blobs by digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from engine.errors import InvalidParameter, NotFound, ServerError
from engine.storage.content import Content

DATA = b"some content"
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


def test_ingest_read_delete(tmp_path: Path) -> None:
    content = Content(tmp_path)
    assert content.ingest(DATA, DIGEST) == content.ingest(DATA) == DIGEST
    assert content.digests() == {DIGEST} and content.read(DIGEST) == DATA
    descriptor = content.open(DIGEST)
    assert os.read(descriptor, 100) == DATA
    os.close(descriptor)
    content.delete(DIGEST)
    content.delete(DIGEST)
    for read in (content.read, content.open):
        with pytest.raises(NotFound):
            read(DIGEST)


def test_what_does_not_fit_its_digest(tmp_path: Path) -> None:
    content = Content(tmp_path)
    with pytest.raises(InvalidParameter, match="expected"):
        content.ingest(b"other", DIGEST)
    assert content.digests() == set()
    content.ingest(DATA)
    content.path(DIGEST).write_bytes(b"damaged")
    with pytest.raises(ServerError, match="damaged"):
        content.read(DIGEST)
    for name in ("sha256:../../etc/passwd", "md5:00", DIGEST.upper(), ""):
        with pytest.raises(InvalidParameter):
            content.path(name)


def test_leftovers_of_a_crash_are_swept(tmp_path: Path) -> None:
    content = Content(tmp_path)
    content.ingest(DATA)
    temporary = tmp_path / "tmp"
    (temporary / "half").write_text("x")
    (temporary / "tree" / "deep").mkdir(parents=True)
    before = os.open(temporary, os.O_RDONLY)  # while it is open, no other directory has its number
    (tmp_path / "content" / "sha256" / ".half.1234").write_text("x")
    assert Content(tmp_path).digests() == {DIGEST}
    assert os.path.samestat(os.fstat(before), temporary.stat()), "on a full disk it could not be made again"
    os.close(before)
    assert os.listdir(temporary) == [] and os.listdir(tmp_path / "content" / "sha256") == [DIGEST[7:]]


def test_temporary_files_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCKER_TMPDIR, as dockerd reads it. Other files in it stay."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other").touch()
    monkeypatch.setenv("DOCKER_TMPDIR", str(elsewhere))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = Content(tmp_path / "one"), Content(tmp_path / "two")
    assert one.temporary.parent == two.temporary.parent == elsewhere and one.temporary != two.temporary
    (one.temporary / "left by a crash").touch()
    assert not os.listdir(Content(tmp_path / "one").temporary) and (elsewhere / "other").exists()
    one.temporary.chmod(0o777)
    with pytest.raises(ServerError, match=r"DOCKER_TMPDIR: .* is not a directory of mode 0700"):
        Content(tmp_path / "one")

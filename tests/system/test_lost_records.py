"""A ROOT that lost its records, or has damaged ones: the start is refused, and containers, layers
and the bridge are not changed."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable

import pytest

from tests.support.engine.harness import TempEngine, alive, links

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def missing(engine: TempEngine) -> None:
    for path in engine.root.glob("state.db*"):
        path.unlink()


def empty(engine: TempEngine) -> None:
    missing(engine)
    (engine.root / "state.db").touch()


def damaged(engine: TempEngine) -> None:
    """Damage the image's record so that it still decodes."""
    with sqlite3.connect(engine.root / "state.db") as records:
        (value,) = records.execute("SELECT value FROM record WHERE kind = 'image'").fetchone()
        records.execute("UPDATE record SET value = ? WHERE kind = 'image'", (value.replace(b"busybox", b"busyboz"),))
    records.close()


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (missing, "is missing or empty, but"),
        (empty, "is missing or empty, but"),
        (damaged, "wrong checksum of image sha256:"),
    ],
)
def test_a_start_without_records_is_refused(
    own_engine: TempEngine, lose: Callable[[TempEngine], None], message: str
) -> None:
    engine = own_engine
    container = engine.started("sleep", "1000", network="bridge")
    pid = engine.inspect(container)["State"]["Pid"]
    engine.kill9()
    kept = engine.base / "kept"
    kept.mkdir()
    for path in engine.root.glob("state.db*"):
        shutil.copy2(path, kept)
    layers = sorted(os.listdir(engine.root / "layers"))
    lose(engine)
    with pytest.raises(AssertionError, match=f"(?s)engined ended at start:\\n.*{message}.*Nothing was changed"):
        engine.start()
    engine.process = None
    assert alive(pid), "the container was ended"
    assert engine.bridge in links(), "the bridge was removed"
    assert sorted(os.listdir(engine.root / "layers")) == layers
    missing(engine)
    for path in kept.iterdir():
        shutil.copy2(path, engine.root)
    engine.start()
    assert engine.inspect(container)["State"]["Pid"] == pid
    assert engine.request("GET", "/v1.24/images/busybox/json").status == 200


def test_stop_leaves_no_run_directory(own_engine: TempEngine) -> None:
    engine = own_engine
    engine.started("sleep", "1000", host={"IpcMode": ""})
    engine.stop()
    assert not engine.run.exists(), os.listdir(engine.run)
    engine.start()
    assert engine.request("GET", "/v1.24/containers/json?all=1").status == 200


def test_a_root_of_dockerd_is_refused() -> None:
    """Before anything in it is changed."""
    engine = TempEngine()
    try:
        for name in ("containers", "volumes", "image/overlay2"):
            (engine.root / name).mkdir(mode=0o701, parents=True)
        with pytest.raises(AssertionError, match=r"has data of dockerd \(image\), which this engine cannot use"):
            engine.start()
        engine.process = None
        assert sorted(os.listdir(engine.root)) == ["containers", "image", "volumes"]
        assert (engine.root / "volumes").stat().st_mode & 0o777 == 0o701
    finally:
        engine.close()


@pytest.mark.parametrize("made", [False, True])
def test_a_start_that_fails_leaves_no_root(made: bool) -> None:
    """Unless it had something in it before."""
    engine = TempEngine("--log-driver", "no-such-plugin")
    try:
        if made:
            engine.root.mkdir()
        with pytest.raises(AssertionError, match="no-such-plugin"):
            engine.start()
        engine.process = None
        assert engine.root.exists() is made
        assert not made or not os.listdir(engine.root)
        assert not engine.run.exists()
    finally:
        engine.close()

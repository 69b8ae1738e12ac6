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

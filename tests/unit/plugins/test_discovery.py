"""The paths where plugins are found, and the content of their files."""

import asyncio
import contextlib
import errno
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import NotFound, ServerError
from engine.plugins.client import Plugin
from engine.plugins.discovery import Discovery, Endpoint, endpoint, read_specification
from engine.plugins.registry import Plugins
from engine.system.directory_watch import DirectoryWatch
from tests.support.plugins.protocol import VolumePlugin


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:///run/p.sock", Endpoint(socket="/run/p.sock")),
        (" unix:///run/p.sock\n", Endpoint(socket="/run/p.sock")),
        ("tcp://localhost:8080", Endpoint(url="http://localhost:8080")),
        ("http://localhost:8080/base/", Endpoint(url="http://localhost:8080/base")),
        ("https://h:1", Endpoint(url="https://h:1")),
    ],
)
def test_addresses(address: str, expected: Endpoint) -> None:
    assert endpoint(address) == expected


@pytest.mark.parametrize("address", ["", "unix://relative", "ftp://x", "nonsense", "tcp://", "/a/path"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"path|address"):
        endpoint(address)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        found = endpoint(text)
    except ValueError:
        return
    assert found.socket.startswith("/") or found.url.startswith(("http://", "https://"))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.spec").write_text("tcp://localhost:1\n")
    (tmp_path / "b.json").write_text(
        '{"Name":"b","Addr":"https://h:2","TLSConfig":'
        '{"InsecureSkipVerify":true,"CAFile":"/ca","CertFile":"/c","KeyFile":"/k"}}'
    )
    assert read_specification(tmp_path / "a.spec") == Endpoint(url="http://localhost:1")
    expected = Endpoint(url="https://h:2", ca="/ca", certificate="/c", key="/k", insecure=True)
    assert read_specification(tmp_path / "b.json") == expected
    (tmp_path / "c.json").write_text('{"Name":"c"}')
    (tmp_path / "d.json").write_text('{"addr":"unix:///p.sock","tlsconfig":null}')
    assert read_specification(tmp_path / "d.json") == Endpoint(socket="/p.sock")
    (tmp_path / "e.json").write_text('{"Addr":')
    (tmp_path / "f.spec").write_text("nonsense")
    for name in ("c.json", "e.json", "f.spec"):
        with pytest.raises(ValueError, match=f"^{tmp_path / name}: "):
            read_specification(tmp_path / name)


def test_a_name_is_looked_for_in_order() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # short: sun_path has 108 bytes
        sockets, specifications = Path(made) / "s", Path(made) / "f"
        (sockets / "deep").mkdir(parents=True)
        specifications.mkdir()
        (specifications / "both.spec").write_text("tcp://localhost:1")
        (specifications / "file.spec").write_text("tcp://localhost:2")
        (specifications / "file.json").write_text('{"Addr":"tcp://localhost:3"}')
        for path in (sockets / "both.sock", sockets / "deep" / "deep.sock"):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        (sockets / "plain.sock").write_text("")
        (Path(made) / "outside.spec").write_text("tcp://localhost:4")
        plugins = Discovery([sockets], [specifications, Path(made) / "absent"])
        assert plugins.find("both") == Endpoint(socket=str(sockets / "both.sock"))
        assert plugins.find("deep") == Endpoint(socket=str(sockets / "deep" / "deep.sock"))
        assert plugins.find("file") == Endpoint(url="http://localhost:2")
        for absent in ("plain", "nobody", "../outside", "..", "", "a/b", "both\0", "n" * 251):
            assert plugins.find(absent) is None, absent
        assert plugins.names() == ["both", "deep", "file", "plain"]


def test_two_first_uses_activate_once() -> None:
    """A second activation would close the session that the first caller is using."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        fake = VolumePlugin(Path(made) / "volumes")
        fake.delays["Plugin.Activate"] = 0.05
        fake.listen(Path(made) / "p.sock")

        async def main() -> None:
            plugins = Plugins(Discovery([Path(made)], []), 5)
            both: list[Plugin] = await asyncio.gather(*(plugins.get("p", "VolumeDriver") for _ in range(2)))
            assert both[0] is both[1] and both[0].implements == {"volumedriver"}
            assert [method for method, _ in fake.calls] == ["Plugin.Activate"]
            assert plugins.active("VolumeDriver") == ["p"] and plugins.active("LogDriver") == []
            with pytest.raises(NotFound, match="does not implement the requested interface: LogDriver"):
                await plugins.get("p", "LogDriver")
            with pytest.raises(NotFound, match='plugin "q" not found'):
                await plugins.get("q", "VolumeDriver")
            fake.answers["Plugin.Activate"] = (500, b"broken")
            with pytest.raises(ServerError, match="broken"):
                await plugins.get("p", "LogDriver")
            await plugins.close()

        try:
            asyncio.run(main())
        finally:
            fake.close()


_PLACES = st.sampled_from(
    ["run", "run/plugins", "run/plugins/a", "run/plugins/a/a.sock", "run/plugins/b.sock", "etc/x.spec", "etc"]
)


@given(st.lists(st.tuples(st.sampled_from(["directory", "file", "remove", "away"]), _PLACES), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_known_names_are_never_stale(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]) -> None:
    top = tmp_path_factory.mktemp("plugins")
    found = Discovery((top / "run" / "plugins",), (top / "etc",))
    try:
        for number, (step, place) in enumerate(steps):
            with contextlib.suppress(OSError):
                path = top / place
                if step == "directory":
                    path.mkdir(parents=True)
                elif step == "file":
                    path.touch()
                elif step == "away":
                    path.rename(top / f"away{number}")
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            fresh = Discovery((top / "run" / "plugins",), (top / "etc",))
            assert found.known() in (None, fresh.names())
            fresh.close()
            found.names()
            assert found.known() == found.names()
    finally:
        found.close()


def test_known_names_are_looked_up_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Discovery((tmp_path,), ())
    assert found.known() is None
    assert found.names() == found.known() == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert found.known() is None
    found.close()


def test_directories_that_cannot_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(errno.EMFILE, "inotify_init1")

    monkeypatch.setattr(DirectoryWatch, "begin", full)
    found = Discovery((tmp_path,), ())
    (tmp_path / "a.sock").touch()
    assert found.names() == ["a"] and found.known() is None

"""Where plugins are found, and what their files may say."""

import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.volumes.plugin import Endpoint, Plugins, endpoint, read_specification


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
        '{"Name":"b","Addr":"https://h:2","TLSConfig":{"InsecureSkipVerify":true,"CAFile":"/ca","CertFile":"/c","KeyFile":"/k"}}'
    )
    assert read_specification(tmp_path / "a.spec") == Endpoint(url="http://localhost:1")
    expected = Endpoint(url="https://h:2", ca="/ca", certificate="/c", key="/k", insecure=True)
    assert read_specification(tmp_path / "b.json") == expected
    (tmp_path / "c.json").write_text('{"Name":"c"}')
    with pytest.raises(ValueError, match="Addr"):
        read_specification(tmp_path / "c.json")


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
        plugins = Plugins([sockets], [specifications, Path(made) / "absent"], 1)
        assert plugins._endpoint("both") == Endpoint(socket=str(sockets / "both.sock"))
        assert plugins._endpoint("deep") == Endpoint(socket=str(sockets / "deep" / "deep.sock"))
        assert plugins._endpoint("file") == Endpoint(url="http://localhost:2")
        for absent in ("plain", "nobody", "../outside", "..", "", "a/b", "both\0"):
            assert plugins._endpoint(absent) is None, absent
        assert plugins._names() == ["both", "deep", "file", "plain"]

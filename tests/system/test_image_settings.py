"""Settings of pulls, pushes and downloads of builds, each in dockerd's file: limits of transfers,
proxies. A real registry, behind a real proxy that knows its names."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import ROOT
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, Node, docker_archive, tar
from tests.support.images.proxy import Proxy
from tests.support.images.registry import Registry

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

DOWNLOADS, UPLOADS = 2, 1
LOGIN, IN_URL = "me:p@ss word", "me:p%40ss%20word"


class Place(NamedTuple):
    engine: TempEngine
    proxy: Proxy
    plain: Registry
    secure: Registry
    file: Path
    """The engine's configuration."""

    @property
    def name(self) -> str:
        """The plain registry, which only the proxy can reach by this name."""
        return f"plain.example:{self.plain.port}"

    def pull(self, name: str) -> list[dict[str, Any]]:
        repository, _, tag = name.rpartition(":")
        answer = self.engine.request("POST", f"/v1.44/images/create?fromImage={repository}&tag={tag}")
        return [json.loads(line) for line in answer.body.splitlines()]


def images(count: int) -> Image:
    return Image([tar([Node(f"file{number}", os.urandom(1000))]) for number in range(count)], [], {})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    file = tmp_path_factory.mktemp("settings") / "daemon.json"
    with Proxy(LOGIN) as proxy, Registry() as plain, Registry(tls=True) as secure:
        url = f"http://{IN_URL}@{proxy.host}"
        settings = {
            "proxies": {"http-proxy": url, "https-proxy": url, "no-proxy": "other.example,.direct.example"},
            "insecure-registries": ["plain.example", "secure.example", "direct.example"],
            "max-concurrent-downloads": DOWNLOADS,
            "max-concurrent-uploads": UPLOADS,
            "max-download-attempts": 2,
        }
        file.write_text(json.dumps(settings))
        with TempEngine("--config", str(file)) as engine:
            yield Place(engine, proxy, plain, secure, file)


def test_downloads_of_all_pulls_together_are_limited(place: Place) -> None:
    layers = [blob for name in ("one", "two") for blob in place.plain.put(name, "t", images(5)).blobs]
    place.proxy.slow, place.proxy.most = tuple(layers), 0  # configs are not limited, as in dockerd
    with ThreadPoolExecutor() as at_once:
        said = list(at_once.map(lambda name: place.pull(f"{place.name}/{name}:t"), ("one", "two")))
    assert all("Downloaded newer image" in each[-1]["status"] for each in said), said
    assert place.proxy.most == DOWNLOADS


def test_uploads_of_all_pushes_together_are_limited(place: Place) -> None:
    for name in ("three", "four"):
        image = Image(images(3).layers, [f"{place.name}/{name}:t"], {})
        place.engine.docker("load", input=docker_archive(image))
        place.plain.put_blob(name, image.configuration())  # configs are not limited, as in dockerd
    place.proxy.slow, place.proxy.most = ("PATCH",), 0
    with ThreadPoolExecutor() as at_once:
        list(at_once.map(lambda name: place.engine.docker("push", f"{place.name}/{name}:t"), ("three", "four")))
    assert place.proxy.most == UPLOADS
    for name in ("three", "four"):
        assert len(json.loads(place.plain.manifest(name, "t")[1])["layers"]) == 3


def test_a_reload_changes_the_limits(place: Place) -> None:
    settings = json.loads(place.file.read_text())
    place.file.write_text(json.dumps(settings | {"max-concurrent-downloads": 4}))
    reloaded = subprocess.run(
        [sys.executable, "-m", "engine", "reload", "--run", str(place.engine.run)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert reloaded.returncode == 0, reloaded
    place.proxy.slow, place.proxy.most = place.plain.put("six", "t", images(8)).blobs, 0
    said = place.pull(f"{place.name}/six:t")
    assert "Downloaded newer image" in said[-1]["status"], said
    assert place.proxy.most == 4


def test_tls_goes_through_a_tunnel(place: Place) -> None:
    place.secure.put("five", "t", images(1))
    said = place.pull(f"secure.example:{place.secure.port}/five:t")
    assert "Downloaded newer image" in said[-1]["status"], said
    assert place.proxy.requests(f"CONNECT secure.example:{place.secure.port} ")


@pytest.mark.parametrize("host", ["direct.example", "other.example"])
def test_excepted_hosts_are_asked_directly(place: Place, host: str) -> None:
    host = f"sub.{host}" if host == "direct.example" else host
    answer = place.engine.request("POST", f"/v1.44/images/create?fromImage={host}:5/x&tag=t")
    assert answer.status == 500 and b"dial tcp: lookup" in answer.body, answer
    assert not place.proxy.requests(host)


def test_files_and_contexts_of_builds(place: Place, tmp_path: Path) -> None:
    """ADD, a remote Dockerfile, and a redirect to an excepted host. RUN steps get no variables."""
    (tmp_path / "file").write_text("through the proxy")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever).start()
    try:
        url = f"http://files.example:{server.server_port}"
        place.engine.load_busybox()
        text = f"FROM busybox\nADD {url}/file /\nRUN cat /file; env"
        (tmp_path / "Dockerfile").write_text(text)
        said = place.engine.request("POST", f"/v1.44/build?remote={url}/Dockerfile&nocache=1", timeout=60).body.decode()
    finally:
        server.shutdown()
        server.server_close()
    assert "through the proxy" in said and "Successfully built" in said, said
    assert "proxy" not in said.lower().replace("through the proxy", "")
    assert len(place.proxy.requests(url)) >= 2


def test_passwords_are_shown_nowhere(place: Place) -> None:
    place.pull(f"{place.name}/missing:t")
    info = json.loads(place.engine.request("GET", "/v1.44/info").body)
    shown = f"http://xxxxx:xxxxx@{place.proxy.host}"
    assert (info["HttpProxy"], info["HttpsProxy"]) == (shown, shown)
    assert info["NoProxy"] == "other.example,.direct.example"
    log = place.engine.log()
    assert "p@ss" not in log and "p%40ss" not in log


def test_a_proxy_that_refuses_or_is_not_there(tmp_path: Path) -> None:
    """Variables in place of the file; the error names the proxy without its password."""
    with Proxy("other:login") as proxy:
        for host, words in ((proxy.host, "407"), ("127.0.0.1:1", "proxyconnect tcp: dial tcp 127.0.0.1:1")):
            within = ("env", f"https_proxy=http://me:secret@{host}", "HTTPS_PROXY=", "no_proxy=", "NO_PROXY=")
            with TempEngine(within=within) as engine:
                answer = engine.request("POST", "/v1.44/images/create?fromImage=r.example/x&tag=t")
                assert answer.status == 500 and words in answer.body.decode(), answer
                assert b"secret" not in answer.body and "secret" not in engine.log()

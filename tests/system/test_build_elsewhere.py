"""Images built here, saved, and loaded into the other engines of this host: their config and files
are the same there, and they run."""

from __future__ import annotations

import functools
import os

import pytest

from bench.engines import Dockerd, HostDockerd, Podman
from tests.support.builds.table import TAR, build, files
from tests.support.engine import client
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

TEXT = """\
FROM busybox AS one
RUN mkdir -p /app/d && echo hello > /app/d/f && chown -R 5:6 /app && ln -s d/f /app/l
FROM busybox
ENV who=world
WORKDIR /app
COPY --from=one /app /app
COPY --chown=7:8 --chmod=640 g /app/g
RUN rm /etc/group && echo more >> d/f && mkdir empty
VOLUME /data
USER 0:0
LABEL built=here
EXPOSE 80
ENTRYPOINT ["/bin/sh", "-c"]
CMD ["cat l g; echo $who; stat -c '%u:%g %a' d/f g; ls /etc; pwd"]
"""
SAYS = b"hello\nmore\nGworld\n5:6 644\n7:8 640\n"


def test_images_run_in_other_engines() -> None:
    """The engines that `make bench-peers` provides, as far as they are here."""
    with TempEngine() as engine:
        engine.load_busybox()
        assert build(engine.request, [Node("Dockerfile", TEXT.encode()), Node("g", b"G")], {"t": "elsewhere:1"}).image
        shown = engine.request("GET", "/v1.24/images/elsewhere:1/json").json()
        saved = engine.request("GET", "/v1.24/images/elsewhere:1/get").body
        container = engine.create(Image="elsewhere:1", Cmd=None)
        engine.post(f"/containers/{container}/start")
        assert engine.wait(container) == 0
        output = engine.logs(container)
        assert output.startswith(SAYS), output
    for kind in (Dockerd, HostDockerd, Podman):
        if kind.missing():
            continue
        peer = kind()
        try:
            peer.start()
            ask = functools.partial(client.request, peer.socket)
            loaded = ask("POST", "/v1.24/images/load?quiet=1", saved, TAR)
            assert loaded.status == 200 and b"error" not in loaded.body.lower(), (kind.name, loaded)
            there = ask("GET", "/v1.24/images/elsewhere:1/json").json()
            assert there["Id"].removeprefix("sha256:") == shown["Id"].removeprefix("sha256:"), kind.name
            assert there["RootFS"]["Layers"] == shown["RootFS"]["Layers"], kind.name
            for field in ("Env", "Cmd", "Entrypoint", "Labels", "WorkingDir", "Volumes", "User", "ExposedPorts"):
                assert there["Config"].get(field) == shown["Config"].get(field), (kind.name, field)
            body = {"Image": "elsewhere:1", "HostConfig": {"NetworkMode": "none"}}
            container = ask("POST", "/v1.24/containers/create", body).json()["Id"]
            assert ask("POST", f"/v1.24/containers/{container}/start").status == 204
            assert ask("POST", f"/v1.24/containers/{container}/wait").json()["StatusCode"] == 0
            logs = ask("GET", f"/v1.24/containers/{container}/logs?stdout=1")
            said = client.payload(logs.body)
            assert said.startswith(SAYS), (kind.name, said)
            if issubclass(kind, HostDockerd):
                again = ask("GET", "/v1.24/images/elsewhere:1/get")
                assert files(again.body) == files(saved)
        finally:
            peer.close()

"""A real registry for tests: Debian's docker-registry on a loopback port, with passwords or TLS as
the test asks.

Also a small client of the OCI distribution specification: put an image, read a manifest.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import shutil
import subprocess
import tempfile
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.system.tls import verifying_context
from tests.support import PATIENCE
from tests.support.engine.harness import free_ports, until
from tests.support.images.archives import Image, digest

PROGRAM = "docker-registry"
USER, PASSWORD = "someone", "secret"
_BCRYPT = "$2b$04$CNP9zY1g.d0VbsQmpfAt.eZVucbCm4FH/zm9dMx/OfgT/ScPXFSZq"
"""The bcrypt hash of `PASSWORD`."""

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Put:
    """An image as it was put into the registry."""

    manifest: bytes
    media_type: str
    blobs: tuple[str, ...]

    @property
    def digest(self) -> str:
        return digest(self.manifest)


class Registry:
    """One registry, from `start` to `close`."""

    def __init__(self, *, password: bool = False, tls: bool = False) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="reg", dir="/tmp"))
        self.password = password
        self.tls = tls
        (self.port,) = free_ports(1)
        self.host = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Registry:
        lines = [
            "version: 0.1",
            "log: {level: warn, accesslog: {disabled: false}}",
            "storage:",
            f"  filesystem: {{rootdirectory: {self.base}/data}}",
            "  delete: {enabled: true}",
            "http:",
            f"  addr: {self.host}",
        ]
        if self.tls:
            self._make_certificate()
            lines += ["  tls:", f"    certificate: {self.base}/server.crt", f"    key: {self.base}/server.key"]
        if self.password:
            (self.base / "htpasswd").write_text(f"{USER}:{_BCRYPT}\n")
            lines += ["auth:", "  htpasswd:", "    realm: test", f"    path: {self.base}/htpasswd"]
        (self.base / "config.yml").write_text("\n".join(lines) + "\n")
        with open(self.base / "log", "wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "serve", str(self.base / "config.yml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            try:
                return self.request("GET", "/v2/")[0] == 200
            except OSError:
                return False

        until("the registry answers", answers)
        return self

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.base)

    def __enter__(self) -> Registry:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self) -> str:
        """The registry's log, which lists every request."""
        return (self.base / "log").read_text(errors="replace")

    def requests(self, *words: str) -> list[str]:
        """Lines of its access log that contain all the words."""
        return [line for line in self.log().splitlines() if '" "' in line and all(word in line for word in words)]

    @property
    def auth(self) -> dict[str, str]:
        """The header with the credentials, which a client of an engine sends."""
        config = json.dumps({"username": USER, "password": PASSWORD, "serveraddress": self.host})
        return {"X-Registry-Auth": base64.urlsafe_b64encode(config.encode()).decode()}

    @property
    def authority(self) -> Path:
        """The certificate of the CA that has signed the registry's."""
        return self.base / "server.crt"

    def _make_certificate(self) -> None:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-keyout", str(self.base / "server.key"), "-out", str(self.base / "server.crt"), "-days", "2"),
                *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )

    # --- as a client ------------------------------------------------------------------------------

    def request(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        sent = dict(headers or {})
        if self.password:
            sent["Authorization"] = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        connection: http.client.HTTPConnection
        if self.tls:
            context = verifying_context(authority=str(self.authority))
            connection = http.client.HTTPSConnection(self.host, timeout=30 * PATIENCE, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, timeout=30 * PATIENCE)
        try:
            connection.request(method, target, body or None, sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def put_blob(self, repository: str, data: bytes) -> str:
        status, headers, _ = self.request("POST", f"/v2/{repository}/blobs/uploads/")
        assert status == 202, status
        location = urllib.parse.urlsplit(headers["location"])
        query = f"{location.query}&digest={urllib.parse.quote(digest(data))}".lstrip("&")
        status, _, body = self.request("PUT", f"{location.path}?{query}", data, {"Content-Length": str(len(data))})
        assert status == 201, body
        return digest(data)

    def put_manifest(self, repository: str, name: str, document: dict[str, Any], media_type: str) -> bytes:
        raw = json.dumps(document, indent=3).encode()
        status, _, body = self.request("PUT", f"/v2/{repository}/manifests/{name}", raw, {"Content-Type": media_type})
        assert status == 201, body
        return raw

    def put(
        self,
        repository: str,
        tag: str,
        image: Image,
        *,
        compress: Callable[[bytes], bytes] = lambda data: gzip.compress(data, 6, mtime=0),
        kind: str = "tar+gzip",
        media_type: str = OCI_MANIFEST,
        change: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> Put:
        """Put an image under a tag, or under its digest (`sha256:…`). `change` may damage the
        manifest first.
        """
        docker = media_type == DOCKER_MANIFEST
        config = image.configuration()
        self.put_blob(repository, config)
        layers = []
        for layer in image.layers:
            packed = compress(layer)
            layer_type = "application/vnd.docker.image.rootfs.diff.tar.gzip"
            layers.append(
                {
                    "mediaType": layer_type if docker else f"application/vnd.oci.image.layer.v1.{kind}",
                    "size": len(packed),
                    "digest": self.put_blob(repository, packed),
                }
            )
        config_type = "docker.container.image.v1" if docker else "oci.image.config.v1"
        document = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": {
                "mediaType": f"application/vnd.{config_type}+json",
                "size": len(config),
                "digest": digest(config),
            },
            "layers": layers,
        }
        change(document)
        if not tag:
            tag = digest(json.dumps(document, indent=3).encode())
        raw = self.put_manifest(repository, tag, document, media_type)
        return Put(raw, media_type, tuple(str(layer["digest"]) for layer in layers))

    def manifest(self, repository: str, name: str) -> tuple[str, bytes]:
        """Media type and bytes."""
        accept = ", ".join((DOCKER_MANIFEST, OCI_MANIFEST, OCI_INDEX))
        status, headers, body = self.request("GET", f"/v2/{repository}/manifests/{name}", headers={"Accept": accept})
        assert status == 200, body
        return headers["content-type"], body

"""The operator's certificates of registries, as dockerd reads /etc/docker/certs.d."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from yarl import URL

from engine.config import Config
from engine.errors import ServerError
from engine.images.registry.session import Registries
from tests.support.logs.receivers import certificate

HOST = "registry.example:5000"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / HOST
    place.mkdir()
    return place


def context(directory: Path, **config: tuple[str, ...]) -> ssl.SSLContext:
    async def work() -> ssl.SSLContext:
        registries = Registries(Config(registry_certificates=directory.parent, **config))
        return await registries.tls(URL(f"https://{HOST}"))

    return asyncio.run(work())


def test_a_ca_is_trusted_beside_those_of_the_host(directory: Path, tmp_path: Path) -> None:
    made, _ = certificate(tmp_path)
    (directory / "ca.crt").write_bytes(Path(made).read_bytes())
    found = context(directory)
    assert found.verify_mode is ssl.CERT_REQUIRED and found.check_hostname
    insecure = context(directory, insecure_registries=(HOST,))
    assert insecure.verify_mode is ssl.CERT_NONE and not insecure.check_hostname


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("client.cert", "missing key client.key for client certificate client.cert. CA certificates must use the "),
        ("client.key", "missing client certificate client.cert for key client.key"),
    ],
)
def test_half_a_pair_is_an_error(directory: Path, name: str, words: str) -> None:
    (directory / name).touch()
    with pytest.raises(ServerError, match=words):
        context(directory)


def test_other_files_mean_nothing(directory: Path) -> None:
    (directory / "README").touch()
    assert context(directory).verify_mode is ssl.CERT_REQUIRED

"""API 1.25: its rows at 1.25 and at 1.24."""

from __future__ import annotations

import msgspec
import pytest

from engine.api import parameters
from engine.api.versions import VERSIONS
from engine.errors import InvalidParameter
from engine.wire.containers import CreateBody
from tests.unit.api.versions.rows import INFO, MESSAGE, VERSION, VOLUME, check_new_field, reply


@pytest.mark.parametrize("path", ["CreatedAt", "Options"])
def test_new_fields_of_volumes(path: str) -> None:
    check_new_field(VOLUME, path, "1.25", "1.24")


@pytest.mark.parametrize("hostname", ["my_app", "a..b", "-x", "x.", "a" * 64, "a b"])
def test_names_of_hosts(hostname: str) -> None:
    """The document of 1.24 demands RFC 1123 names."""
    content = msgspec.json.encode({"hostname": hostname})
    for version in ("1.18", "1.24"):
        with pytest.raises(InvalidParameter, match="must be a valid RFC 1123 host name"):
            parameters.decode_json(content, CreateBody, VERSIONS[version].upgrade(CreateBody))
    for version in ("1.25", "1.55"):
        assert parameters.decode_json(content, CreateBody, VERSIONS[version].upgrade(CreateBody)).hostname == hostname
    for allowed in (b'{"Hostname":"web-1.example"}', b'{"Hostname":""}', b"{}"):
        parameters.decode_json(allowed, CreateBody, VERSIONS["1.24"].upgrade(CreateBody))


NEW_OF_INFO = (
    *(
        "CDISpecDirs",
        "CgroupVersion",
        "ContainerdCommit",
        "DefaultAddressPools",
        "GenericResources",
        "InitBinary",
        "InitCommit",
    ),
    *("OSVersion", "RuncCommit", "Warnings"),
)


@pytest.mark.parametrize("path", NEW_OF_INFO)
def test_new_fields_of_info(path: str) -> None:
    newer = reply(INFO, "1.25")
    assert path in newer and path not in reply(INFO, "1.24")


def test_security_options_have_names() -> None:
    assert reply(INFO, "1.25")["SecurityOptions"] == ["name=apparmor", "name=seccomp,profile=builtin"]
    assert reply(INFO, "1.24")["SecurityOptions"] == ["apparmor", "seccomp"]


def test_the_older_fields_of_clusters_go() -> None:
    gone = {"ClusterStore": "", "ClusterAdvertise": "", "SystemStatus": None}
    assert not gone.keys() & reply(INFO, "1.25").keys()
    assert reply(INFO, "1.24").items() >= gone.items()


@pytest.mark.parametrize("path", ["Platform", "Components"])
def test_new_fields_of_version(path: str) -> None:
    check_new_field(VERSION, path, "1.25", "1.24")


def test_events_have_a_scope() -> None:
    check_new_field(MESSAGE, "scope", "1.25", "1.24")

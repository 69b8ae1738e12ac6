"""Plugins: their rows, and the shape of 1.24."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.api.versions.rows import PLUGIN, check_new_field, reply


@pytest.mark.parametrize(
    ("path", "since", "before"),
    [
        ("PluginReference", "1.26", "1.25"),
        ("Config.IpcHost", "1.29", "1.28"),
        ("Config.PidHost", "1.29", "1.28"),
        ("Config.Interface.ProtocolScheme", "1.38", "1.37"),
        ("Settings", "1.25", "1.24"),
        ("Enabled", "1.25", "1.24"),
    ],
)
def test_new_fields(path: str, since: str, before: str) -> None:
    check_new_field(PLUGIN, path, since, before)


def test_1_24() -> None:
    newest = reply(PLUGIN, "1.55")
    settings, config = newest["Settings"], newest["Config"]
    assert reply(PLUGIN, "1.24") == {
        "Id": "c" * 64,
        "Name": "h.example:5000/vendor/p",
        "Tag": "v1",
        "Active": True,
        "Config": {name: settings[name] for name in ("Mounts", "Env", "Args", "Devices")},
        "Manifest": {
            "ManifestVersion": "v0",
            "Description": "a plugin",
            "Documentation": "",
            "Interface": {"Types": ["docker.volumedriver/1.0"], "Socket": "p.sock"},
            "Entrypoint": ["/p"],
            "Workdir": "/w",
            "User": {"UID": 0, "GID": 0},
            "Network": {"Type": ""},
            "Capabilities": ["CAP_SYS_ADMIN"],
            "Mounts": [],
            "Devices": config["Linux"]["Devices"],
            "Env": [],
            "Args": config["Args"],
        },
    }


def test_the_engine_that_made_it_is_absent_where_it_is_not_known() -> None:
    config = msgspec.structs.replace(PLUGIN.config, docker_version=msgspec.UNSET)
    without = msgspec.structs.replace(PLUGIN, config=config)
    for version in ("1.55", "1.25"):
        assert reply(PLUGIN, version)["Config"]["DockerVersion"] == "17.06"
        assert "DockerVersion" not in reply(without, version)["Config"]

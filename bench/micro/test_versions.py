"""Older shapes of replies: an inspect at every version, against the newest.

Budget: at most four times the newest. It is paid once after a change of a container, because
replies are kept encoded: the row `inspect-1` of `python -m bench.run --api VERSION` has the same
figure at every version.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.api.versions import NEWEST, VERSIONS
from engine.wire.containers import EndpointSettings
from tests.unit.api.versions.rows import INSPECT


def inspect() -> msgspec.Struct:
    """As large as those of a composed project: two networks, twenty variables and labels each."""
    config = msgspec.structs.replace(
        INSPECT.config,
        env=[f"VARIABLE_{number}=value of variable {number}" for number in range(20)],
        labels={f"com.example.label.{number}": f"value {number}" for number in range(20)},
    )
    endpoint = EndpointSettings(
        network_id="1" * 64,
        endpoint_id="2" * 64,
        gateway="172.18.0.1",
        ip_address="172.18.0.2",
        ip_prefix_len=16,
        mac_address="02:42:ac:12:00:02",
        aliases=["web", "c" * 12],
    )
    settings = msgspec.structs.replace(INSPECT.network_settings, networks={"front": endpoint, "back": endpoint})
    return msgspec.structs.replace(INSPECT, config=config, network_settings=settings)


@pytest.mark.parametrize("name", ["1.18", "1.24", "1.43", NEWEST])
def test_inspect(benchmark: Any, name: str) -> None:
    encode = VERSIONS[name].shape(type(INSPECT)).encode
    shown = json.loads(benchmark(encode, inspect()))
    assert shown["Config"]["Env"][0].startswith("VARIABLE_0=") and ("Volumes" in shown) is (name == "1.18")

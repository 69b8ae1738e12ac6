"""API 1.44: each row at 1.44 and at 1.43."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.api import parameters
from engine.api.versions import VERSIONS
from engine.errors import InvalidParameter
from engine.wire.containers import CreateBody


def create(version: str, **endpoints: dict[str, Any]) -> CreateBody:
    """The body that the domain gets from a client of this version."""
    body = msgspec.json.encode({"NetworkingConfig": {"EndpointsConfig": endpoints}})
    return parameters.decode_json(body, CreateBody, VERSIONS[version].upgrade(CreateBody))


def test_several_endpoints() -> None:
    assert set(create("1.44", a={}, b={}).networking_config.endpoints_config) == {"a", "b"}
    assert set(create("1.43", a={}).networking_config.endpoints_config) == {"a"}
    for version in ("1.43", "1.24"):
        with pytest.raises(InvalidParameter, match="cannot be connected to network endpoints: a, b"):
            create(version, a={}, b={})

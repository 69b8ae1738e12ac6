"""Cache keys: every part counts, and so does every field of the configuration."""

from __future__ import annotations

import msgspec
import pytest

from engine.builder.keys import base_key, key_of
from engine.wire.containers import Config, Healthcheck

PLAIN = Config(env=["A=1"], cmd=["sh"], labels={"a": "b"})

CHANGES = {
    "hostname": "h",
    "user": "u",
    "exposed_ports": {"80/tcp": {}},
    "env": ["A=2"],
    "cmd": ["ash"],
    "healthcheck": Healthcheck(test=["NONE"]),
    "volumes": {"/v": {}},
    "working_dir": "/w",
    "entrypoint": ["e"],
    "on_build": ["RUN x"],
    "labels": {"a": "c"},
    "stop_signal": "SIGINT",
    "shell": ["/bin/ash", "-c"],
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_the_configuration_counts(field: str) -> None:
    """Those that Docker's classic builder left out allowed a crafted image to pass as a step's
    result (CVE-2024-24557).
    """
    changed = msgspec.structs.replace(PLAIN, **{field: CHANGES[field]})
    assert key_of("p", "meta", "text", config=changed) != key_of("p", "meta", "text", config=PLAIN)


def test_parts_are_not_joined() -> None:
    assert key_of("p", "run", "ab", "c") != key_of("p", "run", "a", "bc")
    assert key_of("p", "run", ["a"], []) != key_of("p", "run", [], ["a"])
    assert key_of("p", "run", "a") != key_of("q", "run", "a")
    assert key_of("p", "run", "a") != key_of("p", "copy", "a")


def test_the_order_of_a_map_does_not_count() -> None:
    one = Config(labels={"a": "1", "b": "2"})
    other = Config(labels={"b": "2", "a": "1"})
    assert key_of("p", "meta", config=one) == key_of("p", "meta", config=other)


def test_a_base_is_known_by_its_id_alone() -> None:
    assert base_key("sha256:1") == base_key("sha256:1") != base_key("sha256:2")
    assert base_key("") != base_key("sha256:1")


def test_many_ports_are_a_part_of_the_key_in_any_order() -> None:
    ports = [f"{port}/tcp" for port in range(2000)]
    one, other = (Config(exposed_ports={key: {} for key in each}) for each in (ports, ports[::-1]))
    less = Config(exposed_ports={key: {} for key in ports[1:]})
    assert key_of("", "meta", config=one) == key_of("", "meta", config=other)
    assert len({key_of("", "meta", config=each) for each in (one, less, Config())}) == 3

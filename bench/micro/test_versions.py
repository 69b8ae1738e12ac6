"""Older shapes of replies: an inspect at every version, against the newest.

Run `python -m pytest bench/micro/test_versions.py -s`; prints one JSON object. Budget: at most four
times the newest. It is paid once after a change of a container, because replies are kept encoded:
the row `inspect-1` of `python -m bench.run --api VERSION` has the same figure at every version.
"""

from __future__ import annotations

import json
import platform
import time

import msgspec

from engine.api.versions import NEWEST, VERSIONS
from engine.wire.containers import EndpointSettings
from tests.unit.api.versions.rows import INSPECT

ROUNDS = 300
CALLS = 100


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


def test_inspect() -> None:
    found, kind = inspect(), type(INSPECT)
    best: dict[str, float] = {}
    for name, version in VERSIONS.items():
        encode = version.shape(kind).encode
        shown = json.loads(encode(found))
        assert shown["Config"]["Env"][0].startswith("VARIABLE_0=") and ("Volumes" in shown) is (
            name in ("1.18", "1.19")
        )
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for _ in range(CALLS):
                encode(found)
            best[name] = min(best.get(name, 1.0), (time.perf_counter() - begin) / CALLS)
    print(
        json.dumps(
            {
                "inspect_us": {name: round(each * 1e6, 2) for name, each in best.items()},
                "python": platform.python_version(),
            }
        )
    )
    # The budget and some noise of the host.
    assert max(best.values()) <= 6 * best[NEWEST], "7.5 times as much when each row edited a dict"

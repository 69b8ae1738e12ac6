"""What a node reports of itself."""

from __future__ import annotations

from engine import __version__
from engine.cluster.description import description
from engine.common.facts import Counts, Host
from engine.wire.nodes import DiscreteResource, EnginePlugin, GenericResource, NamedResource, Platform


def test_description() -> None:
    host = Host(name="h", machine="aarch64", cpus=3, memory=5)
    counts = Counts(
        log_drivers=("none", "json-file"),
        network_drivers=("bridge",),
        volume_drivers=("local",),
        authorization_plugins=("opa",),
        labels=("zone=a=b", "empty="),
    )
    made = description(host, counts, ["local", "flocker"], ["SSD=3", "GPU=UUID1", "GPU=UUID2"])
    assert made.hostname == "h" and made.platform == Platform("aarch64", "linux")
    assert made.resources.nano_cpus == 3_000_000_000 and made.resources.memory_bytes == 5
    assert made.resources.generic_resources == [
        GenericResource(discrete_resource_spec=DiscreteResource("SSD", 3)),
        GenericResource(named_resource_spec=NamedResource("GPU", "UUID1")),
        GenericResource(named_resource_spec=NamedResource("GPU", "UUID2")),
    ]
    assert made.engine.engine_version == __version__
    assert made.engine.labels == {"zone": "a=b", "empty": ""}
    assert made.engine.plugins == [
        EnginePlugin("Authorization", "opa"),
        EnginePlugin("Log", "json-file"),
        EnginePlugin("Log", "none"),
        EnginePlugin("Network", "bridge"),
        EnginePlugin("Volume", "flocker"),
        EnginePlugin("Volume", "local"),
    ]

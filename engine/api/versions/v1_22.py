"""What API 1.22 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, ignoring, without
from engine.api.versions.created import created_with
from engine.wire.containers import ContainerSummary, CreateBody
from engine.wire.events import Message
from engine.wire.networks import NetworkConnect, NetworkCreate, NetworkDisconnect
from engine.wire.system import Info

CHANGES = (
    *created_with(
        "1.22",
        "create takes Tmpfs, BlkioWeightDevice and per device rate limits, OomScoreAdj, ShmSize",
        "HostConfig.Tmpfs",
        "HostConfig.BlkioWeightDevice",
        "HostConfig.BlkioDeviceReadBps",
        "HostConfig.BlkioDeviceWriteBps",
        "HostConfig.BlkioDeviceReadIOps",
        "HostConfig.BlkioDeviceWriteIOps",
        "HostConfig.OomScoreAdj",
        "HostConfig.ShmSize",
    ),
    Change("1.22", "start and attach take detachKeys", flag=Flag.DETACH_KEYS),
    Change("1.22", "networks can be internal", of=NetworkCreate, upgrade=ignoring("Internal")),
    Change("1.22", "connect takes EndpointConfig", of=NetworkConnect, upgrade=ignoring("EndpointConfig")),
    Change("1.22", "disconnect takes Force", of=NetworkDisconnect, upgrade=ignoring("Force")),
    Change("1.22", "create takes NetworkingConfig", of=CreateBody, upgrade=ignoring("NetworkingConfig")),
    Change(
        "1.22",
        "the list shows HostConfig and NetworkSettings",
        of=ContainerSummary,
        downgrade=without("HostConfig", "NetworkSettings"),
    ),
    Change("1.22", "events have Type, Action and Actor", of=Message, downgrade=without("Type", "Action", "Actor")),
    Change("1.22", "info shows Architecture and OSType", of=Info, downgrade=without("Architecture", "OSType")),
)

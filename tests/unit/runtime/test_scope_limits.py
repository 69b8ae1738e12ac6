"""Limits of scopes: as properties, and told to a stand-in of systemd on a real bus. What systemd
itself does is in tests/system/test_scopes.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import NotFound, ServerError
from engine.runtime import scope_limits, scopes
from engine.runtime.cgroups import numbers
from engine.runtime.scope_limits import ScopeLimits
from engine.system.system_bus import SystemBus, Variant
from engine.wire import oci
from tests.support import PATIENCE
from tests.support.dbus.bus import Bus
from tests.support.dbus.systemd import Systemd

ID = "a1" * 32
UNIT = scopes.scope(ID)
NONE = (1 << 64) - 1

LIMITS = oci.Resources(
    memory=oci.Memory(limit=64 << 20, swap=80 << 20, reservation=1 << 20),
    cpu=oci.Cpu(shares=1024, quota=12_345, period=50_000, cpus="0-1,9", mems="0"),
    pids=oci.Pids(limit=50),
    block_io=oci.BlockIO(
        weight=1000,
        throttle_read_bps_device=[oci.ThrottleDevice(major=8, minor=16, rate=9)],
        throttle_write_iops_device=[oci.ThrottleDevice(major=8, minor=n, rate=n) for n in (1, 2)],
    ),
)
NUMBERS = {
    "TasksMax": 50,
    "MemoryMax": 64 << 20,
    "MemorySwapMax": 16 << 20,
    "MemoryLow": 1 << 20,
    "CPUWeight": 39,
    "CPUQuotaPerSecUSec": 250_000,
    "CPUQuotaPeriodUSec": 50_000,
    "IOWeight": 10_000,
}
LISTS = ("IOReadBandwidthMax", "IOWriteBandwidthMax", "IOReadIOPSMax", "IOWriteIOPSMax")
NO_LISTS: dict[str, Any] = {name: [] for name in LISTS}
WITHOUT = {**dict.fromkeys(NUMBERS, NONE), "MemoryLow": 0, "AllowedCPUs": b"", "AllowedMemoryNodes": b"", **NO_LISTS}


def test_limits_are_properties_of_the_scope() -> None:
    prefix = "org.systemd.property."
    found = {
        name.removeprefix(prefix): text
        for name, text in scope_limits.unit_annotations(LIMITS).items()
        if prefix in name
    }
    assert found == {
        "CollectMode": "'inactive-or-failed'",
        **{name: f"uint64 {number}" for name, number in NUMBERS.items()},
    }


def test_no_limit_is_said_too() -> None:
    assert f"uint64 {NONE}" == scope_limits.unit_annotations(oci.Resources())["org.systemd.property.TasksMax"]


def test_lists_are_emptied_before_their_entries() -> None:
    lists = [(name, value.value) for name, value in scope_limits.properties(LIMITS) if value.signature == "a(st)"]
    assert lists == [
        ("IOReadBandwidthMax", []),
        ("IOReadBandwidthMax", [["/dev/block/8:16", 9]]),
        ("IOWriteBandwidthMax", []),
        ("IOReadIOPSMax", []),
        ("IOWriteIOPSMax", []),
        ("IOWriteIOPSMax", [["/dev/block/8:1", 1], ["/dev/block/8:2", 2]]),
    ]


@given(st.sets(st.integers(0, 300)))
def test_members_of_a_cpuset_are_bits(members: set[int]) -> None:
    text = ",".join(map(str, sorted(members)))
    found = dict(scope_limits.properties(oci.Resources(cpu=oci.Cpu(cpus=text, mems=text))))
    assert found["AllowedCPUs"] == found["AllowedMemoryNodes"]
    # the inverse of systemd's cpu_set_from_dbus
    mask = found["AllowedCPUs"].value
    assert {index for index in range(len(mask) * 8) if mask[index // 8] >> index % 8 & 1} == numbers(text)
    assert not mask.endswith(b"\0")


def run(scenario: Any) -> None:
    """`scenario(limits, systemd)` with a bus, and a systemd that has the unit."""

    async def whole() -> None:
        systemd, bus = Systemd(UNIT), SystemBus()
        await systemd.connect()
        try:
            async with asyncio.timeout(40 * PATIENCE):
                await scenario(ScopeLimits(bus), systemd)
        finally:
            await bus.close()
            await systemd.leave()

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (
            LIMITS,
            {
                **NUMBERS,
                "AllowedCPUs": b"\x03\x02",
                "AllowedMemoryNodes": b"\x01",
                **NO_LISTS,
                "IOReadBandwidthMax": [("/dev/block/8:16", 9)],
                "IOWriteIOPSMax": [("/dev/block/8:1", 1), ("/dev/block/8:2", 2)],
            },
        ),
        (oci.Resources(), WITHOUT),
        (
            oci.Resources(cpu=oci.Cpu(quota=-1), pids=oci.Pids(limit=-1), memory=oci.Memory(limit=5, swap=-1)),
            {**WITHOUT, "MemoryMax": 5},
        ),
    ],
)
def test_a_change_says_all_limits(bus: Bus, resources: oci.Resources, said: dict[str, Any]) -> None:
    async def scenario(limits: ScopeLimits, systemd: Systemd) -> None:
        await limits.change(ID, LIMITS)
        await limits.change(ID, resources)
        assert systemd.units == {UNIT: said}

    run(scenario)


def test_a_scope_that_is_gone(bus: Bus) -> None:
    async def scenario(limits: ScopeLimits, systemd: Systemd) -> None:
        del systemd.units[UNIT]
        with pytest.raises(NotFound, match=rf"^unit {UNIT}: SetUnitProperties: Unit {UNIT} not found\.$"):
            await limits.change(ID, LIMITS)
        assert systemd.calls == 1

    run(scenario)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("Unheard", Variant("t", 1), r"Cannot set property Unheard, or unknown property\."),
        ("CPUQuotaPerSecUSec", Variant("t", 0), "CPUQuotaPerSecUSec= value out of range"),
        ("TasksMax", Variant("s", "50"), r"Invalid argument \(properties MemoryLow, TasksMax\)"),
    ],
)
def test_a_refused_property_changes_nothing(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, name: str, value: Variant, reason: str
) -> None:
    monkeypatch.setattr(scope_limits, "properties", lambda _: [("MemoryLow", Variant("t", 1)), (name, value)])

    async def scenario(limits: ScopeLimits, systemd: Systemd) -> None:
        with pytest.raises(ServerError, match=rf"^unit {UNIT}: SetUnitProperties: {reason}$"):
            await limits.change(ID, LIMITS)
        assert (systemd.units, systemd.calls) == ({UNIT: {}}, 1)

    run(scenario)


def test_a_change_waits_for_a_systemd_that_is_executed_again(bus: Bus) -> None:
    async def scenario(limits: ScopeLimits, systemd: Systemd) -> None:
        systemd.answers = False
        change = asyncio.ensure_future(limits.change(ID, LIMITS))
        await systemd.called.wait()
        await systemd.leave()
        systemd.answers = True
        await asyncio.sleep(3 * scope_limits.AGAIN)
        assert not change.done()
        await systemd.connect()
        await change
        assert systemd.units[UNIT]["TasksMax"] == 50

    run(scenario)


def test_a_change_waits_for_a_bus_that_is_restarted(bus: Bus) -> None:
    async def scenario(limits: ScopeLimits, systemd: Systemd) -> None:
        await limits.change(ID, oci.Resources())
        await asyncio.to_thread(bus.stop)
        change = asyncio.ensure_future(limits.change(ID, LIMITS))
        await asyncio.sleep(3 * scope_limits.AGAIN)
        assert not change.done()
        bus.start()
        await systemd.connect()
        await change
        assert systemd.units[UNIT]["TasksMax"] == 50

    run(scenario)


def test_a_systemd_that_hangs_or_stays_away(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope_limits, "LIMIT", 0.3)

    async def scenario(limits: ScopeLimits, systemd: Systemd) -> None:
        systemd.answers = False
        with pytest.raises(ServerError, match=rf"unit {UNIT}: .*systemd1 has not answered for 0\.3 s"):
            await limits.change(ID, LIMITS)
        await systemd.leave()
        with pytest.raises(ServerError, match=rf"unit {UNIT}: SetUnitProperties: .*systemd1"):
            await limits.change(ID, LIMITS)
        systemd.answers = True
        await systemd.connect()
        monkeypatch.undo()
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={bus.socket}")
        await limits.change(ID, LIMITS)
        assert systemd.units[UNIT]["TasksMax"] == 50

    run(scenario)

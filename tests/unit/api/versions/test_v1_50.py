"""API 1.50: its rows about the engine at 1.50 and at 1.49."""

from __future__ import annotations

from tests.unit.api.versions.rows import INFO, check_new_field


def test_discovered_devices() -> None:
    check_new_field(INFO, "DiscoveredDevices", "1.50", "1.49")

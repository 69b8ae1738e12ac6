"""What versions changed in exec, in streams and in stop."""

from __future__ import annotations

import pytest

from engine.api.versions import VERSIONS, Flag
from engine.wire.containers import CreateBody
from engine.wire.exec import ExecCreate, ExecStart
from tests.unit.api.versions.rows import check_new_parameter, request


@pytest.mark.parametrize("of", [ExecCreate, ExecStart])
def test_1_42_console_size(of: type) -> None:
    """Clients of 1.24 and older that send one are obeyed."""
    sizes = [request(of, version)["ConsoleSize"] for version in ("1.24", "1.25", "1.41", "1.42", "1.55")]
    assert sizes == [[24, 80], None, None, [24, 80], [24, 80]]


def test_1_25_start_of_an_exec_hijacks() -> None:
    assert [VERSIONS[name].has(Flag.EXEC_ALWAYS_HIJACKS) for name in ("1.24", "1.25")] == [False, True]


def test_1_42_media_types() -> None:
    assert [VERSIONS[name].has(Flag.STREAM_TYPES) for name in ("1.24", "1.41", "1.42")] == [False, False, True]


def test_1_42_stop_takes_a_signal() -> None:
    found = [VERSIONS[name].has(Flag.STOP_SIGNAL) for name in ("1.24", "1.25", "1.41", "1.42")]
    assert found == [True, False, False, True]


def test_1_44_start_interval() -> None:
    check_new_parameter(CreateBody, "Healthcheck.StartInterval", "1.44", "1.43")


def test_1_25_states_conflict() -> None:
    assert [VERSIONS[name].has(Flag.STATE_CONFLICTS) for name in ("1.24", "1.25")] == [False, True]

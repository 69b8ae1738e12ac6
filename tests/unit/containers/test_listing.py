"""Values of the list's filters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers.listing import PortRange, port_filter
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("80", (range(80, 81), "tcp")),
        ("80/", (range(80, 81), "tcp")),
        ("80/udp", (range(80, 81), "udp")),
        ("80/UDP", (range(80, 81), "udp")),
        ("80-82", (range(80, 83), "tcp")),
        ("7-7/sctp", (range(7, 8), "sctp")),
        ("65535", (range(65535, 65536), "tcp")),
    ],
)
def test_ports(value: str, expected: PortRange) -> None:
    assert port_filter("expose", [value]) == [expected]


@pytest.mark.parametrize(
    "value", ["", "a", "80:80", "1.1.1.1:80", "82-80", "80-", "-80", "65536", "8 0", "+1", "1-2-3", "٣"]
)
def test_ports_that_are_refused(value: str) -> None:
    with pytest.raises(InvalidParameter, match="publish"):
        port_filter("publish", [value])


@given(st.text("0123456789-/:tcp ", max_size=16))
def test_any_text_gives_ports_or_a_refusal(value: str) -> None:
    try:
        found = port_filter("publish", [value])
    except InvalidParameter:
        return
    assert found and all(0 <= min(ports) <= max(ports) <= 65535 and protocol for ports, protocol in found)

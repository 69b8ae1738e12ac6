"""Values of the list's filters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers.listing import port_filter
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("80", {(80, "tcp")}),
        ("80/", {(80, "tcp")}),
        ("80/udp", {(80, "udp")}),
        ("80/UDP", {(80, "udp")}),
        ("80-82", {(80, "tcp"), (81, "tcp"), (82, "tcp")}),
        ("7-7/sctp", {(7, "sctp")}),
        ("65535", {(65535, "tcp")}),
    ],
)
def test_ports(value: str, expected: set[tuple[int, str]]) -> None:
    assert port_filter("expose", [value]) == expected


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
    assert found and all(0 <= port <= 65535 and protocol for port, protocol in found)

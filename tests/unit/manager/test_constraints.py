"""Placement constraints: what is one, and which nodes pass."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.manager.constraints import Constraint, label_value, matches, parse, parse_all, spread_key
from engine.manager.records import NodeData, NodeRecord
from engine.swarm_session.states import NodeState, Role
from engine.wire.nodes import NodeDescription

RECORD = NodeRecord(created=0, updated=0, labels={"disk": "ssd", "Zone": "A"}, role=Role.MANAGER)
DATA = NodeData(
    description=msgspec.convert(
        {
            "Hostname": "Host-1",
            "Platform": {"OS": "linux", "Architecture": "x86_64"},
            "Engine": {"Labels": {"storage": "fast", "com.example/x": "1"}},
        },
        NodeDescription,
    ),
    state=NodeState.READY,
    address="10.77.0.5",
)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("node.id==abc1", True),
        ("node.id == ABC1", True),
        ("node.id!=abc1", False),
        ("node.id==abc", False),
        ("NODE.ID==abc1", True),
        ("node.hostname==host-1", True),
        ("node.hostname != other", True),
        ("node.role==manager", True),
        ("node.role==worker", False),
        ("node.role != worker", True),
        ("node.labels.disk==ssd", True),
        ("node.labels.disk==SSD", True),
        ("node.labels.Disk==ssd", False),
        ("Node.Labels.disk==ssd", True),
        ("node.labels.Zone!=b", True),
        ("node.labels.absent==x", False),
        ("node.labels.absent!=x", True),
        ("engine.labels.storage==fast", True),
        ("engine.labels.com.example/x==1", True),
        ("engine.labels.storage!=fast", False),
        ("node.platform.os==linux", True),
        ("node.platform.os==windows", False),
        ("node.platform.arch==x86_64", True),
        ("node.platform.arch==amd64", True),
        ("node.platform.arch!=arm64", True),
        ("node.ip==10.77.0.5", True),
        ("node.ip==10.77.0.0/24", True),
        ("node.ip!=10.77.0.0/24", False),
        ("node.ip==10.78.0.0/24", False),
        ("node.ip==nonsense", False),
        ("node.unknown==x", False),
        ("node.unknown!=x", False),
        ("other==x", False),
    ],
)
def test_one_constraint(text: str, passes: bool) -> None:
    assert matches(parse_all([text]), "abc1", RECORD, DATA) is passes


def test_all_must_pass() -> None:
    assert matches(parse_all(["node.role==manager", "node.labels.disk==ssd"]), "abc1", RECORD, DATA)
    assert not matches(parse_all(["node.role==manager", "node.labels.disk==hdd"]), "abc1", RECORD, DATA)
    assert matches((), "abc1", RECORD, None)


def test_a_node_that_never_came_has_no_facts() -> None:
    assert not matches(parse_all(["node.hostname==host-1"]), "abc1", RECORD, None)
    assert matches(parse_all(["engine.labels.storage!=fast"]), "abc1", RECORD, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node.id",
        "node.id=abc",
        "==abc",
        "node.id==",
        "node.id!=",
        "node id==x",
        "9node==x",
        "node.id==a&b",
        "a<=b",
        "==",
    ],
)
def test_what_is_no_constraint(text: str) -> None:
    with pytest.raises(InvalidParameter, match="constraint"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        (" node.id == a ", Constraint("node.id", True, "a")),
        ("node.labels.A!=b==c", Constraint("node.labels.A", False, "b==c")),
        ("node.labels.A==b!=c", None),
    ],
)
def test_the_first_operator_divides(text: str, constraint: Constraint | None) -> None:
    if constraint is None:
        with pytest.raises(InvalidParameter):
            parse(text)
    else:
        assert parse(text) == constraint


@given(st.text(max_size=60))
def test_any_text_is_a_constraint_or_refused(text: str) -> None:
    try:
        constraint = parse(text)
    except InvalidParameter:
        return
    assert constraint.key and constraint.value
    matches([constraint], "abc1", RECORD, DATA)


KEYS = st.sampled_from(
    ["node.id", "node.hostname", "node.role", "node.labels.x", "engine.labels.y", "node.platform.os"]
)


@given(KEYS, st.from_regex(r"\A[a-zA-Z0-9]{1,8}\Z"))
def test_equal_and_not_equal_are_opposite(key: str, value: str) -> None:
    equal, unequal = parse(f"{key}=={value}"), parse(f"{key} != {value}")
    assert matches([equal], "abc1", RECORD, DATA) is not matches([unequal], "abc1", RECORD, DATA)


def test_spread_keys() -> None:
    assert spread_key(" Node.Labels.Zone ") == "node.labels.Zone"
    assert label_value("node.labels.Zone", RECORD, DATA) == "A"
    assert label_value("engine.labels.none", RECORD, DATA) == ""
    assert label_value("node.id", RECORD, DATA) is None
    for text in ("", "zone", "node.id", "node.labels.", "engine.label.x"):
        with pytest.raises(InvalidParameter, match="spread preference"):
            spread_key(text)

"""The version table: its mechanism with an example table, and rules for all rows. `test_v1_*.py`
check each row.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest

from engine.api import parameters, replies, versions
from engine.api.versions import CHANGES, VERSIONS, Change, Shape, Table, Version, spoken, without
from engine.errors import InvalidParameter
from tests.unit.api.parts import request
from tests.unit.api.versions.rows import BODIES, REPLIES


class ToyState(msgspec.Struct, rename="pascal"):
    status: str
    error: str


class Toy(msgspec.Struct, rename="pascal"):
    name: str
    size: int
    state: ToyState


class ToyBody(msgspec.Struct, rename="pascal"):
    driver: str = ""


class Flag(enum.Enum):
    BARKS = "the toy barks"


def _driver_moves(shape: dict[str, Any]) -> None:
    if "OldDriver" in shape:
        shape["Driver"] = shape.pop("OldDriver")


def _older_driver(shape: dict[str, Any]) -> None:
    if "OldestDriver" in shape:
        shape["OldDriver"] = shape.pop("OldestDriver")


TOYS = (
    Change("1.24", "has a size, and a status in its state", of=Toy, downgrade=without("Size", "State.Status")),
    Change("1.22", "the title is called name", of=Toy, downgrade={"Name": None, "Title": lambda toy: toy.name}),
    Change("1.22", "the driver is called Driver", of=ToyBody, upgrade=_driver_moves),
    Change("1.21", "the driver is called OldDriver", of=ToyBody, upgrade=_older_driver),
    Change("1.20", "the caption is called title", of=Toy, downgrade={"Title": None, "Caption": lambda toy: toy.name}),
    Change("1.19", "the toy barks", flag=Flag.BARKS),  # type: ignore[arg-type]
)
TABLE = Table(TOYS)
TOY = Toy("bear", 5, ToyState("new", ""))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1.24", {"Name": "bear", "Size": 5, "State": {"Status": "new", "Error": ""}}),
        ("1.23", {"Name": "bear", "State": {"Error": ""}}),
        ("1.22", {"Name": "bear", "State": {"Error": ""}}),
        ("1.21", {"Title": "bear", "State": {"Error": ""}}),
        ("1.20", {"Title": "bear", "State": {"Error": ""}}),
        ("1.19", {"Caption": "bear", "State": {"Error": ""}}),
    ],
)
def test_downgrade(name: str, expected: dict[str, Any]) -> None:
    asked = request()
    asked.version = Version(name, TABLE)
    assert msgspec.json.decode(replies.encode(TOY, asked)) == expected
    assert msgspec.json.decode(replies.encode([TOY, TOY], asked, Toy)) == [expected, expected]
    assert replies.json_reply(asked, TOY).body.endswith(b"}\n")


def test_upgrade() -> None:
    for name, body in (("1.24", '{"Driver":"x"}'), ("1.21", '{"OldDriver":"x"}'), ("1.20", '{"OldestDriver":"x"}')):
        upgrade = Version(name, TABLE).upgrade(ToyBody)
        assert parameters.decode_json(body.encode(), ToyBody, upgrade).driver == "x"
    assert Version("1.22", TABLE).upgrade(ToyBody) is None


def test_flags() -> None:
    assert Version("1.19", TABLE).has(Flag.BARKS)  # type: ignore[arg-type]
    assert not Version("1.18", TABLE).has(Flag.BARKS)  # type: ignore[arg-type]


def test_versions_that_show_a_struct_alike_share_its_shape() -> None:
    """Encoded replies are kept by shape: 35 versions with three shapes are three entries, not
    35.
    """
    shapes = {name: Version(name, TABLE).shape(Toy) for name in VERSIONS}
    assert shapes["1.23"] is shapes["1.22"] and shapes["1.19"] is shapes["1.18"]
    assert shapes["1.20"] is shapes["1.21"]
    assert len(set(shapes.values())) == 4
    assert shapes["1.24"].newest and not shapes["1.23"].newest


def test_every_shape_of_every_struct_can_be_composed() -> None:
    for version in VERSIONS.values():
        for value in REPLIES:
            shape = version.shape(type(value))
            assert isinstance(msgspec.json.decode(shape.encode(value)), dict)
            assert msgspec.json.decode(shape.encode([value]))[0] == msgspec.json.decode(shape.encode(value))


def test_every_changed_struct_has_a_sample() -> None:
    changed = {change.of for change in CHANGES if change.downgrade is not None}
    assert changed == {type(value) for value in REPLIES}
    assert {change.of for change in CHANGES if change.upgrade is not None} == BODIES.keys()


class Deep(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True):
    title: str
    note: str = ""
    tags: list[str] = msgspec.field(default_factory=list)
    toys: list[Toy] = msgspec.field(default_factory=list)
    by_name: dict[str, Toy | None] = msgspec.field(default_factory=dict)
    best: Toy | None = None
    spare: Toy | msgspec.UnsetType = msgspec.UNSET


def test_shapes_reach_into_lists_maps_and_options() -> None:
    shape = Shape(Deep, without("Toys.Size", "ByName.State", "Best.Name", "Spare.Name"))
    whole = Deep(title="", toys=[TOY], by_name={"a": TOY, "b": None}, best=TOY, spare=TOY)
    state = {"Status": "new", "Error": ""}
    assert msgspec.json.decode(shape.encode(whole)) == {
        "Title": "",
        "Toys": [{"Name": "bear", "State": state}],
        "ByName": {"a": {"Name": "bear", "Size": 5}, "b": None},
        "Best": {"Size": 5, "State": state},
        "Spare": {"Size": 5, "State": state},
    }
    assert msgspec.json.decode(shape.encode(Deep(title=""))) == {"Title": ""}, "defaults are omitted as in the newest"


def test_an_object_that_is_gone_takes_its_fields_with_it() -> None:
    shape = Shape(Toy, {**without("State"), **without("State.Status")})
    assert msgspec.json.decode(shape.encode(TOY)) == {"Name": "bear", "Size": 5}
    shape = Shape(Toy, {**without("State.Status"), **without("State")})
    assert msgspec.json.decode(shape.encode(TOY)) == {"Name": "bear", "Size": 5}


@pytest.mark.parametrize(
    "fields",
    [
        {"Nothing.Inner": None},
        {"Title.Inner": None},
        {"Toys.Name": lambda whole: "an element cannot be computed from the whole"},
    ],
)
def test_paths_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Deep|Toy"):
        Shape(Deep, fields)


def test_a_change_says_what_it_changes() -> None:
    with pytest.raises(ValueError, match="goes with"):
        Change("1.20", "nothing", of=Toy)
    with pytest.raises(ValueError, match="goes with"):
        Change("1.20", "of nothing", downgrade=without("Name"))


def test_one_file_for_each_version() -> None:
    for change in CHANGES:
        assert change.since > versions.release(versions.MINIMUM)
    for module in versions._NEWEST_FIRST:
        name = module.__name__.rpartition(".v")[2].replace("_", ".")
        assert {change.since for change in module.CHANGES} == {versions.release(name)}


def test_the_table_is_newest_first_and_in_range() -> None:
    releases = [change.since for change in CHANGES]
    assert releases == sorted(releases, reverse=True)
    assert all(versions.release("1.18") < release < versions.release("1.57") for release in releases)


def test_a_version_that_is_not_served_changes_behaviour_alone() -> None:
    for change in CHANGES:
        assert change.flag is not None or change.since <= versions.release(versions.NEWEST)


@pytest.mark.parametrize("name", ["1.18", "1.19", "1.20", "1.21", "1.22", "1.23", "1.24"])
def test_spoken(name: str) -> None:
    assert spoken(name).name == name


def test_too_new_and_too_old() -> None:
    for name in ("1.25", "1.47", "2.0", "1.999"):
        with pytest.raises(InvalidParameter) as refused:
            spoken(name)
        assert refused.value.message == (
            f"client is newer than server (client API version: {name}, server API version: 1.24)"
        )
    for name in ("1.17", "1.0", "0.9"):
        with pytest.raises(InvalidParameter) as refused:
            spoken(name)
        assert refused.value.message == (
            f"client version {name} is too old. Minimum supported API version is 1.18, "
            "please upgrade your client to a newer version"
        )
    for name in ("", "1", "1.", ".1", "x.y", "1.2.3", "1.٣", "9" * 5000 + ".1"):
        with pytest.raises(InvalidParameter, match="invalid API version"):
            spoken(name)

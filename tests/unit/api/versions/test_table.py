"""The version table: its mechanism with an example table, and rules for all rows. `test_v1_*.py`
check each row.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from engine.api import parameters, replies, versions
from engine.api.versions import CHANGES, VERSIONS, Change, Shape, Table, Version, spoken, without
from engine.api.versions.shapes import structs_in
from engine.errors import InvalidParameter
from engine.wire.containers import CreateBody
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


BOX = (
    *TOYS,
    Change("1.23", "a box of toys has no count", of=Deep, downgrade={"Count": lambda box: len(box.toys)}),
    Change("1.21", "toys have no weight", of=Toy, downgrade={"Weight": lambda toy: toy.size * 10}),
)


def test_rows_of_a_struct_apply_wherever_it_occurs() -> None:
    table = Table(BOX)
    whole = Deep(title="t", toys=[TOY], by_name={"a": TOY, "b": None}, best=TOY)
    newest = {"Name": "bear", "Size": 5, "State": {"Status": "new", "Error": ""}}
    for name, toy, count in (
        ("1.24", newest, {}),
        ("1.23", {"Name": "bear", "State": {"Error": ""}}, {}),
        ("1.20", {"Title": "bear", "State": {"Error": ""}, "Weight": 50}, {"Count": 1}),
    ):
        asked = request()
        asked.version = Version(name, table)
        shown = {"Title": "t", "Toys": [toy], "ByName": {"a": toy, "b": None}, "Best": toy, **count}
        assert msgspec.json.decode(replies.encode(whole, asked)) == shown
    shapes = {name: Version(name, table).shape(Deep) for name in VERSIONS}
    assert shapes["1.24"] is shapes["1.55"] and shapes["1.22"] is not shapes["1.23"]


def test_an_outer_row_and_an_own_one_of_a_struct() -> None:
    fields = {"Best.Name": lambda whole: whole.title, "Best.State.Error": None}
    shape = Shape(Deep, fields, {Toy: {"Size": None, "Weight": lambda toy: toy.size * 10}})
    assert msgspec.json.decode(shape.encode(Deep(title="t", best=TOY))) == {
        "Title": "t",
        "Best": {"Name": "t", "State": {"Status": "new"}, "Weight": 50},
    }
    with pytest.raises(ValueError, match="cannot add fields"):
        Shape(Deep, {"Best.More": lambda whole: 1}, {Toy: {"Size": None}})


def test_fields_of_a_computed_object() -> None:
    shape = Shape(Deep, {"Best": lambda whole: whole.toys[0], "Best.Size": None})
    assert msgspec.json.decode(shape.encode(Deep(title="", toys=[TOY]))) == {
        "Title": "",
        "Toys": [msgspec.to_builtins(TOY)],
        "Best": {"Name": "bear", "State": {"Status": "new", "Error": ""}},
    }


def test_a_field_that_is_added_only_where_it_has_a_value() -> None:
    shape = Shape(Toy, {"Name": None, "State": None, "Note": lambda toy: toy.name if toy.size else msgspec.UNSET})
    assert shape.encode(TOY) == b'{"Size":5,"Note":"bear"}'
    assert shape.encode(Toy("bear", 0, ToyState("", ""))) == b'{"Size":0}'


@pytest.mark.parametrize("change", [each for each in CHANGES if each.flag], ids=lambda change: change.flag.name)
def test_behaviour_changes_with_its_version(change: Change) -> None:
    """Every flag at its version and just below it, and below the versions that are older."""
    assert change.flag is not None
    major, minor = change.since
    assert VERSIONS[f"{major}.{minor}"].has(change.flag) and VERSIONS[versions.NEWEST].has(change.flag)
    assert not VERSIONS[f"{major}.{minor - 1}"].has(change.flag)
    if change.down_to > (0, 0):
        lowest = change.down_to[1]
        assert not VERSIONS[f"{major}.{lowest}"].has(change.flag)
        assert VERSIONS[f"{major}.{lowest - 1}"].has(change.flag)
    assert change.words == change.flag.value


def test_every_flag_has_one_row() -> None:
    assert sorted(each.flag.name for each in CHANGES if each.flag) == sorted(versions.Flag.__members__)


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
        assert {change.since for change in module.CHANGES} <= {versions.release(name)}


def test_the_table_is_newest_first_and_in_range() -> None:
    releases = [change.since for change in CHANGES]
    assert releases == sorted(releases, reverse=True)
    assert all(versions.release("1.18") < release < versions.release("1.56") for release in releases)


@pytest.mark.parametrize("name", [f"1.{minor}" for minor in range(18, 56)])
def test_spoken(name: str) -> None:
    assert spoken(name).name == name


def test_too_new_and_too_old() -> None:
    for name in ("1.56", "1.100", "2.0", "1.999"):
        with pytest.raises(InvalidParameter) as refused:
            spoken(name)
        assert refused.value.message == (
            f"client version {name} is too new. Maximum supported API version is 1.55: "
            f"client is newer than server (client API version: {name}, server API version: 1.55), "
            "this engine serves 1.18 to 1.55"
        )
    for name in ("1.17", "1.0", "0.9"):
        with pytest.raises(InvalidParameter) as refused:
            spoken(name)
        assert refused.value.message == (
            f"client version {name} is too old. Minimum supported API version is 1.18, "
            "please upgrade your client to a newer version (this engine serves 1.18 to 1.55)"
        )
    for name in ("", "1", "1.", ".1", "x.y", "1.2.3", "1.٣", "9" * 5000 + ".1"):
        with pytest.raises(InvalidParameter, match="invalid API version"):
            spoken(name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def _places(body: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(body, dict):
        items = body.items()
    elif isinstance(body, list):
        items = enumerate(body)
    for key, value in items:
        yield from _places(value, (*place, key))


def _with(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.copy(body)
    changed[place[0]] = _with(body[place[0]], place[1:], value)
    return changed


@pytest.mark.parametrize("of", BODIES, ids=lambda of: of.__name__)
@given(data=st.data())
def test_bodies_of_wrong_types_are_refused_at_each_version(of: type, data: st.DataObject) -> None:
    """An upgrade of an older request meets bodies that nothing has checked yet."""
    place = data.draw(st.sampled_from([*_places(BODIES[of])]))
    changed = _with(BODIES[of], place, data.draw(JSON))
    if isinstance(changed, dict):
        changed = changed | data.draw(st.sampled_from([{}, {"(older)": "x"}, {"(OLDER)": 1}]))
    body = msgspec.json.encode(changed)
    for version in VERSIONS.values():
        with contextlib.suppress(InvalidParameter):
            parameters.decode_json(body, of, version.upgrade(of))


FIELDS = sorted({field.encode_name for kind in (CreateBody, *structs_in(CreateBody)) for field in fields(kind)})


@given(data=st.data())
def test_any_field_of_a_wrong_type_in_any_object_of_a_create(data: st.DataObject) -> None:
    body = {"HostConfig": {"NetworkMode": "n"}, "NetworkingConfig": {"EndpointsConfig": {"n": {}}}}
    place = data.draw(st.sampled_from([(), ("HostConfig",), ("NetworkingConfig", "EndpointsConfig", "n")]))
    given_fields = data.draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
    at: Any = body
    for name in place:
        at = at[name]
    at |= given_fields
    for version in VERSIONS.values():
        with contextlib.suppress(InvalidParameter):
            parameters.decode_json(msgspec.json.encode(body), CreateBody, version.upgrade(CreateBody))

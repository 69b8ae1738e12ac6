"""The version table: each row at its version and just before, and the mechanism on a toy."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest

from engine.api import parameters, replies, versions
from engine.api.versions import CHANGES, Change, Version, spoken, without
from engine.errors import InvalidParameter
from tests.unit.api.parts import request


class Toy(msgspec.Struct, rename="pascal"):
    name: str
    size: int
    state: dict[str, str]


class ToyBody(msgspec.Struct, rename="pascal"):
    driver: str = ""


class Flag(enum.Enum):
    BARKS = "the toy barks"


def _rename(shape: dict[str, Any]) -> None:
    shape["Title"] = shape.pop("Name")


def _title_to_caption(shape: dict[str, Any]) -> None:
    shape["Caption"] = shape.pop("Title")


def _driver_moves(shape: dict[str, Any]) -> None:
    if "OldDriver" in shape:
        shape["Driver"] = shape.pop("OldDriver")


def _older_driver(shape: dict[str, Any]) -> None:
    if "OldestDriver" in shape:
        shape["OldDriver"] = shape.pop("OldestDriver")


TOYS = (
    Change("1.24", "has a size, and a status in its state", of=Toy, down=without("Size", "State.Status", "No.Such")),
    Change("1.22", "the title is called name", of=Toy, down=_rename),
    Change("1.22", "the driver is called Driver", of=ToyBody, up=_driver_moves),
    Change("1.21", "the driver is called OldDriver", of=ToyBody, up=_older_driver),
    Change("1.20", "the caption is called title", of=Toy, down=_title_to_caption),
    Change("1.19", "the toy barks", flag=Flag.BARKS),  # type: ignore[arg-type]
)
TOY = Toy("bear", 5, {"Status": "new", "Error": ""})


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
def test_down(name: str, expected: dict[str, Any]) -> None:
    asked = request()
    asked.version = Version(name, TOYS)
    assert msgspec.json.decode(replies.encode(TOY, asked)) == expected
    assert msgspec.json.decode(replies.encode([TOY, TOY], asked, Toy)) == [expected, expected]
    assert replies.json_reply(asked, TOY).body.endswith(b"}\n")


def test_up() -> None:
    for name, body in (("1.24", '{"Driver":"x"}'), ("1.21", '{"olddriver":"x"}'), ("1.20", '{"OldestDriver":"x"}')):
        shape = body.replace("olddriver", "OldDriver").encode()
        assert parameters.decode_json(shape, ToyBody, Version(name, TOYS).ups(ToyBody)).driver == "x"


def test_flags() -> None:
    assert Version("1.19", TOYS).has(Flag.BARKS)  # type: ignore[arg-type]
    assert not Version("1.18", TOYS).has(Flag.BARKS)  # type: ignore[arg-type]


def test_newest_costs_nothing() -> None:
    assert Version("1.24", TOYS).downs(Toy) == []
    assert versions.LATEST.downs(Toy) == [] and versions.LATEST.ups(Toy) == []


def test_a_change_says_what_it_changes() -> None:
    with pytest.raises(ValueError, match="goes with"):
        Change("1.20", "nothing", of=Toy)
    with pytest.raises(ValueError, match="goes with"):
        Change("1.20", "of nothing", down=_rename)


def test_the_table_is_newest_first_and_in_range() -> None:
    releases = [change.since for change in CHANGES]
    assert releases == sorted(releases, reverse=True)
    assert all(versions.release("1.18") < release <= versions.release("1.24") for release in releases)


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

"""The build cache in BuildKit's terms."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit import usage
from engine.builder.buildkit.control_messages import DiskUsageResponse, PruneRequest
from engine.builder.prune import CACHE_MOUNT, CONTEXT, STEP, Entry
from engine.errors import InvalidParameter
from engine.rpc import protobuf

SHARED = Entry("abc1", "", STEP, "RUN make, install", 1, 1, 1, 1, False, True)
USED = Entry("abd2", "abc1", CONTEXT, "local source", 1, 1, 1, 1, True, False)
REST = Entry("bcd3", "", STEP, "", 1, 1, 1, 1, False, False)


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ((), "123"),
        (("",), "123"),
        (("id~=ab",), "12"),
        (("id~=ab,type==regular",), "1"),
        (("type!=regular",), "2"),
        (("id==abc1", "id==bcd3"), "13"),
        (("inuse",), "2"),
        (("inuse==false,private",), "3"),
        (("shared!=true",), "23"),
        (("mutable",), "2"),
        (("immutable",), "13"),
        (("parents==abc1",), "2"),
        (("parent",), "2"),
        (("description",), "12"),
        (('description=="RUN make, install"',), "1"),
        (("label==x",), ""),
        (("label!=x,shared",), "1"),
        (("nonsense",), ""),
        (("ID==abc1",), ""),
        (("inuse==maybe",), ""),
        (("inuse!=maybe",), "123"),
        (("shared~=true",), ""),
        (("id.of.it==abc1",), "1"),
        (("type~=^reg.*r$",), "13"),
    ],
)
def test_conditions(filters: tuple[str, ...], found: str) -> None:
    wanted = usage.condition(filters)
    assert "".join(entry.id[-1] for entry in (SHARED, USED, REST) if wanted(entry)) == found


@pytest.mark.parametrize(
    "text", ["==x", "type=x", "type===x", "type==", "id==a,", "id==a b==c", "id~=(a", "id==" + "x" * 5000]
)
def test_invalid_filters(text: str) -> None:
    with pytest.raises(InvalidParameter, match=r"failed to parse diskusage filters \[|the filters have more than"):
        usage.condition([text])


@pytest.mark.parametrize("filters", [["inuse"] * 17, [",".join(["id"] * 17)], ["id,id"] * 9])
def test_too_many_conditions(filters: list[str]) -> None:
    with pytest.raises(InvalidParameter, match="the filters have more than 16 conditions"):
        usage.condition(filters)
    assert usage.condition(["inuse"] * 8 + ["id~=x,shared"] * 4)(REST) is False


@pytest.mark.parametrize("filters", [["id~=" + "a" * 257], ["id~=" + "[" * 257], ["id~=/" + "a" * 128 + "/"] * 3])
def test_too_long_patterns(filters: list[str]) -> None:
    with pytest.raises(InvalidParameter, match="the patterns have more than 256 characters"):
        usage.condition(filters)
    assert usage.condition(["id~=" + "x" * 128] * 2 + ["id==" + "x" * 257])(REST) is False


def test_patterns_see_the_begin_of_a_description() -> None:
    """The whole may have a megabyte, and the GIL is kept while it is searched."""
    long = REST._replace(description="a" * usage.MATCHED + "b")
    assert usage.condition(["description~=a$"])(long) and not usage.condition(["description~=b"])(long)
    assert usage.condition([f"description=={long.description}"])(long)


@given(st.lists(st.text(max_size=30), max_size=4))
def test_any_text_is_a_condition_or_refused(filters: list[str]) -> None:
    try:
        wanted = usage.condition(filters)
    except InvalidParameter as error:
        assert "filter" in error.message
    else:
        assert wanted(SHARED) in (True, False)


def test_records() -> None:
    found = usage.record(USED)
    assert (found.mutable, found.in_use, found.parents, found.kind) == (True, True, ["abc1"], "source.local")
    assert usage.record(SHARED).parents == [] and not usage.record(SHARED).mutable
    assert usage.record(REST._replace(type=CACHE_MOUNT)).mutable


def test_prune_options() -> None:
    found = usage.prune_options(PruneRequest(filters=["type==regular,id~=bc"], all=True, reserved_space=7))
    assert found.condition is not None and [found.condition(entry) for entry in (SHARED, USED)] == [True, False]
    assert (found.all, found.reserved_space, found.unused_since_ns) == (True, 7, 0)
    aged = usage.prune_options(PruneRequest(keep_duration=3600 * 10**9)).unused_since_ns
    assert 3600 * 10**9 <= time.time_ns() - aged < 3700 * 10**9


def test_a_large_cache_is_one_message() -> None:
    def entry(number: int) -> Entry:
        return Entry(f"id{number}", "", "regular", "\U0001d11e" * 2000, 7, 1, 1, 1, False, False)

    found = usage.records([entry(number) for number in range(usage.RECORDS + 5)])
    assert len(protobuf.encode(DiskUsageResponse(records=found))) < 8 << 20
    assert len(found) == usage.RECORDS + 1 and sum(record.size for record in found) == 7 * (usage.RECORDS + 5)
    assert (found[0].id, found[0].description) == ("others", "5 entries that were used before the others")
    assert usage.records([entry(1)])[0].id == "id1" and usage.records([]) == []

"""Names, ids and unique prefixes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers.names import Names, checked_name
from engine.errors import Conflict, InvalidParameter, NotFound

ONE, TWO, THREE = "aa11" + "0" * 60, "aa22" + "0" * 60, "bb33" + "0" * 60


@pytest.fixture
def names() -> Names:
    names = Names()
    names.add(ONE, "web")
    names.add(TWO, "db")
    names.add(THREE, "aa1")
    return names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ONE, ONE),
        ("web", ONE),
        ("/web", ONE),
        ("aa2", TWO),
        ("bb", THREE),
        ("aa1", THREE),  # a name wins over a prefix
        ("/aa1", THREE),
        ("aa11", ONE),
    ],
)
def test_resolves_ids_names_and_unique_prefixes(names: Names, text: str, found: str) -> None:
    assert names.resolve(text) == found


def test_an_ambiguous_prefix_says_so(names: Names) -> None:
    with pytest.raises(InvalidParameter, match="multiple IDs found with provided prefix: aa"):
        names.resolve("aa")


@pytest.mark.parametrize("text", ["", "nope", "/", "aa3", "//web", ONE + "0"])
def test_unknown_ones_are_not_found(names: Names, text: str) -> None:
    with pytest.raises(NotFound, match="No such container: "):
        names.resolve(text)


def test_a_taken_name_is_a_conflict_that_names_the_holder(names: Names) -> None:
    with pytest.raises(Conflict) as raised:
        names.add("cc" * 32, "web")
    assert raised.value.message == (
        f'Conflict. The container name "/web" is already in use by container "{ONE}". '
        "You have to remove (or rename) that container to be able to reuse that name."
    )
    with pytest.raises(NotFound):
        names.resolve("cc" * 32)


def test_a_discarded_container_frees_its_name_and_id(names: Names) -> None:
    names.discard(ONE, "web")
    for text in (ONE, "web", "aa11"):
        with pytest.raises(NotFound):
            names.resolve(text)
    names.add("dd" * 32, "web")
    assert names.resolve("web") == "dd" * 32
    assert names.resolve("aa2") == TWO


def test_discarding_an_unknown_id_takes_no_other(names: Names) -> None:
    names.discard("aa12" + "0" * 60, "other")
    assert names.resolve("aa11") == ONE and names.resolve("aa22") == TWO


def test_random_names_are_free_even_when_many_are_taken() -> None:
    names = Names()
    for number in range(3000):
        names.add(f"{number:064x}", names.random())
    assert len({names.random() for _ in range(50)}) > 40


@pytest.mark.parametrize("name", ["web", "/web", "a", "a.b-c_d", "A9", "1"])
def test_names_of_the_pattern_are_taken(name: str) -> None:
    assert checked_name(name) == name.removeprefix("/")


@pytest.mark.parametrize(
    "name", ["", "/", "//a", "a/b", "a b", "a\n", "ä", "a:b", "a\0", "a,b", ".", "..", "_a", "-x", "/-x"]
)
def test_names_off_the_pattern_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match="Invalid container name"):
        checked_name(name)


@given(
    st.sets(st.text("0123456789abcdef", min_size=8, max_size=8), min_size=1, max_size=40),
    st.text("0123456789abcdef", max_size=8),
)
def test_prefixes_resolve_as_a_search_through_all_ids_would(ids: set[str], prefix: str) -> None:
    names = Names()
    for number, each in enumerate(sorted(ids)):
        names.add(each, f"name-{number}")
    matches = [each for each in ids if each.startswith(prefix)] if prefix else []
    if len(matches) == 1:
        assert names.resolve(prefix) == matches[0]
    else:
        with pytest.raises(InvalidParameter if matches else NotFound):
            names.resolve(prefix)

"""Resolution of names: separation of networks, aliases, links, rotation, reverse lookups."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from hypothesis import given
from hypothesis import strategies as st

from engine.networks.dns import messages as dns
from engine.networks.dns.names import Names, NameTable


def add(
    table: NameTable,
    container: str,
    network: str,
    addresses: str | Sequence[str],
    names: Sequence[str] = (),
    links: dict[str, str] | None = None,
) -> None:
    table.add(
        f"{container}@{network}",
        network_id=f"id of {network}",
        network=network,
        container_id=container,
        names=[container, *names],
        addresses=[ip_address(each) for each in ([addresses] if isinstance(addresses, str) else addresses)],
        links=links,
    )


def find(table: NameTable, container: str, name: str) -> list[str] | None:
    encoded = dns.encoded(name)
    assert encoded is not None
    found = table.find(container, encoded)
    return None if found is None else [str(ip_address(each)) for each in found]


def reverse(table: NameTable, container: str, address: str) -> str | None:
    name = table.reverse(container, ip_address(address).packed)
    return None if name is None else ".".join(label.decode() for label in dns._labels(name))


def two_networks() -> NameTable:
    table = NameTable()
    add(table, "web", "front", "10.1.0.2", ["www"])
    add(table, "app", "front", "10.1.0.3", ["both"])
    add(table, "app", "back", "10.2.0.3", ["both", "inner"])
    add(table, "db", "back", ["10.2.0.4", "fd00::4"], ["both"])
    return table


def test_only_the_names_of_own_networks() -> None:
    table = two_networks()
    assert find(table, "web", "app") == ["10.1.0.3"]
    assert find(table, "web", "APP") == ["10.1.0.3"]
    assert find(table, "web", "db") is None
    assert find(table, "web", "inner") is None
    assert find(table, "web", "web") == find(table, "web", "www") == ["10.1.0.2"]
    assert find(table, "db", "app") == ["10.2.0.3"]
    assert find(table, "app", "db") == ["10.2.0.4", "fd00::4"]
    assert find(table, "stranger", "web") is None


def test_the_network_joined_first_has_the_first_word() -> None:
    table = two_networks()
    assert find(table, "app", "app") == ["10.1.0.3"]
    assert find(table, "app", "both") == ["10.1.0.3"]
    assert find(table, "app", "inner") == ["10.2.0.3"]


def test_names_with_their_network() -> None:
    table = two_networks()
    assert find(table, "app", "app.back") == ["10.2.0.3"]
    assert find(table, "app", "app.front") == ["10.1.0.3"]
    assert find(table, "web", "app.back") is None
    assert find(table, "web", "back") is None
    assert find(table, "web", "front") is None


def test_names_and_networks_with_dots() -> None:
    table = NameTable()
    add(table, "a.b", "x.y", "10.0.0.2")
    assert find(table, "a.b", "a.b") == find(table, "a.b", "A.b.x.Y") == ["10.0.0.2"]
    assert find(table, "a.b", "b.x.y") is None


def test_turns() -> None:
    table = NameTable()
    for number in range(3):
        add(table, f"web{number}", "net", f"10.0.0.{number}", ["web"])
    seen = [find(table, "web0", "web") for _ in range(6)]
    assert {tuple(sorted(each or ())) for each in seen} == {("10.0.0.0", "10.0.0.1", "10.0.0.2")}
    assert sorted(each[0] for each in seen[:3] if each) == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    assert seen[:3] == seen[3:]


def test_links_are_their_owners() -> None:
    table = NameTable()
    add(table, "db", "net", "10.0.0.2", ["shared"])
    add(table, "app", "net", "10.0.0.3", links={"Database": "db", "shared": "app", "gone": "nobody", "": "db"})
    assert find(table, "app", "database") == find(table, "app", "database.net") == ["10.0.0.2"]
    assert find(table, "app", "shared") == ["10.0.0.3"]
    assert find(table, "app", "gone") is None
    assert find(table, "db", "database") is None
    assert find(table, "db", "shared") == ["10.0.0.2"]


def test_reverse() -> None:
    table = two_networks()
    assert reverse(table, "web", "10.1.0.3") == "app.front"
    assert reverse(table, "web", "10.2.0.3") is None
    assert reverse(table, "app", "fd00::4") == "db.back"
    assert reverse(table, "stranger", "10.1.0.3") is None


def test_reverse_of_the_longest_names() -> None:
    table = NameTable()
    longest = ".".join(["a" * 63] * 3)
    add(table, longest, "n" * 63, "10.0.0.2")
    assert reverse(table, longest, "10.0.0.2") == longest


def test_names_that_dns_cannot_carry() -> None:
    table = NameTable()
    add(table, "x" * 64, "n" * 70, "10.0.0.2", ["a..b", "", "ok", "ok"])
    assert find(table, "x" * 64, "ok") == ["10.0.0.2"]
    assert reverse(table, "x" * 64, "10.0.0.2") == "ok"


def test_removed_and_added_again() -> None:
    table = two_networks()
    table.remove("app@front")
    table.remove("app@front")
    assert find(table, "web", "app") is None
    assert find(table, "app", "web") is None
    assert find(table, "app", "both") is not None
    assert reverse(table, "web", "10.1.0.3") is None
    add(table, "app", "front", "10.1.0.9")
    assert find(table, "app", "app") == ["10.2.0.3"]  # joined later now
    assert reverse(table, "web", "10.1.0.3") is None


def test_a_change_keeps_the_place() -> None:
    table = two_networks()
    add(table, "app", "front", "10.1.0.3", ["renamed"])
    assert find(table, "app", "app") == ["10.1.0.3"]
    assert find(table, "web", "renamed") == ["10.1.0.3"]
    assert find(table, "web", "both") is None


def test_an_address_that_another_has_taken_over() -> None:
    table = NameTable()
    add(table, "old", "net", "10.0.0.2")
    add(table, "new", "net", "10.0.0.2")
    table.remove("old@net")
    assert reverse(table, "new", "10.0.0.2") == "new.net"


ENDPOINTS = st.tuples(st.integers(0, 4), st.integers(0, 2))


@given(st.lists(st.tuples(st.booleans(), ENDPOINTS), max_size=40))
def test_nothing_is_left_of_what_was_removed(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    """After any order of adds and removes, the lookups equal those of a plain list of endpoints."""
    table = NameTable()
    present: dict[tuple[int, int], None] = {}
    for adds, (container, network) in steps:
        if adds:
            add(table, f"c{container}", f"n{network}", f"10.{network}.0.{container}", [f"even{container % 2}"])
            present[container, network] = None
        else:
            table.remove(f"c{container}@n{network}")
            present.pop((container, network), None)
    assert len(table) == len(present)
    for asking in range(5):
        own = [network for container, network in present if container == asking]
        for wanted in range(5):
            first = next((each for each in own if (wanted, each) in present), None)
            expected = None if first is None else [f"10.{first}.0.{wanted}"]
            assert find(table, f"c{asking}", f"c{wanted}") == expected
    for key in tuple(present):
        table.remove(f"c{key[0]}@n{key[1]}")
    assert not (table._networks or table._containers or table._endpoints)


def test_addresses_of_both_families() -> None:
    table = NameTable()
    add(table, "six", "net", ["fd00::9"])
    assert table.find("six", b"\x03six") == (IPv6Address("fd00::9").packed,)
    assert IPv4Address("10.0.0.1").packed not in (table.find("six", b"\x03six") or ())


def put(table: NameTable, key: str, names: Sequence[str], *addresses: str, rotated: bool = False) -> None:
    table.put("id of net", "net", key, Names(tuple(names), tuple(map(IPv4Address, addresses)), rotated))


def test_names_of_services_are_seen_by_containers_of_the_network() -> None:
    table = NameTable()
    put(table, "s1", ["web", "www"], "10.0.1.2")
    add(table, "app", "net", "10.0.1.9")
    add(table, "stranger", "other", "10.0.2.9")
    assert find(table, "app", "web") == find(table, "app", "WWW.net") == ["10.0.1.2"]
    assert find(table, "stranger", "web") is None
    assert reverse(table, "app", "10.0.1.2") == "web.net"
    assert reverse(table, "stranger", "10.0.1.2") is None
    put(table, "s1", ["web"], "10.0.1.3")
    assert find(table, "app", "web") == ["10.0.1.3"]
    assert find(table, "app", "www") is None
    assert reverse(table, "app", "10.0.1.2") is None
    table.remove("app@net")
    table.take("id of net", "s1")
    table.take("id of net", "s1")
    table.remove("stranger@other")
    assert not (table._networks or table._containers or table._endpoints)


def test_rotated_names() -> None:
    table = NameTable()
    addresses = [f"10.0.1.{at}" for at in range(2, 6)]
    put(table, "tasks", ["tasks.web"], *addresses, rotated=True)
    put(table, "none", ["tasks.none"], rotated=True)
    add(table, "app", "net", "10.0.1.9")
    seen = [find(table, "app", "tasks.web") or [] for _ in range(8)]
    assert [each[0] for each in seen[:4]] == [each[0] for each in seen[4:]]
    assert {each[0] for each in seen} == set(addresses)
    assert all(sorted(each) == addresses for each in seen)
    assert find(table, "app", "tasks.none") == []
    assert reverse(table, "app", "10.0.1.2") is None


def test_the_other_kind_of_address_does_not_turn() -> None:
    table = NameTable()
    put(table, "tasks", ["web"], "10.0.1.2", "10.0.1.3", rotated=True)
    add(table, "app", "net", "10.0.1.9")
    firsts = []
    for _ in range(4):
        firsts.append((find(table, "app", "web") or [""])[0])
        table.find("app", b"\x03web", turn=False)
    assert firsts[:2] != firsts[1:3]
    assert set(firsts) == {"10.0.1.2", "10.0.1.3"}


def test_a_task_of_this_host_is_named_twice_and_found_once() -> None:
    table = NameTable()
    put(table, "task", ["web.1.abc"], "10.0.1.2")
    add(table, "web.1.abc", "net", "10.0.1.2", ["0123456789ab"])
    assert find(table, "web.1.abc", "web.1.abc") == ["10.0.1.2"]
    assert reverse(table, "web.1.abc", "10.0.1.2") == "web.1.abc.net"
    add(table, "app", "net", "10.0.1.9", ["web"])
    put(table, "s1", ["web"], "10.0.1.100")
    assert sorted(find(table, "app", "web") or ()) == ["10.0.1.100", "10.0.1.9"]
    table.remove("web.1.abc@net")
    assert find(table, "app", "web.1.abc") == ["10.0.1.2"]
    assert reverse(table, "app", "10.0.1.2") == "web.1.abc.net"
    table.take_all("id of net")
    assert find(table, "app", "web") == ["10.0.1.9"]

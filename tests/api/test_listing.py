"""The list of containers: sizes, names, all filters and some combinations, limits, and the text of
Status."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine.harness import TempEngine, free_ports, until
from tests.support.images.archives import busybox, docker_archive

MB = 1 << 20


def listed(engine: TempEngine, query: str = "all=1", **filters: list[str]) -> list[Any]:
    wanted = f"&filters={quote(json.dumps(filters))}" if filters else ""
    answer = engine.request("GET", f"/v1.24/containers/json?{query}{wanted}")
    assert answer.status == 200, answer
    return list(answer.json())


def names(engine: TempEngine, query: str = "all=1", **filters: list[str]) -> list[str]:
    return [entry["Names"][0].removeprefix("/") for entry in listed(engine, query, **filters)]


# --- size -----------------------------------------------------------------------------------------


def test_size_grows_with_what_is_written(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "dd if=/dev/zero of=/blob bs=1M count=5; echo ready; sleep 600")
    until("written", lambda: b"ready" in engine.logs(identifier))
    fresh = engine.create("true")
    [image] = engine.request("GET", "/v1.24/images/json").json()
    by_id = {entry["Id"]: entry for entry in listed(engine, "all=1&size=1")}
    assert 5 * MB <= by_id[identifier]["SizeRw"] < 5 * MB + 100_000
    assert by_id[identifier]["SizeRootFs"] == by_id[identifier]["SizeRw"] + image["Size"]
    assert by_id[fresh]["SizeRw"] < 100_000
    assert by_id[fresh]["SizeRootFs"] >= image["Size"]
    assert "SizeRw" not in listed(engine)[0]
    assert "SizeRw" not in listed(engine, "all=1&size=0")[0]

    shown = engine.request("GET", f"/v1.24/containers/{identifier}/json?size=1").json()
    assert shown["SizeRw"] == by_id[identifier]["SizeRw"]
    assert shown["SizeRootFs"] == by_id[identifier]["SizeRootFs"]
    assert "SizeRw" not in engine.inspect(identifier)
    assert "SizeRw" not in engine.request("GET", f"/v1.20/containers/{identifier}/json?size=1").json()
    assert "5.24MB (virtual " in engine.docker("ps", "-s", "--format", "{{.Size}}").line


# --- filters --------------------------------------------------------------------------------------


@pytest.fixture
def fleet(engine: TempEngine) -> TempEngine:
    """one: exited 0; two: exited 3; three: running; four: paused; five: created."""
    one = engine.started("true", name="one", Labels={"tier": "front", "x": ""})
    two = engine.started("sh", "-c", "exit 3", name="two", Labels={"tier": "back"})
    for identifier in (one, two):
        engine.wait(identifier)
        until("exited", lambda identifier=identifier: not engine.inspect(identifier)["State"]["Running"])
    engine.started("sleep", "600", name="three", Labels={"tier": "front"}, host={"Binds": ["stuff:/data"]})
    four = engine.started("sleep", "600", name="four", network="bridge")
    engine.post(f"/containers/{four}/pause")
    engine.create("sleep", "600", name="five", Labels={"tier": "back"})
    return engine


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"status": ["exited"]}, "two one"),
        ({"status": ["running"]}, "three"),
        ({"status": ["paused"]}, "four"),
        ({"status": ["created"]}, "five"),
        ({"status": ["created", "paused"]}, "five four"),
        ({"status": ["dead"]}, ""),
        ({"exited": ["3"]}, "two"),
        ({"exited": ["0", "3"]}, "two one"),
        ({"exited": ["7"]}, ""),
        ({"label": ["tier"]}, "five three two one"),
        ({"label": ["tier=front"]}, "three one"),
        ({"label": ["tier=front", "x"]}, "one"),
        ({"label": ["tier=front"], "status": ["exited"]}, "one"),
        ({"label": ["tier=back"], "exited": ["3"]}, "two"),
        ({"ancestor": ["busybox"]}, "five four three two one"),
        ({"ancestor": ["busybox:latest"], "status": ["running"]}, "three"),
        ({"ancestor": ["nothing"]}, ""),
        ({"before": ["three"]}, "two one"),
        ({"since": ["three"]}, "five four"),
        ({"since": ["one"], "before": ["five"]}, "four three two"),
        ({"since": ["one"], "before": ["five"], "label": ["tier=front"]}, "three"),
        ({"volume": ["stuff"]}, "three"),
        ({"volume": ["/data"]}, "three"),
        ({"volume": ["/other"]}, ""),
        ({"network": ["bridge"]}, "four"),
        ({"network": ["none"], "status": ["running"]}, "three"),
        ({"name": ["t"]}, "three two"),
        ({"name": ["^/one$"]}, "one"),
        ({"name": ["^o", "e$"]}, "five three one"),
        ({"name": ["^(one|t.o)$"]}, "two one"),
        ({"name": ["("]}, ""),
        ({"status": ["removing"]}, ""),
        ({"health": ["none"], "name": ["t"]}, "three two"),
        ({"health": ["healthy", "starting"]}, ""),
        ({"is-task": ["true"]}, ""),
        ({"is-task": ["0"], "name": ["t"]}, "three two"),
        ({"isolation": ["default"], "name": ["four"]}, "four"),
        ({"isolation": ["hyperv"]}, ""),
    ],
)
def test_filters(fleet: TempEngine, filters: dict[str, list[str]], expected: str) -> None:
    assert names(fleet, **filters) == expected.split()
    as_sets = {name: dict.fromkeys(values, True) for name, values in filters.items()}
    assert names(fleet, **as_sets) == expected.split()  # type: ignore[arg-type]


def test_ports(engine: TempEngine) -> None:
    """A container matches if one of its ports is published or exposed as one of the values says."""
    (free,) = free_ports(1)
    bound = {"PortBindings": {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(free)}]}}
    ports = {"80/tcp": {}, "9000/udp": {}}
    engine.started("sleep", "600", name="both", network="bridge", ExposedPorts=ports, host=bound)
    engine.started("sleep", "600", name="other", network="bridge", ExposedPorts={"81/tcp": {}})
    engine.create("sleep", "600", name="created", network="bridge", ExposedPorts={"80/tcp": {}})
    for filters, expected in (
        ({"publish": [str(free)]}, "both"),
        ({"publish": [f"{free}/tcp"]}, "both"),
        ({"publish": [f"{free}/udp"]}, ""),
        ({"publish": ["80"]}, ""),
        ({"expose": ["80"]}, "both"),
        ({"expose": ["80-81/tcp"]}, "other both"),
        ({"expose": ["9000/udp"]}, "both"),
        ({"expose": ["9000"]}, ""),
        ({"publish": ["1"], "expose": ["81"]}, "other"),
    ):
        assert names(engine, **filters) == expected.split(), filters


def test_health_and_annotations(engine: TempEngine) -> None:
    check = {"Test": ["CMD", "test", "-e", "/ready"], "Interval": 50_000_000, "Retries": 1}
    checked = engine.started("sleep", "600", Healthcheck=check)

    def shown(version: str = "") -> Any:
        (found,) = engine.request("GET", f"{version}/containers/json").json()
        return found

    until("it is unhealthy", lambda: shown()["Health"]["Status"] == "unhealthy")
    assert shown()["Health"]["FailingStreak"] >= 1
    assert "(unhealthy)" in shown()["Status"]
    assert "Health" not in shown("/v1.51")
    engine.touch(checked, "/ready")
    until("it is healthy", lambda: shown("/v1.52")["Health"] == {"Status": "healthy", "FailingStreak": 0})
    engine.remove_all()
    engine.started("sleep", "600", host={"Annotations": {"a": "b"}})
    assert shown()["Health"] == {"Status": "none", "FailingStreak": 0}
    assert shown("/v1.46")["HostConfig"]["Annotations"] == {"a": "b"}
    assert "Annotations" not in shown("/v1.45")["HostConfig"]


def test_without_all(fleet: TempEngine) -> None:
    assert names(fleet, "") == ["four", "three"]
    assert names(fleet, "", label=["tier"]) == ["three"]
    assert names(fleet, "", status=["exited"]) == ["two", "one"]
    assert names(fleet, "", exited=["3"]) == ["two"]


def test_limit_since_before(fleet: TempEngine) -> None:
    assert names(fleet, "limit=2") == ["five", "four"]
    assert names(fleet, "limit=-1") == ["four", "three"]
    assert names(fleet, "limit=0") == ["four", "three"]
    assert names(fleet, "limit=100") == ["five", "four", "three", "two", "one"]
    assert names(fleet, "since=three") == ["five", "four"]
    assert names(fleet, "before=three") == ["two", "one"]
    assert names(fleet, "before=five&since=one&limit=2") == ["four", "three"]
    assert names(fleet, "limit=1", label=["tier=front"]) == ["three"]
    identifier = fleet.inspect("three")["Id"]
    assert names(fleet, f"since={identifier[:12]}") == ["five", "four"]


def test_docker_ps(fleet: TempEngine) -> None:
    def ps(*arguments: str) -> list[str]:
        return fleet.docker("ps", "--format", "{{.Names}}", *arguments).out.split()

    assert ps() == ["four", "three"]
    assert ps("-a") == ["five", "four", "three", "two", "one"]
    assert ps("-l") == ["five"]
    assert ps("-n", "2") == ["five", "four"]
    assert ps("-a", "--filter", "status=exited", "--filter", "label=tier=back") == ["two"]
    assert ps("-a", "--filter", "since=two", "--filter", "before=five") == ["four", "three"]
    assert len(fleet.docker("ps", "-aq", "--no-trunc").out.split()) == 5


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ('filters={"status":["lost"]}', "status"),
        ('filters={"exited":["x"]}', "exited"),
        ('filters={"nonsense":["x"]}', "nonsense"),
        ("filters={", "filters"),
        ("limit=x", "limit"),
        ('filters={"health":["well"]}', "health"),
        ('filters={"is-task":["perhaps"]}', "is-task"),
        ('filters={"publish":["1.2.3.4:80"]}', "publish"),
        ('filters={"expose":["90-80"]}', "expose"),
    ],
)
def test_bad_queries(engine: TempEngine, query: str, words: str) -> None:
    answer = engine.request("GET", f"/v1.24/containers/json?{quote(query, safe='=&')}")
    assert answer.status == 400
    assert words in answer.message


# --- status, names --------------------------------------------------------------------------------


def test_words_of_status(fleet: TempEngine) -> None:
    texts = {entry["Names"][0]: entry["Status"] for entry in listed(fleet)}
    assert texts["/five"] == "Created"
    assert texts["/four"].startswith("Up ")
    assert texts["/four"].endswith(" (Paused)")
    assert texts["/three"].startswith("Up ")
    assert texts["/two"].startswith("Exited (3) ")
    assert texts["/two"].endswith(" ago")
    before = texts["/three"]
    until("time passes", lambda: listed(fleet, "", name=["three"])[0]["Status"] != before)


def test_names_that_links_give(engine: TempEngine) -> None:
    engine.started("sleep", "600", name="db", network="bridge")
    web = engine.started("sleep", "600", name="web", network="bridge", host={"Links": ["db:store", "db:cache"]})
    assert listed(engine, name=["db"])[0]["Names"] == ["/db", "/web/cache", "/web/store"]
    engine.post("/containers/web/rename?name=site")
    assert listed(engine, name=["db"])[0]["Names"] == ["/db", "/site/cache", "/site/store"]
    assert engine.docker("rm", "--link", "site/cache").line == "site/cache"
    assert listed(engine, name=["db"])[0]["Names"] == ["/db", "/site/store"]
    assert "cache" not in str(engine.inspect(web)["HostConfig"]["Links"])
    hosts = engine.docker("exec", "site", "cat", "/etc/hosts").out
    assert "store" in hosts
    assert "cache" not in hosts
    assert engine.request("DELETE", "/v1.24/containers/site/cache?link=1").status == 404
    assert engine.request("DELETE", "/v1.24/containers/site?link=1").status == 409
    assert engine.request("DELETE", "/v1.24/containers/nosuch?link=1").status == 404
    assert engine.request("GET", "/v1.24/containers/site/store/json").json()["Name"] == "/db"
    assert engine.request("GET", "/v1.24/containers/site/cache/json").status == 404
    assert engine.request("GET", "/v1.24/containers/nosuch/store/json").status == 404
    assert engine.inspect("site")["State"]["Running"]
    engine.request("DELETE", f"/v1.24/containers/{web}?force=1")
    assert listed(engine, name=["db"])[0]["Names"] == ["/db"]


@pytest.mark.own
def test_a_long_list_does_not_wait_for_one_that_is_stuck(engine: TempEngine) -> None:
    import threading

    stuck = engine.started("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done", name="stuck")
    until("ready", lambda: b"ready" in engine.logs(stuck))
    stopping = threading.Thread(target=lambda: engine.request("POST", f"/v1.24/containers/{stuck}/stop?t=-1"))
    stopping.start()
    made = [engine.create("true", name=f"many{number}") for number in range(120)]
    assert [entry["Id"] for entry in listed(engine, "all=1")] == [*reversed(made), stuck]
    assert [entry["Id"] for entry in listed(engine, "all=1&limit=1")] == made[-1:]
    engine.post("/containers/many60/rename?name=renamed")
    assert [entry["Names"] for entry in listed(engine, "all=1")][59:61] == [["/renamed"], ["/many59"]]
    for _ in range(20):
        assert len(listed(engine, "all=1&size=1")) == 121
    assert stopping.is_alive()
    engine.post(f"/containers/{stuck}/kill", 204)
    stopping.join()


# --- kept replies ---------------------------------------------------------------------------------


def test_a_kept_list_shows_every_change(engine: TempEngine) -> None:
    """A list is kept by its target. One with another target is made, and must be the same."""
    numbers = itertools.count()

    def check() -> None:
        for version in ("1.18", "1.24"):
            for query in ("", "all=1", "limit=2", "all=1&filters={%22label%22:[%22a%22]}"):
                for _ in range(2):
                    kept = engine.request("GET", f"/v{version}/containers/json?{query}").json()
                    made = engine.request("GET", f"/v{version}/containers/json?{query}&new={next(numbers)}").json()
                    assert [{**one, "Status": ""} for one in kept] == [{**one, "Status": ""} for one in made]

    check()
    child = engine.started("sleep", "100", name="kept", network="bridge", Labels={"a": "b"})
    check()
    assert listed(engine, "")[0]["Status"].startswith("Up ")
    parent = engine.create("true", name="parent", network="bridge", host={"Links": ["kept:alias"]})
    check()
    assert "/parent/alias" in listed(engine)[1]["Names"]
    engine.post(f"/containers/{child}/rename?name=renamed", 204)
    check()
    engine.post("/images/busybox/tag?repo=kept-list&tag=1", 201)
    other = engine.create("true", Image="kept-list:1")
    check()
    assert engine.request("DELETE", "/v1.24/images/kept-list:1?force=1").status == 200
    check()
    assert listed(engine)[0]["Image"].startswith("sha256:")
    engine.post(f"/containers/{child}/kill", 204)
    until("ended", lambda: not engine.inspect(child)["State"]["Running"])
    check()
    assert listed(engine, "") == []
    for container in (parent, other, child):
        assert engine.request("DELETE", f"/v1.24/containers/{container}").status == 204
        check()
    assert listed(engine) == []


def test_ports_of_an_image_that_are_no_ports(engine: TempEngine) -> None:
    """Its containers can be used and looked at, as all others."""
    image = dataclasses.replace(
        busybox(),
        names=("odd:latest",),
        config={"ExposedPorts": {"foo": {}, "0/tcp": {}, "70000/tcp": {}, "80/tcp": {}}},
    )
    sent = {"Content-Type": "application/x-tar"}
    assert engine.request("POST", "/v1.24/images/load?quiet=1", docker_archive(image), sent).status == 200
    server = engine.started(
        "sleep", "600", name="server", network="bridge", Image="odd:latest", host={"PublishAllPorts": True}
    )
    shown = engine.inspect(server)["NetworkSettings"]["Ports"]
    assert shown.keys() == {"0/tcp", "80/tcp"} and shown["0/tcp"] is None and shown["80/tcp"]
    [entry] = listed(engine)
    assert [(each["PrivatePort"], "PublicPort" in each) for each in entry["Ports"]] == [(0, False), (80, True)]
    client = engine.started("sh", "-c", "env; sleep 600", network="bridge", host={"Links": ["server:s"]})
    until("it has written", lambda: b"S_PORT_80_TCP_PORT=80\n" in engine.logs(client))

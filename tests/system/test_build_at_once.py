"""Builds at the same time: equal steps run once, independent stages side by side, and nothing that
one build does damages another."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.builds.table import Building, Built, build, cached
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def engine() -> Iterator[TempEngine]:
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


def dockerfile(text: str) -> list[Node]:
    return [Node("Dockerfile", text.encode())]


def all_at_once(works: list[Callable[[], Built]]) -> list[Built]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def test_equal_steps_run_once(engine: TempEngine) -> None:
    """Eight equal builds under names of their own: one random number."""
    text = 'FROM busybox\nENV once=1\nRUN sleep 0.3; head -c 16 /dev/urandom | od -An -tx1 | tee /x\nCMD ["x"]\n'
    found = all_at_once([lambda at=at: build(engine.request, dockerfile(text), {"t": f"once{at}"}) for at in range(8)])
    assert len({one.image for one in found}) == 1 and found[0].image, found
    numbers = {tuple(re.findall(r"(?: [0-9a-f]{2}){16}", one.text)) for one in found if 3 not in cached(one.text)}
    assert len(numbers) == 1, numbers
    for at in range(8):
        assert engine.request("GET", f"/v1.24/images/once{at}/json").json()["Id"].startswith(f"sha256:{found[0].image}")


def test_a_common_prefix_runs_once(engine: TempEngine) -> None:
    common = "FROM busybox\nENV prefix=1\nRUN sleep 0.3; head -c 16 /dev/urandom > /x\n"
    found = all_at_once(
        [
            lambda at=at: build(engine.request, dockerfile(f"{common}RUN cat /x > /y{at}\n"), {"t": f"prefix{at}"})
            for at in range(4)
        ]
    )
    assert len({one.image for one in found}) == 4
    histories = [engine.request("GET", f"/v1.24/images/prefix{at}/history").json() for at in range(4)]
    assert len({history[1]["Id"] for history in histories}) == 1, histories


def test_stages_meet(engine: TempEngine) -> None:
    """Stages that wait for each other, by files of a shared cache mount. One after the other they
    would wait without end.
    """
    count = 3
    stages = [
        f"FROM busybox AS stage{at}\nRUN --mount=type=cache,id=meeting,target=/m touch /m/{at}; "
        f'until [ "$(ls /m | wc -l)" = {count} ]; do sleep 0.02; done; echo {at} > /x\n'
        for at in range(count)
    ]
    copies = [f"COPY --from=stage{at} /x /x{at}\n" for at in range(count)]
    found = build(engine.request, dockerfile("".join([*stages, "FROM busybox\n", *copies, "RUN cat /x*\n"])))
    assert found.image and re.search(r"^0\n1\n2\n", found.text, re.MULTILINE), found
    steps = [int(number) for number in re.findall(r"^Step (\d+)", found.text, re.MULTILINE)]
    assert steps == sorted(steps), "the output is in the file's order"


def test_one_of_two_equal_builds_leaves(engine: TempEngine) -> None:
    """The step that both wait for goes on for the other."""
    text = "FROM busybox\nENV leaves=1\nRUN echo begun; until [ -e /go ]; do sleep 0.02; done; echo 1 > /x\n"
    leaving = Building(engine.socket, dockerfile(text))
    leaving.said("begun")
    staying = Building(engine.socket, dockerfile(text), {"t": "staying"})
    staying.said("begun")
    leaving.close()
    (container,) = engine.containers()
    engine.touch(container, "/go")
    assert "Successfully built" in staying.rest()
    assert engine.request("GET", "/v1.24/images/staying/json").status == 200


def test_a_failing_stage_ends_the_others(engine: TempEngine) -> None:
    """The first failure is reported, and no container of the others is left."""
    before = engine.footprint()
    text = (
        "FROM busybox AS one\nRUN sleep 1000\nFROM busybox AS two\nRUN exit 9\n"
        "FROM busybox\nCOPY --from=one / /a\nCOPY --from=two / /b\n"
    )
    found = build(engine.request, dockerfile(text))
    assert found.code == 9 and "returned a non-zero code: 9" in found.error, found
    until("the other stage has ended", lambda: len(engine.containers()) <= 1)
    engine.remove_all()
    engine.assert_settles(before)


def test_containers_show_while_they_run(engine: TempEngine) -> None:
    """In list, inspect, logs, exec, stats and events, and not afterwards."""
    building = Building(
        engine.socket, dockerfile("FROM busybox\nRUN echo shown; until [ -e /go ]; do sleep 0.02; done\n")
    )
    building.said("shown")
    (shown,) = engine.request("GET", "/v1.24/containers/json").json()
    assert shown["State"] == "running" and "until" in shown["Command"], shown
    container = shown["Id"]
    assert engine.inspect(container)["State"]["Running"]
    assert engine.docker("exec", container, "cat", "/proc/1/cmdline").out.startswith("/bin/sh")
    assert engine.docker("logs", container).out == "shown\n"
    assert engine.docker("top", container).out.count("\n") >= 2
    engine.touch(container, "/go")
    assert "Successfully built" in building.rest()
    assert engine.containers() == []
    events = engine.request("GET", f"/v1.24/events?since=0&until={time.time()}").body.splitlines()
    seen = [event["Action"] for event in map(json.loads, events) if event.get("Actor", {}).get("ID") == container]
    assert [action for action in seen if not action.startswith("exec")] == [
        *("create", "attach", "start"),
        *(action for action in seen if action == "top"),
        *("die", "destroy"),
    ], seen


def test_a_container_of_a_build_can_be_killed(engine: TempEngine) -> None:
    building = Building(engine.socket, dockerfile("FROM busybox\nRUN echo here; sleep 1000\n"), {"forcerm": "1"})
    building.said("here")
    (container,) = engine.containers()
    engine.post(f"/containers/{container}/kill")
    assert "returned a non-zero code: 137" in building.rest()
    assert engine.containers() == []


def test_many_of_everything(engine: TempEngine) -> None:
    """Builds, prunes and deletions at random. Each build ends with the file that it wrote, or an
    error of an image that was deleted meanwhile; afterwards everything can be built.
    """
    seed = random.randrange(1 << 30)
    wrong: list[str] = []

    def client(number: int) -> None:
        chance = random.Random(seed + number)
        for turn in range(6):
            value = chance.randrange(3)
            text = f"FROM busybox\nENV many={value}\nCOPY f /f\nRUN cat /f > /x{value}\nLABEL l={number}\n"
            nodes = [*dockerfile(text), Node("f", b"%d" % value)]
            match chance.randrange(6):
                case 0:
                    answer = engine.request("POST", "/v1.24/build/prune?all=1")
                    if answer.status != 200:
                        wrong.append(f"prune {answer}")
                case 1:
                    engine.request("DELETE", f"/v1.24/images/many{value}?force=1")
                case _:
                    found = build(engine.request, nodes, {"t": f"many{value}"})
                    if not found.image:
                        wrong.append(f"{turn} {found}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, (seed, wrong)
    for value in range(3):
        text = f"FROM busybox\nENV many={value}\nCOPY f /f\nRUN cat /f > /x{value}\n"
        assert build(engine.request, [*dockerfile(text), Node("f", b"%d" % value)], {"t": "checked"}).image
        container = engine.create("cat", f"/x{value}", Image="checked")
        engine.post(f"/containers/{container}/start")
        assert engine.wait(container) == 0 and engine.logs(container) == b"%d" % value
        engine.request("DELETE", f"/v1.24/containers/{container}")

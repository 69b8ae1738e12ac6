"""Two hundred containers, sixteen at a time: all of them work, and nothing of them is left."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.engine import client
from tests.support.engine.harness import BREATH, TempEngine, until

COUNT = 200
AT_ONCE = 16


@pytest.mark.nightly
@pytest.mark.own
def test_200_by_the_docker_cli_leave_nothing_behind(engine: TempEngine) -> None:
    before = engine.footprint()
    descriptors = engine.descriptors()

    def run(number: int) -> str:
        identifier = engine.docker(
            "run", "-d", "--name", f"many-{number}", "busybox", "sh", "-c", f"echo {number}; exec sleep 600"
        ).line
        until("it has printed", lambda: engine.logs(identifier) == b"%d\n" % number)
        return identifier

    with ThreadPoolExecutor(AT_ONCE) as pool:
        identifiers = list(pool.map(run, range(COUNT)))
    assert len(set(identifiers)) == COUNT
    shown = [engine.inspect(identifier) for identifier in identifiers]
    assert all(one["State"]["Running"] for one in shown)
    assert len({one["NetworkSettings"]["IPAddress"] for one in shown}) == COUNT
    assert engine.docker("ps", "-q").out.count("\n") == COUNT
    assert len(engine.footprint().mounts) >= COUNT
    for start in range(0, COUNT, 50):
        engine.docker("rm", "-f", *identifiers[start : start + 50])
    assert engine.containers() == []
    engine.assert_settles(before)
    until(
        "descriptors are closed", lambda: engine.descriptors() <= descriptors + 32
    )  # the pool of spare sandboxes holds some


@pytest.mark.own
def test_200_short_lives_through_docker_py(engine: TempEngine) -> None:
    before = engine.footprint()

    def run(first: int) -> list[bytes]:
        # a client of its own for each thread: docker-py drops its least recently used pools of
        # connections while other threads still give theirs back (an AttributeError in urllib3's
        # _put_conn)
        with contextlib.closing(engine.client()) as found:
            return [
                bytes(found.containers.run("busybox", ["echo", str(number)], remove=True, network_mode="none"))
                for number in range(first, COUNT, AT_ONCE)
            ]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        shares = list(pool.map(run, range(AT_ONCE)))
    outputs = sorted((one for share in shares for one in share), key=int)
    assert outputs == [b"%d\n" % number for number in range(COUNT)]
    assert engine.containers() == []
    engine.assert_settles(before)


@pytest.mark.own
def test_verbs_at_once_on_one_container(engine: TempEngine) -> None:
    """Sixteen clients that start, stop, kill, inspect and list concurrently get only documented
    statuses, never a 500; then remove works."""
    identifier = engine.create("sleep", "600")
    verbs = ["start", "stop?t=0", "kill", "restart?t=0"]

    def act(number: int) -> tuple[str, int]:
        verb = verbs[number % len(verbs)]
        return verb, engine.request("POST", f"/v1.24/containers/{identifier}/{verb}").status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(act, range(96)))
    # kill of a stopped container is documented as 500, as in Docker
    assert all(status in (204, 304) or (verb == "kill" and status in (409, 500)) for verb, status in answers), answers
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}?force=1").status == 204
    assert engine.containers() == []


@pytest.mark.own
def test_one_name_for_sixteen_creates(engine: TempEngine) -> None:
    def create(_: int) -> int:
        return engine.request(
            "POST", "/v1.24/containers/create?name=only", {"Image": "busybox", "Cmd": ["true"]}
        ).status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = sorted(pool.map(create, range(AT_ONCE)))
    assert answers == [201] + [409] * (AT_ONCE - 1)


@pytest.mark.own
def test_sixteen_removals_of_one_container(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")

    def remove(_: int) -> int:
        return engine.request("DELETE", f"/v1.24/containers/{identifier}?force=1").status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(remove, range(AT_ONCE)))
    assert 204 in answers
    assert set(answers) <= {204, 404, 409}, answers
    assert engine.containers() == []


@pytest.mark.own
def test_restarts_and_execs_leave_memory_descriptors_and_processes_as_they_were(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    identifier = engine.started("sleep", "600", network="bridge")

    def restarts(count: int) -> None:
        for _ in range(count):
            engine.post(f"/containers/{identifier}/restart?t=0")

    def execs(count: int) -> None:
        for number in range(count):
            body = {"Cmd": ["echo", str(number)], "AttachStdout": True}
            made = engine.request("POST", f"/v1.24/containers/{identifier}/exec", body)
            said = engine.request("POST", f"/v1.24/exec/{made.json()['Id']}/start", {})
            assert [text for _, text in client.frames(said.body)] == [b"%d\n" % number]

    def resident() -> int:
        """Memory of daemon and monitor in KiB."""
        status = (Path(f"/proc/{pid}/status").read_text() for pid in (engine.pid, engine.monitor_pid()))
        return sum(int(text.partition("VmRSS:")[2].split()[0]) for text in status)

    for act, count in ((restarts, 30), (execs, 100)):
        act(count)  # caches fill and threads are started
        descriptors = engine.descriptors()
        grown: list[int] = []
        while len(grown) < 3 and min(grown, default=3000) >= 3000:
            memory = resident()
            act(count)
            grown.append(resident() - memory)
        # a page that is touched late is in one of them, a leak is in each
        assert min(grown) < 3000, f"KiB that {count} took each time: {grown}"
        until("descriptors are closed", lambda most=descriptors: engine.descriptors() <= most + BREATH)
    engine.remove_all()
    engine.assert_settles(before)

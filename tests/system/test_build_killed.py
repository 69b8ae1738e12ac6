"""kill -9 of the daemon and of the monitor within builds: at each step, within COPY, RUN and the
seal of its layer, at the tag, and at random instants. After the restart nothing half done is left
and the next build is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import os
import random
import tarfile
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.builds.table import Building, build, cached
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

FILES = [Node(f"d/{at // 100}/{at}", b"%d" % at * 400) for at in range(1000)]
STEPS = """\
FROM busybox AS one
RUN mkdir /one && cp /bin/busybox /one/1 && cp /bin/busybox /one/2
FROM busybox
ENV a=1
COPY d /d
RUN cp -r /d /e && rm -r /d/3
COPY --from=one /one /one
WORKDIR /w/x
RUN find /d /e /one /w | sort | md5sum > /sum
CMD ["cat", "/sum"]
"""
CONTEXT = tar([Node("Dockerfile", STEPS.encode()), *FILES])
COUNT = 10


@pytest.fixture(scope="module")
def result() -> bytes:
    """What the image prints."""
    with TempEngine() as engine:
        engine.load_busybox()
        assert build(engine.request, CONTEXT, {"t": "built"}).image
        return printed(engine)


@pytest.fixture
def engine() -> Iterator[TempEngine]:
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


def printed(engine: TempEngine) -> bytes:
    container = engine.create(Image="built", Cmd=None)
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0
    output = engine.logs(container)
    engine.request("DELETE", f"/v1.24/containers/{container}")
    return output


def sound(engine: TempEngine) -> None:
    """Asserts that each image, intermediate ones too, has all its layers, byte for byte, that no
    other layer and no file of a build is on the disk, and that nothing runs.
    """
    until("no container is left", lambda: engine.containers() == [])

    def runs() -> set[str]:
        found = engine.footprint()
        return (found.mounts - {str(engine.run / "root")}) | found.cgroups | found.processes

    until("nothing runs or is mounted", lambda: not runs())
    until("no file of a build is left", lambda: os.listdir(engine.root / "tmp") == [])
    directories: set[str] = set()
    good: set[str] = set()
    for image in engine.request("GET", "/v1.24/images/json?all=1").json():
        shown = engine.request("GET", f"/v1.24/images/{image['Id']}/json").json()
        data = shown["GraphDriver"]["Data"]
        directories.update((data["UpperDir"], *data.get("LowerDir", data["UpperDir"]).split(":")))
        layers = shown["RootFS"]["Layers"]
        if set(layers) <= good:
            continue
        saved = engine.request("GET", f"/v1.24/images/{image['Id']}/get")
        assert saved.status == 200, saved
        with tarfile.open(fileobj=io.BytesIO(saved.body)) as archive:
            for diff_id in layers:
                member = archive.extractfile(f"blobs/sha256/{diff_id[7:]}")
                assert member is not None and hashlib.sha256(member.read()).hexdigest() == diff_id[7:]
        good.update(layers)
    found = {str(path) for path in (engine.root / "layers").glob("*/diff")}
    assert found == directories, (found - directories, directories - found)
    engine.assert_recorded()


def right(engine: TempEngine, expected: bytes) -> None:
    """Asserts that the build is complete now, that its image is the right one, and that the cache
    has all of it.
    """
    sound(engine)
    made = build(engine.request, CONTEXT, {"t": "built"})
    assert made.image, made
    assert printed(engine) == expected
    again = build(engine.request, CONTEXT, {"t": "built"})
    assert again.image == made.image and len(cached(again.text)) == COUNT - 2, again.text
    sound(engine)


@contextlib.contextmanager
def dying(engine: TempEngine, body: bytes = CONTEXT, query: dict[str, str] | None = None) -> Iterator[Building]:
    """A build that is read to its end in another thread once the block has ended: with the daemon,
    the answer ends.
    """
    building = Building(engine.socket, body, query)
    try:
        yield building
    finally:
        building.close()


@pytest.mark.parametrize("step", [*range(2, COUNT + 1, 2), "Successfully built", "Successfully tagged"])
def test_the_daemon_at_a_step(engine: TempEngine, result: bytes, step: int | str) -> None:
    """As soon as its line arrives. Cache records that were not yet on the disk are lost with their
    steps, no more.
    """
    with dying(engine, query={"t": "built"}) as building:
        building.until(f"Step {step} " if isinstance(step, int) else "Successfully built")
        if step == "Successfully tagged":
            with contextlib.suppress(AssertionError):
                building.until("never said")
        engine.kill9()
    engine.start()
    if step == "Successfully tagged":
        assert printed(engine) == result
    right(engine, result)


def test_the_daemon_within_run(engine: TempEngine) -> None:
    """The process of the step ends with it, and so do its cgroup, mounts and directories."""
    text = b"FROM busybox\nRUN echo 1 > /x\nRUN echo begun; echo half > /y; sleep 1000\n"
    before = engine.footprint()
    with dying(engine, tar([Node("Dockerfile", text)])) as building:
        building.said("begun")
        (container,) = engine.containers()
        engine.remember()
        engine.kill9()
    engine.start()
    until("the container is gone", lambda: engine.request("GET", f"/v1.24/containers/{container}/json").status == 404)
    sound(engine)
    engine.request("POST", "/v1.24/build/prune?all=1")
    engine.assert_settles(before)
    good = text.replace(b"sleep 1000", b"echo whole > /y")
    assert build(engine.request, [Node("Dockerfile", good)]).image
    sound(engine)


def test_both_within_run(engine: TempEngine) -> None:
    text = b"FROM busybox\nRUN echo 1 > /x\nRUN echo begun; sleep 1000\n"
    with dying(engine, tar([Node("Dockerfile", text)])) as building:
        building.said("begun")
        engine.remember()
        monitor = engine.monitor_pid()
        engine.kill9()
        with contextlib.suppress(ProcessLookupError):
            os.kill(monitor, 9)
    engine.start()
    sound(engine)


def test_the_monitor_within_run(engine: TempEngine) -> None:
    """The next monitor takes the container over, and the build goes on with its output."""
    text = b"FROM busybox\nRUN echo begun; until [ -e /go ]; do sleep 0.02; done; echo ended; echo 1 > /x\n"
    building = Building(engine.socket, tar([Node("Dockerfile", text)]), {"t": "built"})
    building.said("begun")
    (container,) = engine.containers()
    engine.replace_monitor()
    assert engine.docker("exec", container, "true").status == 0
    engine.touch(container, "/go")
    rest = building.rest()
    assert "ended" in rest and "Successfully built" in rest, rest
    sound(engine)


@pytest.mark.parametrize("step", [2, 6, 9])
def test_the_monitor_at_a_step(engine: TempEngine, result: bytes, step: int) -> None:
    """The build ends well, or with an error; afterwards all is as it should be."""
    building = Building(engine.socket, CONTEXT, {"t": "built"})
    building.until(f"Step {step} ")
    engine.replace_monitor()
    rest = building.rest()
    assert "Successfully built" in rest or "errorDetail" in rest, rest
    engine.remove_all()
    right(engine, result)


@pytest.mark.nightly
def test_the_daemon_at_random_instants(engine: TempEngine, result: bytes) -> None:
    """Spread over the duration of an undisturbed build. Every second one has nothing cached."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    begin = time.monotonic()
    assert build(engine.request, CONTEXT).image
    undisturbed = time.monotonic() - begin

    def work(query: dict[str, str]) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            build(engine.request, CONTEXT, query)

    for turn in range(10):
        query = {"t": "built", "nocache": str(turn % 2)}
        if turn % 2 == 0:
            engine.request("POST", "/v1.24/build/prune?all=1")
        thread = threading.Thread(target=work, args=(query,))
        thread.start()
        threading.Event().wait(chance.uniform(0, 1.1 * undisturbed))
        engine.restart()
        thread.join()
        try:
            sound(engine)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, turn {turn}") from error
    right(engine, result)


def test_a_failed_container_outlives_the_daemon(engine: TempEngine) -> None:
    """With rm=0 the container of a failed step is an ordinary stopped one: it is there after a kill
    of the daemon, can be committed, and can be started again.
    """
    text = b"FROM busybox\nRUN echo found > /x; exit 3\n"
    failed = build(engine.request, [Node("Dockerfile", text)], {"rm": "0"})
    assert failed.code == 3
    (container,) = engine.containers()
    engine.restart()
    shown = engine.inspect(container)
    assert shown["State"]["Status"] == "exited" and shown["State"]["ExitCode"] == 3
    assert engine.request("POST", f"/v1.24/commit?container={container}&repo=debug").status == 201
    looking = engine.create("cat", "/x", Image="debug")
    engine.post(f"/containers/{looking}/start")
    assert engine.wait(looking) == 0 and engine.logs(looking) == b"found\n"
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 3
    engine.remove_all()
    sound(engine)

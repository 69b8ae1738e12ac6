"""GET /system/df: sizes and totals that follow what is on the disk, at old and new versions, and
what docker CLIs and docker-py show of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import subprocess
import tarfile
from typing import Any

from tests.support.builds.building import build
from tests.support.engine.harness import TempEngine, until

MB = 1 << 20


def df(engine: TempEngine, query: str = "", version: str = "") -> Any:
    answer = engine.request("GET", f"{version and '/v' + version}/system/df{query}")
    assert answer.status == 200, answer
    return answer.json()


def test_an_engine_with_nothing() -> None:
    kinds = ("ImageUsage", "ContainerUsage", "VolumeUsage", "BuildCacheUsage")
    lists: dict[str, Any] = {"Images": [], "Containers": [], "Volumes": [], "BuildCache": []}
    with TempEngine() as engine:
        assert df(engine) == {kind: {} for kind in kinds} | lists | {"LayersSize": 0}
        assert df(engine, "?verbose=1") == {kind: {"Items": []} for kind in kinds}
        assert df(engine, version="1.44") == lists | {"LayersSize": 0}


def test_sizes(own_engine: TempEngine) -> None:
    engine = own_engine
    volume = "v-of-df"
    engine.request("POST", "/v1.44/volumes/create", {"Name": volume})
    writing = "dd if=/dev/zero of=/data/x bs=1M count=3; dd if=/dev/zero of=/x bs=1M count=2; echo ready; sleep 600"
    running = engine.started("sh", "-c", writing, host={"Binds": [f"{volume}:/data"]})
    until("written", lambda: b"ready" in engine.logs(running))
    stopped = engine.create("true")

    found = df(engine, "?verbose=true")
    assert found.keys() == {"ImageUsage", "ContainerUsage", "VolumeUsage", "BuildCacheUsage"}
    images = found["ImageUsage"]
    assert (images["ActiveCount"], images["TotalCount"]) == (1, 1) and "Reclaimable" not in images
    [image] = images["Items"]
    assert image["Containers"] == 2 and image["SharedSize"] == 0 and image["Size"] == images["TotalSize"]

    containers = found["ContainerUsage"]
    assert (containers["ActiveCount"], containers["TotalCount"]) == (1, 2)
    sizes = {each["Id"]: each["SizeRw"] for each in containers["Items"]}
    assert 2 * MB <= sizes[running] < 3 * MB and sizes[stopped] < MB
    assert containers["TotalSize"] == sum(sizes.values())
    assert containers.get("Reclaimable", 0) == sizes[stopped]
    assert [each["Id"] for each in containers["Items"]] == [stopped, running]
    assert all(each["SizeRootFs"] == each["SizeRw"] + image["Size"] for each in containers["Items"])

    volumes = found["VolumeUsage"]
    [listed] = volumes["Items"]
    assert listed["Name"] == volume and listed["UsageData"]["RefCount"] == 1
    assert 3 * MB <= listed["UsageData"]["Size"] == volumes["TotalSize"] < 4 * MB
    assert volumes["ActiveCount"] == volumes["TotalCount"] == 1 and "Reclaimable" not in volumes

    older = df(engine, version="1.44")
    assert older["LayersSize"] == images["TotalSize"]
    assert {each["Id"]: each["SizeRw"] for each in older["Containers"]} == sizes
    assert older["Volumes"][0]["UsageData"] == listed["UsageData"] and older["BuildCache"] == []

    engine.request("DELETE", f"/v1.44/containers/{running}?force=1")
    until("unused", lambda: df(engine, "?type=volume&verbose=1")["VolumeUsage"]["Reclaimable"] >= 3 * MB)
    engine.request("DELETE", f"/v1.44/volumes/{volume}")
    assert df(engine, "?type=volume") == {"Volumes": [], "VolumeUsage": {}}


def test_the_size_of_a_stopped_container_follows_its_files(engine: TempEngine) -> None:
    """It is kept between two requests, but not over a change."""
    engine.load_busybox()
    identifier = engine.create("sh", "-c", "dd if=/dev/zero of=/y bs=1M count=1")

    def size() -> int:
        [found] = df(engine, "?type=container&verbose=1")["ContainerUsage"]["Items"]
        return int(found["SizeRw"])

    assert size() < MB and size() < MB
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("x")
        member.size = 2 * MB
        tar.addfile(member, io.BytesIO(bytes(2 * MB)))
    put = f"/v1.44/containers/{identifier}/archive?path=/"
    assert engine.request("PUT", put, archive.getvalue(), {"Content-Type": "application/x-tar"}).status == 200
    assert 2 * MB <= size() < 3 * MB
    engine.post(f"/containers/{identifier}/start")
    assert engine.wait(identifier) == 0
    until("it holds both files", lambda: 3 * MB <= size() < 4 * MB)


def test_the_build_cache(builder: TempEngine) -> None:
    builder.load_busybox()
    before = {each["ID"] for each in df(builder)["BuildCache"]}
    assert build(builder, "FROM busybox\nRUN dd if=/dev/zero of=/x bs=1M count=2\nLABEL of=df\n").id

    new = [each for each in df(builder, "?type=build-cache")["BuildCache"] if each["ID"] not in before]
    assert sorted(each["Size"] // MB for each in new) == [0, 2]
    by_parent = {each.get("Parents", [""])[0]: each["ID"] for each in new}
    assert len(by_parent) == 2, "each has another parent"
    old = df(builder, version="1.41")
    assert old["BuilderSize"] == sum(each["Size"] for each in old["BuildCache"]) >= 2 * MB
    assert all("Parents" not in each for each in old["BuildCache"])
    assert "BuilderSize" not in df(builder, version="1.42")


def test_many_at_once(engine: TempEngine) -> None:
    engine.load_busybox()
    for number in range(20):
        engine.create("true", name=f"many-{number}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: df(engine, version="1.44"), range(16))]
    assert all(len(each["Containers"]) == 20 for each in found)


def test_docker_py(own_engine: TempEngine) -> None:
    """It speaks the version that the engine names, which may have both forms."""
    import docker

    engine = own_engine
    engine.create("true")
    with contextlib.closing(docker.DockerClient(base_url=f"unix://{engine.socket}", version="auto")) as client:
        found = client.df()
    assert found["Images"][0]["Containers"] == 1 and len(found["Containers"]) == 1
    assert found["Volumes"] == [] and found["LayersSize"] > 0


def docker(engine: TempEngine, *arguments: str) -> str:
    """The output of the docker CLI at the version that it negotiates."""
    environment = {name: value for name, value in engine.environment.items() if name != "DOCKER_API_VERSION"}
    return subprocess.run(["docker", *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def test_docker(own_engine: TempEngine) -> None:
    engine = own_engine
    engine.create("true")
    lines = docker(engine, "system", "df", "--format", "{{json .}}").splitlines()
    rows = {each["Type"]: each for each in map(json.loads, lines)}
    assert rows.keys() == {"Images", "Containers", "Local Volumes", "Build Cache"}
    assert (rows["Images"]["TotalCount"], rows["Images"]["Active"]) == ("1", "1")
    assert (rows["Containers"]["TotalCount"], rows["Containers"]["Active"]) == ("1", "0")
    shown = docker(engine, "system", "df", "-v")
    assert "Images space usage:" in shown and "busybox" in shown

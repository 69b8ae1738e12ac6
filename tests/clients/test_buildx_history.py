"""`docker buildx history` with buildx 0.29: builds that succeeded, failed and were cancelled,
across a restart of the engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path

from tests.clients.programs import FORKY
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until

FILES = {
    "Dockerfile": "FROM busybox\nARG X=1\nRUN echo hello $X\n",
    "bad": "FROM busybox\nRUN echo before && exit 3\n",
    "slow": "FROM busybox\nRUN sleep 100\n",
}


def test_history(own_engine: TempEngine, tmp_path: Path) -> None:
    def docker(*arguments: str, status: int | None = 0) -> str:
        found = FORKY.run(own_engine, *arguments, cwd=context, status=status)
        return found.out + found.err

    def history(*arguments: str, status: int = 0) -> str:
        return docker("buildx", "history", *arguments, status=status)

    def builds() -> dict[str, tuple[str, str]]:
        """Name and status of each build, by its id."""
        lines = map(json.loads, history("ls", "--format", "json").splitlines())
        return {each["ref"].rpartition("/")[2]: (each["name"], each["status"]) for each in lines}

    context = tmp_path / "shop"
    context.mkdir()
    for name, text in FILES.items():
        (context / name).write_text(text)
    assert builds() == {}
    docker(
        "build", "-t", "one", "--build-arg", "X=2", "--label", "a=b", "--metadata-file", str(tmp_path / "metadata"), "."
    )
    docker("build", "-f", "bad", ".", status=1)
    command = [FORKY.path, "build", "-f", "slow", "."]
    with subprocess.Popen(
        command, cwd=context, env=FORKY.environment(own_engine), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as slow:
        until("a build that runs", lambda: ("shop/slow", "Running") in builds().values())
        os.kill(slow.pid, signal.SIGINT)
        slow.wait(30 * PATIENCE)

    found = {name: ref for ref, (name, _) in builds().items()}
    expected = {"shop": "Completed", "shop/bad": "Error", "shop/slow": "Error"}
    assert dict(builds().values()) == expected
    one, bad, slowest = (found[name] for name in expected)
    own_engine.restart()
    assert {name: ref for ref, (name, _) in builds().items()} == found

    shown = json.loads(history("inspect", "--format", "json", one))
    assert (shown["Name"], shown["Dockerfile"], shown["Status"]) == ("shop", "Dockerfile", "completed")
    assert shown["BuildArgs"] == [{"Name": "X", "Value": "2"}] and shown["Labels"] == [{"Name": "a", "Value": "b"}]
    assert shown["NumCompletedSteps"] == shown["NumTotalSteps"] > 2
    image = own_engine.request("GET", "/v1.44/images/one/json").json()["Id"]
    attached, provenance = shown["Attachments"]
    assert attached["Digest"] == image and provenance["Type"] == "https://slsa.dev/provenance/v0.2"
    (material,) = shown["Materials"]
    assert material["URI"].startswith("pkg:docker/busybox@latest?platform=linux%2F")
    metadata = json.loads((tmp_path / "metadata").read_text())
    assert metadata["buildx.build.ref"].endswith(one)
    found_there = metadata["buildx.build.provenance"]
    assert found_there["invocation"]["parameters"]["args"] == {"build-arg:X": "2", "label:a": "b"}
    assert [each["uri"] for each in found_there["materials"]] == [material["URI"]]
    failed = history("inspect", bad)
    assert (
        "   2 | >>> RUN echo before && exit 3" in failed and "> => [2/2] RUN echo before && exit 3:\n> before" in failed
    )
    assert json.loads(history("inspect", "--format", "json", slowest))["Status"] == "canceled"

    assert "RUN echo hello 2\n" in history("logs", one) and "hello 2\n" in history("logs", one)
    assert "exit code: 3" in history("logs", bad)
    assert [line.split()[0] for line in history("ls", "--filter", "status=completed").splitlines()[1:]] == [one]

    history("export", "--output", str(tmp_path / "all.dockerbuild"), "--all")
    with tarfile.open(tmp_path / "all.dockerbuild") as archive:
        member = archive.extractfile("index.json")
        assert member is not None and len(json.load(member)["manifests"]) == 1
        assert f"blobs/sha256/{image.removeprefix('sha256:')}" in archive.getnames()

    history("rm", bad)
    assert "no build record for ref" in history("rm", bad, status=1)
    assert set(builds()) == {one, slowest}
    history("rm", "--all")
    assert builds() == {}
    assert not list((own_engine.base / "root/build/history").iterdir())

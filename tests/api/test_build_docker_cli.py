"""`docker build` of the docker CLI without buildx: the classic builder, by two CLIs, the one of the
other tests and Debian 12's 20.10.
"""

from __future__ import annotations

import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.clients import programs
from tests.support import PATIENCE
from tests.support.builds.building import cgroup_parent, context, exists, image
from tests.support.engine.harness import Result, TempEngine, until

PROGRAMS = ("docker", programs.BOOKWORM.path)


def docker(
    engine: TempEngine,
    program: str,
    *arguments: str,
    input: bytes | None = None,
    status: int = 0,
    cwd: Path | None = None,
) -> Result:
    """Runs a docker CLI with its classic builder."""
    done = subprocess.run(
        [program, *arguments],
        env=engine.environment | {"DOCKER_BUILDKIT": "0"},
        input=input,
        stdin=subprocess.DEVNULL if input is None else None,
        capture_output=True,
        timeout=60 * PATIENCE,
        check=False,
        cwd=cwd,
    )
    result = Result(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert result.status == status, (arguments, result)
    return result


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project with a Dockerfile, a file that is ignored, and a script."""
    for name, text in {
        "Dockerfile": "FROM busybox AS base\nARG who=nobody\nCOPY . /project\nRUN echo hello $who\n"
        'FROM base\nCMD ["cat", "/project/dir/data"]\n',
        "Other": "FROM busybox\nLABEL is=other\n",
        ".dockerignore": "*.log\nOther\nDockerfile\n.dockerignore\n",
        "big.log": "ignored",
        "dir/data": "data\n",
        "run.sh": "#!/bin/sh\necho run\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_build_and_run(program: str, here: Path, builder: TempEngine) -> None:
    result = docker(builder, program, "build", "-t", "project:1", "--build-arg", "who=me", str(here))
    assert "hello me\n" in result.out
    identifier = image(builder, "project:1")["Id"].removeprefix("sha256:")
    assert f"Successfully built {identifier[:12]}\n" in result.out
    assert builder.docker("run", "--rm", "--network", "none", "project:1").out == "data\n"
    listed = builder.docker("run", "--rm", "--network", "none", "project:1", "ls", "-A", "/project").out.split()
    assert listed == ["dir", "run.sh"], ".dockerignore, and the Dockerfile that it names"
    assert builder.docker("run", "--rm", "--network", "none", "project:1", "/project/run.sh").out == "run\n"


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_quiet_prints_the_id(program: str, here: Path, builder: TempEngine) -> None:
    result = docker(builder, program, "build", "-q", str(here))
    assert image(builder, result.line)["Id"] == result.line


@pytest.mark.own  # dockerd streams ids from API 1.30 on
@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_iidfile(program: str, here: Path, tmp_path: Path, builder: TempEngine) -> None:
    path = tmp_path / "id"
    docker(builder, program, "build", "--iidfile", str(path), "-t", "identified", str(here))
    assert path.read_text() == image(builder, "identified")["Id"]


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_the_exit_status_is_the_step_s(program: str, builder: TempEngine) -> None:
    result = docker(builder, program, "build", "-", input=b"FROM busybox\nRUN echo said; exit 9\n", status=9)
    assert "said\n" in result.out
    assert "The command '/bin/sh -c echo said; exit 9' returned a non-zero code: 9\n" in result.err
    quiet = docker(builder, program, "build", "-q", "-", input=b"FROM busybox\nRUN echo said; exit 9\n", status=9)
    assert "said\n" in quiet.err


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_a_bad_dockerfile(program: str, builder: TempEngine) -> None:
    result = docker(builder, program, "build", "-", input=b"FROM busybox\nNONSENSE x\n", status=1)
    assert "nknown instruction: NONSENSE" in result.err
    assert "Step" not in result.out


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_a_context_from_standard_input(program: str, builder: TempEngine) -> None:
    body = context("FROM busybox\nCOPY a /a\nRUN cat /a\n", {"a": b"from the archive\n"})
    assert "from the archive\n" in docker(builder, program, "build", "--no-cache", "-", input=body).out


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_a_dockerfile_elsewhere(
    program: str, here: Path, tmp_path_factory: pytest.TempPathFactory, builder: TempEngine
) -> None:
    """-f within the context, outside of it, and from standard input."""
    docker(builder, program, "build", "-t", "other", "-f", str(here / "Other"), str(here))
    assert image(builder, "other")["Config"]["Labels"] == {"is": "other"}
    outside = tmp_path_factory.mktemp("outside") / "File"
    outside.write_text("FROM busybox\nCOPY dir/data /\nLABEL is=outside\n")
    docker(builder, program, "build", "-t", "other", "-f", str(outside), str(here))
    assert image(builder, "other")["Config"]["Labels"] == {"is": "outside"}
    text = b"FROM busybox\nCOPY dir/data /\nLABEL is=input\n"
    docker(builder, program, "build", "-t", "other", "-f", "-", str(here), input=text)
    assert image(builder, "other")["Config"]["Labels"] == {"is": "input"}


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_options(program: str, here: Path, builder: TempEngine) -> None:
    """All that the CLI lets pass at API 1.24."""
    options = [
        *("--target", "base", "--label", "a=b", "--add-host", "there:1.2.3.4", "--no-cache"),
        *("--memory", "64m", "--memory-swap", "64m", "--cpu-shares", "512", "--cpu-period", "50000"),
        *("--cpu-quota", "25000", "--cpuset-cpus", "0", "--cpuset-mems", "0", "--shm-size", "1m"),
        *("--ulimit", "nofile=123:456", "--cgroup-parent", cgroup_parent(builder), "--rm=false"),
        *("--isolation", "default", "--tag", "one", "--tag", "two:2"),
    ]
    (here / "Dockerfile").write_text(
        "FROM busybox AS base\nRUN ulimit -n; cat /etc/hosts; df -k /dev/shm\nFROM scratch\n"
    )
    out = docker(builder, program, "build", *options, str(here)).out
    assert "123\n" in out and "1.2.3.4\tthere\n" in out and "1024" in out
    assert image(builder, "one")["Config"]["Labels"] == {"a": "b"}
    assert image(builder, "two:2")["Id"] == image(builder, "one")["Id"]
    assert len(builder.containers()) >= 1, "--rm=false"


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_force_rm(program: str, builder: TempEngine) -> None:
    text = b"FROM busybox\nRUN exit 1\n"
    docker(builder, program, "build", "--force-rm", "-", input=text, status=1)
    assert builder.containers() == []
    docker(builder, program, "build", "-", input=text, status=1)
    assert len(builder.containers()) == 1


@pytest.mark.own
@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_an_unused_argument(program: str, builder: TempEngine) -> None:
    text = b"FROM busybox\nRUN true\n"
    result = docker(builder, program, "build", "-t", "un", "--build-arg", "no=1", "-", input=text, status=1)
    assert "One or more build-args [no] were not consumed, failing build.\n" in result.err
    assert not exists(builder, "un")


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_interrupt(program: str, builder: TempEngine, tmp_path: Path) -> None:
    """Ctrl-C ends the step within the build, and nothing is left."""
    (tmp_path / "Dockerfile").write_text("FROM busybox\nRUN sleep 600\n")
    client = subprocess.Popen(
        [program, "build", "--no-cache", str(tmp_path)],
        env=builder.environment | {"DOCKER_BUILDKIT": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until("the step runs", lambda: builder.request("GET", "/v1.24/containers/json").json())
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=30 * PATIENCE)
    until("the container is gone", lambda: builder.containers() == [])


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_history_and_images(program: str, builder: TempEngine) -> None:
    """Every step is an image with its parent and a line of history."""
    text = b"FROM busybox\nENV a=b\nRUN echo x > /x\nCMD echo hi\n"
    docker(builder, program, "build", "-t", "steps", "-", input=text)
    rows = docker(builder, program, "history", "--no-trunc", "--format", "{{.ID}} {{.CreatedBy}}", "steps").out
    lines = [line.partition(" ") for line in rows.splitlines()]
    assert [line[2].split("# buildkit")[0].strip() for line in lines[:3]] == [
        '/bin/sh -c #(nop)  CMD ["/bin/sh" "-c" "echo hi"]',
        "/bin/sh -c echo x > /x",
        "/bin/sh -c #(nop)  ENV a=b",
    ]
    for line in lines[:3]:
        assert exists(builder, line[0])
    assert image(builder, lines[0][0])["Parent"] == lines[1][0]
    assert docker(builder, program, "images", "-q", "--no-trunc", "steps").line == lines[0][0]
    found = docker(builder, program, "images", "-a", "-q", "--no-trunc").out.split()
    assert {line[0] for line in lines[:3]} <= set(found)


@pytest.mark.parametrize("program", PROGRAMS, ids=("host", "bookworm"))
def test_a_large_context(program: str, builder: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nCOPY . /c\nRUN ls /c/d | wc -l; wc -c < /c/big\n")
    (tmp_path / "big").write_bytes(bytes(20_000_000))
    (tmp_path / "d").mkdir()
    for number in range(1000):
        (tmp_path / "d" / str(number)).write_text(str(number))
    out = docker(builder, program, "build", "--compress", "--no-cache", str(tmp_path)).out
    assert "\n1000\n20000000\n" in out


def test_saved_images_load_elsewhere(builder: TempEngine, tmp_path: Path) -> None:
    """What was built is a whole archive, whose layers have the steps' files."""
    docker(builder, "docker", "build", "-t", "whole", "-", input=b"FROM busybox\nRUN echo x > /x; mkdir /d\n")
    path = tmp_path / "whole.tar"
    builder.docker("save", "-o", str(path), "whole")
    with tarfile.open(path) as archive:
        names = archive.getnames()
        assert "manifest.json" in names
        layers = [name for name in names if name.endswith("layer.tar") or name.startswith("blobs/sha256/")]
        found = set()
        for name in layers:
            member = archive.extractfile(name)
            if member is None:
                continue
            try:
                with tarfile.open(fileobj=member) as layer:
                    found |= {each.name.strip("/") for each in layer}
            except tarfile.ReadError:
                continue
    assert {"x", "d", "bin/busybox"} <= found
    assert not found & {".dockerenv", "etc/hosts", "etc/hostname", "etc/resolv.conf"}

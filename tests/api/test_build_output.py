"""POST /build as bytes: what is streamed, what is an HTTP error, and what a client that leaves
leaves behind.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import http.server
import json
import lzma
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import zstandard

from tests.support import PATIENCE
from tests.support.builds.building import build, context, exists, image, post, query, read, refused
from tests.support.builds.web import serving
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, directory, hard_link, symlink

ID = "[0-9a-f]{12}"


def test_the_stream_of_a_build(builder: TempEngine) -> None:
    """One object per line, each with CR LF; the words that clients look for, in their order."""
    dockerfile = 'FROM busybox\nENV a=b\nRUN echo out; echo $a\nCOPY file /there\nCMD ["true"]\n'
    built = build(builder, dockerfile, {"file": b"x"})
    assert all(list(each) == ["stream"] for each in built.objects)
    lines = built.lines
    steps = [re.sub(r"^Step (\d+)(?:/5)? : ", r"\1: ", line) for line in lines if line.startswith("Step ")]
    texts = ["FROM busybox", "ENV a=b", "RUN echo out; echo $a", "COPY file /there", 'CMD ["true"]']
    assert steps == [f"{number}: {text}" for number, text in enumerate(texts, 1)]
    results = [line for line in lines if re.fullmatch(f" ---> {ID}", line)]
    assert len(results) == 5
    assert results[-1] == f" ---> {built.id}"
    assert results[0] == f" ---> {image(builder, 'busybox')['Id'].removeprefix('sha256:')[:12]}"
    assert lines[lines.index("out") + 1] == "b"
    running = next(
        at for at, line in enumerate(lines) if line.startswith(" ---> Running in ") and lines[at + 1] == "out"
    )
    container = lines[running].removeprefix(" ---> Running in ")
    assert re.fullmatch(ID, container)
    assert f"Removing intermediate container {container}" in lines[running:]
    assert lines[-1] == f"Successfully built {built.id}"
    assert image(builder, built.id)["Config"]["Cmd"] == ["true"]
    assert builder.containers() == []


@pytest.mark.own
def test_the_exact_stream_at_1_24(builder: TempEngine) -> None:
    dockerfile = 'FROM busybox\nRUN echo out\nCMD ["true"]\n'
    built = build(builder, dockerfile, t="exact:1")
    words = [re.sub(f"[ ]{ID}(?=\n)", " ID", each["stream"]) for each in built.objects]
    assert "".join(words) == (
        "Step 1 : FROM busybox\n ---> ID\n"
        "Step 2 : RUN echo out\n ---> Running in ID\nout\n"
        "Removing intermediate container ID\n ---> ID\n"
        'Step 3 : CMD ["true"]\n ---> ID\n'
        "Successfully built ID\nSuccessfully tagged exact:1\n"
    )
    again = build(builder, dockerfile)
    assert re.sub(f"[ ]{ID}(?=\n)", " ID", again.text) == (
        "Step 1 : FROM busybox\n ---> ID\n"
        "Step 2 : RUN echo out\n ---> Using cache\n ---> ID\n"
        'Step 3 : CMD ["true"]\n ---> Using cache\n ---> ID\n'
        "Successfully built ID\n"
    )
    assert again.id == built.id


def test_the_answer_s_head(builder: TempEngine) -> None:
    answer = post(builder, context("FROM busybox\n"))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["transfer-encoding"] == "chunked"


@pytest.mark.own
def test_a_ping_names_the_classic_builder(builder: TempEngine) -> None:
    assert builder.request("GET", "/_ping").headers["builder-version"] == "1"


def test_standard_error_is_red(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN echo good; echo bad >&2\n")
    streams = [each["stream"] for each in built.objects]
    assert "good\n" in streams
    assert "\x1b[91mbad\n\x1b[0m" in built.text


def test_output_without_a_newline_and_of_any_bytes(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN printf 'a\\377b'; printf 'last'\n")
    assert built.error is None
    assert "a\N{REPLACEMENT CHARACTER}blast" in built.text


def test_a_lot_of_output_arrives_whole(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN seq 1 200000\n", nocache=1)
    found = [line for line in built.lines if line.isdigit()]
    assert found == [str(number) for number in range(1, 200_001)]


@pytest.mark.parametrize(
    ("command", "shown", "code"),
    [
        ("RUN exit 7", "/bin/sh -c exit 7", 7),
        ("RUN no-such-program", "/bin/sh -c no-such-program", 127),
        ('RUN ["sh", "-c", "exit 3"]', "sh -c exit 3", 3),
    ],
)
def test_a_failing_step(command: str, shown: str, code: int, builder: TempEngine) -> None:
    built = build(builder, f"FROM busybox\n{command}\nENV never=1\n", t="failing")
    words = f"The command '{shown}' returned a non-zero code: {code}"
    assert built.error == {"errorDetail": {"code": code, "message": words}, "error": words}
    assert "never" not in built.text and "Successfully" not in built.text
    assert not exists(builder, "failing")


def test_output_before_a_failure_is_streamed(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN echo last words; echo and these >&2; exit 2\n")
    assert "last words\n" in built.text and "and these\n" in built.text
    assert built.code == 2


# --- errors before the first byte -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dockerfile", "words"),
    [
        ("FROM busybox\nNONSENSE x\n", r"[Uu]nknown instruction: NONSENSE"),
        ("FROM busybox\nRUN true\nENV\n", r"ENV requires at least one argument|ENV must have two arguments"),
        ("FROM busybox\nCOPY --nonsense=1 a b\n", r"unknown flag: --nonsense"),
        ("FROM busybox\nCOPY a\n", r"COPY requires at least two arguments"),
        ("FROM busybox\nFROM\n", r"FROM requires (exactly one argument|either one or three arguments)"),
        ("FROM busybox\nLABEL a\n", r"can't find = in \"a\"|LABEL must have two arguments"),
        ("FROM busybox\nSHELL /bin/sh\n", r"SHELL requires the arguments to be in JSON form"),
        ("FROM busybox\nONBUILD ONBUILD RUN true\n", r"Chaining ONBUILD via `ONBUILD ONBUILD` isn't allowed"),
        ("FROM busybox\nONBUILD FROM busybox\n", r"FROM isn't allowed as an ONBUILD trigger"),
        ("FROM busybox\nHEALTHCHECK CMD\n", r"Missing command after HEALTHCHECK CMD"),
        ("FROM busybox\nHEALTHCHECK SOMETHING x\n", r"Unknown type \"SOMETHING\" in HEALTHCHECK \(try CMD\)"),
        (
            "RUN true\n",
            r"[Nn]o build stage in current context|Please provide a source image with `from` prior to commit",
        ),
    ],
)
def test_a_bad_dockerfile_is_refused_before_a_step(dockerfile: str, words: str, builder: TempEngine) -> None:
    """Even where the error is in the last line, and the base would have to be pulled."""
    message = refused(post(builder, context(dockerfile.replace("busybox\nRUN", "no-such-image\nRUN"))))
    assert re.search(words, message), message


@pytest.mark.own  # dockerd answers 500 or streams some of these
@pytest.mark.parametrize(
    ("dockerfile", "words"),
    [
        ("", r"The Dockerfile \(Dockerfile\) cannot be empty"),
        (None, r"Cannot locate specified Dockerfile: Dockerfile"),
        ("# only a comment\n", r"."),
        ("FROM busybox\n\nNONSENSE x\n", r"line 3"),
    ],
)
def test_a_dockerfile_that_is_none(dockerfile: str | None, words: str, builder: TempEngine) -> None:
    answer = post(builder, context(dockerfile, {"other": b"x"}))
    assert answer.status in (400, 500), answer
    assert re.search(words, answer.message), answer


@pytest.mark.parametrize("body", [b"", b"nonsense", b"x" * 100_000])
def test_a_body_that_is_no_archive(body: bytes, builder: TempEngine) -> None:
    answer = post(builder, body)
    assert answer.status in (400, 500) and answer.message, answer


def test_a_missing_base(builder: TempEngine) -> None:
    """The step is shown, then the error; where no byte was sent, it is the status."""
    answer = post(builder, context("FROM no-such-registry.invalid/x\nRUN true\n"))
    if answer.status == 200:
        built = read(answer)
        assert built.error is not None and built.error["error"]
    else:
        assert answer.status in (404, 500) and answer.message


def test_a_large_context_and_an_early_error(builder: TempEngine) -> None:
    """The client gets the answer although it sends more than is needed."""
    body = context("FROM busybox\nNONSENSE\n", {"zz": bytes(30_000_000)})
    assert "nknown instruction: NONSENSE" in refused(post(builder, body))


@pytest.mark.own
def test_a_refused_parameter_and_a_large_context(builder: TempEngine) -> None:
    body = context("FROM busybox\n", {"zz": bytes(30_000_000)})
    assert "Error parsing reference" in refused(post(builder, body, t="Upper"))


# --- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}, {"Content-Type": "application/tar"}])
@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=lambda each: each.__name__
)
def test_compression_is_recognised_by_content(
    compress: Callable[[bytes], bytes], headers: dict[str, str], builder: TempEngine
) -> None:
    """docker-py sends Content-Encoding: gzip, and dockerode another Content-Type."""
    files = {"a": bytes(100_000), "d/b": b"b"}
    body = compress(context("FROM busybox\nCOPY . /c\nRUN wc -c < /c/a; cat /c/d/b\n", files))
    built = read(post(builder, body, headers, nocache=1))
    assert "100000\nb" in built.text
    assert built.id


@pytest.mark.own
def test_zstd(builder: TempEngine) -> None:
    body = zstandard.ZstdCompressor().compress(context("FROM busybox\nCOPY a /a\n", {"a": b"x"}))
    assert read(post(builder, body)).id


def test_a_truncated_context(builder: TempEngine) -> None:
    body = context("FROM busybox\nCOPY a /\n", {"a": bytes(100_000)})[:50_000]
    answer = post(builder, body)
    if answer.status == 200:  # dockerd has begun when it meets the end
        assert read(answer).error is not None
    else:
        assert answer.message


@pytest.mark.parametrize(
    ("parameters", "files"),
    [
        ({}, {"Dockerfile": "FROM busybox\nLABEL from=here\n"}),
        ({"dockerfile": "d/File"}, {"d/File": "FROM busybox\nLABEL from=here\n"}),
        ({"dockerfile": "./d/../d/File"}, {"d/File": "FROM busybox\nLABEL from=here\n"}),
        ({"dockerfile": ["File", "other"]}, {"File": "FROM busybox\nLABEL from=here\n", "other": "FROM x\n"}),
        ({}, {"dockerfile": "FROM busybox\nLABEL from=here\n"}),
    ],
)
def test_the_dockerfile_by_name(parameters: dict[str, Any], files: dict[str, str], builder: TempEngine) -> None:
    built = build(builder, None, {name: text.encode() for name, text in files.items()}, **parameters)
    assert image(builder, built.id)["Config"]["Labels"] == {"from": "here"}


@pytest.mark.own
@pytest.mark.parametrize(
    ("parameters", "files"),
    [
        ({"buildfile": "File"}, {"File": "FROM busybox\nLABEL from=here\n"}),
        ({}, {"Containerfile": "FROM busybox\nLABEL from=here\n"}),
        ({}, {"Containerfile": "FROM x\n", "Dockerfile": "FROM busybox\nLABEL from=here\n"}),
    ],
)
def test_the_dockerfile_by_its_other_names(
    parameters: dict[str, Any], files: dict[str, str], builder: TempEngine
) -> None:
    built = build(builder, None, {name: text.encode() for name, text in files.items()}, **parameters)
    assert image(builder, built.id)["Config"]["Labels"] == {"from": "here"}


def test_a_dockerfile_that_is_a_link(builder: TempEngine) -> None:
    files = {"real": b"FROM busybox\nLABEL from=link\n", "Dockerfile": symlink("Dockerfile", "real")}
    assert image(builder, build(builder, None, files).id)["Config"]["Labels"] == {"from": "link"}


@pytest.mark.parametrize("name", ["../File", "/../../etc/passwd", "d/../../File"])
def test_a_dockerfile_outside_is_refused(name: str, builder: TempEngine) -> None:
    answer = post(builder, context("FROM busybox\n"), dockerfile=name)
    assert answer.status in (400, 500), answer
    assert re.search("[Ff]orbidden path outside the build context: |Cannot locate specified Dockerfile", answer.message)


def test_a_missing_dockerfile_is_named(builder: TempEngine) -> None:
    answer = post(builder, context("FROM busybox\n"), dockerfile="other")
    assert answer.status in (400, 404, 500), answer
    assert "Cannot locate specified Dockerfile: other" in answer.message


def test_members_of_every_kind(builder: TempEngine) -> None:
    files = {
        "d": directory("d", 0o700),
        "d/plain": Node("d/plain", b"plain", mode=0o640, uid=7, gid=8),
        "./e/./f": b"normalised",
        "link": symlink("link", "d/plain"),
        "hard": hard_link("hard", "d/plain", mode=0o640),
    }
    built = build(
        builder, "FROM busybox\nCOPY . /c\nRUN cd /c; cat link hard e/f; stat -c '%a %u:%g %n' d d/plain\n", files
    )
    assert "plainplainnormalised" in built.text
    assert "700 0:0 d\n640 0:0 d/plain\n" in built.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("COPY missing /", "COPY failed: file not found in build context or excluded by .dockerignore: stat missing: "),
        ("ADD missing /", "ADD failed: file not found in build context or excluded by .dockerignore: stat missing: "),
        ("COPY --from=busybox /missing /", "COPY failed: "),
    ],
)
def test_a_missing_source(line: str, words: str, builder: TempEngine) -> None:
    built = build(builder, f"FROM busybox\n{line}\nRUN echo never\n")
    assert built.error is not None
    assert built.error["error"].startswith(words)
    assert "Step 3" not in built.text


# --- q --------------------------------------------------------------------------------------------


def test_more_layers_than_can_be_mounted(builder: TempEngine) -> None:
    lines = "".join(f"COPY file /f{number}\n" for number in range(128))
    built = build(builder, f"FROM busybox\n{lines}", {"file": b"x"})
    assert built.error is not None
    assert built.error["error"] == "max depth exceeded: an image has at most 128 layers"


def test_steps_have_a_limit(builder: TempEngine) -> None:
    many = context("FROM busybox\n" + "ENV a=1\n" * 1000)
    assert refused(post(builder, many)) == "the Dockerfile has 1001 steps of at most 1000"


def test_a_value_that_is_known_at_its_step_names_its_line(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nARG port=99999\n\nEXPOSE $port\n")
    assert built.error is not None
    assert built.error["error"] == "dockerfile parse error on line 4: EXPOSE: invalid containerPort: 99999"


def test_quiet(builder: TempEngine) -> None:
    dockerfile = "FROM busybox\nRUN echo out\n"
    built = build(builder, dockerfile, q=1, t="silent")
    assert built.objects == [{"stream": f"{image(builder, 'silent')['Id']}\n"}]


def test_a_quiet_failure_says_everything(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN echo out; exit 4\n", q=1)
    assert "Step 1" in built.text and "out\n" in built.text
    assert built.code == 4
    assert "nknown instruction" in refused(post(builder, context("FROM busybox\nNONSENSE\n"), q=1))


# --- a client that leaves -------------------------------------------------------------------------


def _begin(engine: TempEngine, body: bytes, target: str, *, whole: bool = True) -> socket.socket:
    connection = client.connect(engine.socket)
    size = len(body) if whole else len(body) + 1_000_000
    connection.sendall(
        f"POST {target} HTTP/1.1\r\nHost: x\r\n".encode()
        + f"Content-Type: application/x-tar\r\nContent-Length: {size}\r\n\r\n".encode()
        + body
    )
    return connection


@pytest.mark.parametrize("parameters", ["", "q=1", "buildid=a", pytest.param("rm=0", marks=pytest.mark.own)])
def test_a_client_that_leaves_in_a_run(parameters: str, builder: TempEngine) -> None:
    body = context("FROM busybox\nRUN touch /began; sleep 600\n")
    with _begin(builder, body, f"/v1.24/build?nocache=1&{parameters}"):
        until("the step runs", lambda: _running(builder))
    until("the container is gone", lambda: not _running(builder))
    if parameters != "rm=0":
        until("it was removed", lambda: builder.containers() == [])


def _running(engine: TempEngine) -> list[str]:
    return [entry["Id"] for entry in engine.request("GET", "/v1.24/containers/json").json()]


def test_a_client_that_leaves_while_it_sends(builder: TempEngine) -> None:
    body = context("FROM busybox\nCOPY . /\n", {"a": bytes(1_000_000)})
    before = _images(builder)
    with _begin(builder, body[:600_000], "/v1.24/build", whole=False):
        pass
    assert build(builder, "FROM busybox\n").id
    assert builder.containers() == [] and _images(builder) == before


def _images(engine: TempEngine) -> set[str]:
    return {entry["Id"] for entry in engine.request("GET", "/v1.24/images/json?all=1").json()}


def _read_until(connection: socket.socket, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        received = connection.recv(65536)
        assert received, seen
        seen += received
    return seen


@contextlib.contextmanager
def _stalling() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A server that answers a request with the first bytes of a long body, and then waits for the
    client to leave; its URL, and the events that a request came and that the client left.
    """
    came, left = threading.Event(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-tar")
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(bytes(1000))
            self.wfile.flush()
            came.set()
            with contextlib.suppress(ConnectionResetError):  # it may have bytes that it never read
                assert not self.connection.recv(1)
            left.set()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with serving(Handler) as url:
        yield f"{url}/x.tar", came, left


@pytest.mark.own
@pytest.mark.parametrize("where", ["remote", "ADD"])
def test_a_client_that_leaves_in_a_download(where: str, builder: TempEngine) -> None:
    before = _images(builder)
    with _stalling() as (url, came, left):
        dockerfile = f"FROM busybox\nADD {url} /\n" if where == "ADD" else None
        target = "/v1.24/build?" + (f"remote={quote(url)}" if where == "remote" else "")
        with _begin(builder, context(dockerfile) if dockerfile else b"", target) as connection:
            if dockerfile:
                _read_until(connection, b"Step 2")
            assert came.wait(30 * PATIENCE)
            assert not left.is_set()
        assert left.wait(30 * PATIENCE)
    assert _images(builder) == before


@pytest.mark.own
def test_a_client_that_leaves_does_not_end_the_step_of_another(builder: TempEngine) -> None:
    """Equal steps of builds at once run once, and go on for the client that stays."""
    dockerfile = "FROM busybox\nRUN echo begun; until [ -e /go ]; do sleep 0.05; done; echo over\n"
    body = context(dockerfile)
    with _begin(builder, body, "/v1.24/build") as first:
        (identifier,) = until("the step runs", lambda: _running(builder))
        with _begin(builder, body, "/v1.24/build") as second:
            seen = _read_until(second, b"Running in")
            first.close()
            builder.touch(identifier, "/go")
            seen += _read_until(second, b"Successfully built")
    assert identifier[:12].encode() in seen and b"over" in seen
    assert builder.containers() == []


@pytest.mark.own
def test_a_client_that_half_closes_gets_its_image(builder: TempEngine) -> None:
    connection = _begin(builder, context("FROM busybox\nRUN sleep 0.2\n"), "/v1.24/build?nocache=1")
    connection.shutdown(socket.SHUT_WR)
    assert b"Successfully built" in client.read_to_end(connection)


@pytest.mark.own
def test_cancel_by_id(builder: TempEngine) -> None:
    answers: list[Any] = []

    def run() -> None:
        answers.append(post(builder, context("FROM busybox\nRUN sleep 600\n"), buildid="mine", nocache=1))

    building = threading.Thread(target=run)
    building.start()
    until("the step runs", lambda: _running(builder))
    assert builder.request("POST", "/v1.24/build/cancel?id=mine").status == 200
    building.join(30 * PATIENCE)
    built = read(answers[0])
    assert built.error == {"errorDetail": {"message": "Build cancelled"}, "error": "Build cancelled"}
    until("nothing is left", lambda: builder.containers() == [])
    assert builder.request("POST", "/v1.24/build/cancel").status == 400


# --- while it runs --------------------------------------------------------------------------------


def test_a_step_is_a_container(builder: TempEngine) -> None:
    """It is listed and inspected, takes an exec, has events, and is gone afterwards."""
    events = client.json_stream(builder.socket, "/v1.24/events?filters=" + quote('{"type":["container"]}'))
    answers: list[Any] = []
    dockerfile = "FROM busybox\nENV a=b\nRUN echo said; while [ ! -e /go ]; do sleep 0.05; done; cat /gone\n"
    building = threading.Thread(target=lambda: answers.append(post(builder, context(dockerfile), nocache=1)))
    building.start()
    (identifier,) = until("the step runs", lambda: _running(builder))
    try:
        shown = builder.inspect(identifier)
        assert shown["State"]["Running"] is True
        assert "a=b" in shown["Config"]["Env"]
        builder.docker("exec", identifier, "sh", "-c", "echo gone > /gone")
        builder.touch(identifier, "/go")
    finally:
        building.join(60 * PATIENCE)
    built = read(answers[0])
    assert "said\n" in built.text and "gone\n" in built.text
    assert identifier[:12] in built.text
    assert builder.containers() == []
    actions = []
    for event in events:
        if event["id"] != identifier:
            continue
        actions.append(event["Action"])
        if event["Action"] == "destroy":
            break
    wanted = ["create", "start", "die", "destroy"]
    assert [action for action in actions if action in wanted] == wanted


@pytest.mark.own  # dockerd gives it the log driver none
def test_a_step_has_logs(builder: TempEngine) -> None:
    body = context("FROM busybox\nRUN echo said; sleep 600\n")
    with _begin(builder, body, "/v1.24/build?nocache=1"):
        (identifier,) = until("the step runs", lambda: _running(builder))
        until("it has logs", lambda: b"said" in builder.logs(identifier))
        following = builder.popen("logs", "-f", identifier)
        assert following.stdout is not None
        assert following.stdout.readline() == b"said\n"
    assert following.communicate(timeout=30 * PATIENCE)[0] == b""


def test_steps_of_a_failed_build_are_images_when_it_ends(builder: TempEngine) -> None:
    for number in range(20):
        assert read(post(builder, context(f"FROM busybox\nLABEL number={number}\nCOPY missing /\n"))).error
        listed = builder.request("GET", "/v1.24/images/json?all=1").json()
        assert [each for each in listed if each["Labels"] == {"number": str(number)}]


def test_events_of_tags(builder: TempEngine) -> None:
    events = client.json_stream(builder.socket, "/v1.24/events?filters=" + quote('{"type":["image"]}'))
    built = build(builder, "FROM busybox\nLABEL a=b\n", t=["first:1", "second"])
    found = []
    for event in events:
        if event["Action"] == "tag":
            found.append((event["Actor"]["Attributes"]["name"], event["Actor"]["ID"]))
        if len(found) == 2:
            break
    identifier = image(builder, built.id)["Id"]
    assert found == [("first:1", identifier), ("second:latest", identifier)]


@pytest.mark.own
def test_prune(builder: TempEngine) -> None:
    """Nothing of a tagged image is lost; the step after a prune of all is not taken from the
    cache.
    """
    dockerfile = "FROM busybox\nRUN echo once\n"
    build(builder, dockerfile, t="kept")
    assert "Using cache" in build(builder, dockerfile, t="kept").text
    before = image(builder, "kept")
    answer = builder.request("POST", "/v1.24/build/prune?all=1")
    assert answer.status == 200
    report = answer.json()
    assert set(report) == {"CachesDeleted", "SpaceReclaimed"}
    assert report["SpaceReclaimed"] >= 0
    assert image(builder, "kept")["Id"] == before["Id"]
    assert builder.docker("run", "--rm", "--network", "none", "kept", "echo", "runs").out == "runs\n"
    for bad in ("keep-storage=x", "filters=x", "filters=" + quote(json.dumps({"nonsense": ["x"]}))):
        assert builder.request("POST", f"/v1.24/build/prune?{bad}").status == 400


def test_builds_at_once(builder: TempEngine) -> None:
    """Ten clients at once each get their own image."""
    answers: dict[int, Any] = {}

    def run(number: int) -> None:
        answers[number] = post(
            builder, context(f"FROM busybox\nRUN echo {number} > /n\nLABEL n={number}\n"), t=f"n{number}"
        )

    working = [threading.Thread(target=run, args=(number,)) for number in range(10)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join(120 * PATIENCE)
    for number in range(10):
        assert read(answers[number]).error is None
        assert image(builder, f"n{number}")["Config"]["Labels"] == {"n": str(number)}
    assert builder.containers() == []


def test_every_version_and_none(builder: TempEngine) -> None:
    body = context("FROM busybox\nLABEL a=b\n")
    found = {read(post(builder, body, api=f"v1.{minor}")).id for minor in range(18, 56)}
    found.add(read(builder.request("POST", f"/build?{query({})}", body)).id)
    assert len(found) == 1

"""Images created here: commits of containers in every state, imports from a body and a URL, and the
effect of `changes` on both."""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, busybox_layer, digest, directory, tar

pytestmark = pytest.mark.own


def commit(engine: TempEngine, container: str, body: Any = None, **query: str) -> str:
    answer = engine.request("POST", f"/v1.24/commit?{urlencode({'container': container, **query})}", body)
    assert answer.status == 201, answer
    return str(answer.json()["Id"])


def inspect(engine: TempEngine, image: str) -> Any:
    answer = engine.request("GET", f"/v1.24/images/{image}/json")
    assert answer.status == 200, answer
    return answer.json()


CHANGE = """
echo new > /new; echo changed > /etc/passwd; rm /etc/group; rm -r /home; mkdir /home; echo in > /home/in
ln /new /hard; ln -s nowhere /soft; mkfifo /pipe; chmod 4711 /new; chown 12:34 /home/in; mknod /tmp/null c 1 3
"""
SHOW = (
    "cat /new /etc/passwd; ls /etc/group; ls -ln /home/in /hard | cut -c1-24; "
    "readlink /soft; ls /home; ls -l /tmp/null | cut -c1-1"
)


def test_what_was_changed_and_the_rest(clean: TempEngine) -> None:
    container = clean.started("sh", "-c", CHANGE, Env=["A=1"], WorkingDir="/etc")
    assert clean.wait(container) == 0, clean.logs(container)
    image = commit(clean, container, repo="docker.io/library/made", tag="v1", author="me", comment="why")
    shown = clean.docker("run", "--rm", "--network", "none", "made:v1", "sh", "-c", SHOW, status=0)
    assert shown.out.splitlines() == [
        "new",
        "changed",
        "-rws--x--x    2 0       ",
        "-rw-r--r--    1 12      ",
        "nowhere",
        "in",
        "c",
    ]
    found = inspect(clean, image)
    base = inspect(clean, "busybox")
    assert found["RepoTags"] == ["made:v1"]
    assert (found["Author"], found["Comment"], found["Container"]) == ("me", "why", container)
    assert found["Config"]["Cmd"] == ["sh", "-c", CHANGE]
    assert "A=1" in found["Config"]["Env"] and found["Config"]["WorkingDir"] == "/etc"
    assert found["RootFS"]["Layers"][:-1] == base["RootFS"]["Layers"]
    history = clean.request("GET", f"/v1.24/images/{image}/history").json()
    assert (history[0]["Id"], history[0]["Comment"], history[0]["CreatedBy"]) == (image, "why", f"sh -c {CHANGE}")
    assert len(history) == len(clean.request("GET", "/v1.24/images/busybox/history").json()) + 1


def test_nothing_of_the_runtime_is_in_it(clean: TempEngine) -> None:
    container = clean.started("true")
    clean.wait(container)
    image = commit(clean, container)
    upper = Path(inspect(clean, image)["GraphDriver"]["Data"]["UpperDir"])
    assert not (upper / "dev").exists() and not (upper / "etc" / "hosts").exists()


def test_running_paused_and_created_containers(clean: TempEngine) -> None:
    running = clean.started("sh", "-c", "echo data > /data; sleep 1000")
    until("it has written", lambda: clean.docker("exec", running, "cat", "/data", status=None).out == "data\n")
    for query in ({}, {"pause": "0"}):
        image = commit(clean, running, **query)
        assert clean.inspect(running)["State"]["Status"] == "running"
        assert clean.docker("run", "--rm", "--network", "none", image, "cat", "/data").out == "data\n"
    clean.post(f"/containers/{running}/pause")
    commit(clean, running)
    assert clean.inspect(running)["State"]["Status"] == "paused"
    clean.post(f"/containers/{running}/unpause")
    created = clean.create("true")
    image = commit(clean, created)
    # nothing was changed: no layer
    assert inspect(clean, image)["RootFS"] == inspect(clean, "busybox")["RootFS"]
    history = clean.request("GET", f"/v1.24/images/{image}/history").json()
    assert history[0]["Size"] == 0


def test_a_changed_variable_stays_in_its_place(clean: TempEngine) -> None:
    container = clean.create("true", Env=["A=1", "B=2", "C=3"])
    answer = clean.request("POST", f"/v1.24/commit?container={container}&changes=ENV%20B=9%20D=4")
    environment = inspect(clean, answer.json()["Id"])["Config"]["Env"]
    assert [line for line in environment if line[1] == "="] == ["A=1", "B=9", "C=3", "D=4"]


def test_changes_and_a_body(clean: TempEngine) -> None:
    container = clean.create("true", Env=["KEEP=1", "OLD=1"], Labels={"a": "1"}, ExposedPorts={"1/tcp": {}})
    changes = [
        'CMD ["echo", "hi"]',
        "ENV OLD=2 NEW='a b'\nenv LAST last one",
        "LABEL b=2",
        "EXPOSE 80 90-91/udp",
        "WORKDIR /a",
        "WORKDIR b",
        "USER 1:2",
        'VOLUME ["/v w"]',
        "ONBUILD RUN true",
        "STOPSIGNAL SIGINT",
        "HEALTHCHECK --interval=1m30s --retries=4 CMD exit 0",
    ]
    query = "&".join(f"changes={quote(change)}" for change in changes)
    answer = clean.request(
        "POST", f"/v1.24/commit?container={container}&{query}", {"Entrypoint": None, "Env": ["BODY=1"]}
    )
    assert answer.status == 201, answer
    config = inspect(clean, answer.json()["Id"])["Config"]
    assert config["Cmd"] == ["echo", "hi"]
    environment = dict(line.split("=", 1) for line in config["Env"])
    assert {**environment, "PATH": ""} == {
        "PATH": "",
        "KEEP": "1",
        "OLD": "2",
        "NEW": "a b",
        "LAST": "last one",
        "BODY": "1",
    }
    assert config["Labels"] == {"a": "1", "b": "2"}
    assert set(config["ExposedPorts"]) == {"1/tcp", "80/tcp", "90/udp", "91/udp"}
    assert (config["WorkingDir"], config["User"], config["StopSignal"]) == ("/a/b", "1:2", "SIGINT")
    assert config["Volumes"] == {"/v w": {}} and config["OnBuild"] == ["RUN true"]
    assert config["Healthcheck"]["Test"] == ["CMD-SHELL", "exit 0"]
    assert (config["Healthcheck"]["Interval"], config["Healthcheck"]["Retries"]) == (90 * 10**9, 4)


@pytest.mark.parametrize(
    "change",
    ["RUN true", "FROM x", "CMD", "ENV a", "ENV a='b", "EXPOSE 70000", "HEALTHCHECK --x=1 CMD y", "ONBUILD FROM x"],
)
def test_bad_changes(clean: TempEngine, change: str) -> None:
    container = clean.create("true")
    for target in (f"commit?container={container}", "images/create?fromSrc=-"):
        assert clean.request("POST", f"/v1.24/{target}&changes={quote(change)}").status == 400, target


def test_refusals(clean: TempEngine) -> None:
    assert clean.request("POST", "/v1.24/commit?container=nothing").status == 404
    assert clean.request("POST", "/v1.24/commit").status == 400
    container = clean.create("true")
    assert clean.request("POST", f"/v1.24/commit?container={container}&repo=UPPER").status == 400
    assert clean.request("POST", f"/v1.24/commit?container={container}&repo=x&tag=a/b").status == 400


def test_images_that_were_made_from_others(own_engine: TempEngine) -> None:
    """Parents as in Docker: shown, kept for their children, removed with the last child unless they
    have a name."""

    def commit(of: str, name: str) -> str:
        container = own_engine.docker("create", of, "true").line
        made = own_engine.docker("commit", container, name).line
        own_engine.docker("rm", container)
        return made

    def delete(what: str, status: int = 200) -> Any:
        answer = own_engine.request("DELETE", f"/v1.24/images/{what}")
        assert answer.status == status, answer
        return answer.json()

    def ids(query: str = "") -> set[str]:
        return {each["Id"] for each in own_engine.request("GET", f"/v1.24/images/json{query}").json()}

    base = inspect(own_engine, "busybox")["Id"]
    one, other = commit("busybox", "one"), commit("busybox", "other")
    two = commit("one", "two")
    assert [inspect(own_engine, name)["Parent"] for name in ("busybox", "one", "two")] == ["", base, one]
    assert {each["Id"]: each["ParentId"] for each in own_engine.request("GET", "/v1.24/images/json").json()} == {
        base: "",
        one: base,
        other: base,
        two: one,
    }
    history = own_engine.request("GET", "/v1.24/images/two/history").json()
    assert [step["Id"] for step in history][:3] == [two, one, base]
    assert [step["Tags"] for step in history][:3] == [["two:latest"], ["one:latest"], ["busybox:latest"]]
    refused = f"conflict: unable to delete {one[7:19]} (cannot be forced) - image has dependent child images"
    for force in ("", "?force=1"):
        assert delete(one + force, 409) == {"message": refused}
    assert delete("one") == [{"Untagged": "one:latest"}]
    assert one not in ids() and one in ids("?all=1"), "it is there for what was made from it"
    assert ids('?filters={"dangling":["true"]}') == set()
    assert delete("busybox") == [{"Untagged": "busybox:latest"}]
    own_engine.restart()
    assert delete("two?noprune=1") == [{"Untagged": "two:latest"}, {"Deleted": two}]
    assert ids('?filters={"dangling":["true"]}') == {one}
    gone = [line["Deleted"] for line in delete(one) if "Deleted" in line]
    assert gone[0] == one and base not in gone, "another one needs that"
    gone = [line.get("Deleted") for line in delete("other")]
    assert gone[1] == other and base in gone, "with the last that was made from it"
    assert ids("?all=1") == set()


def test_commit_through_the_cli(clean: TempEngine) -> None:
    container = clean.started("sh", "-c", "echo one > /one")
    clean.wait(container)
    out = clean.docker("commit", "-a", "me", "-m", "text", "-c", "CMD cat /one", container, "team/made").out
    assert out.startswith("sha256:")
    assert clean.docker("run", "--rm", "--network", "none", "team/made").out == "one\n"
    saved = clean.request("GET", "/v1.24/images/team/made/get")
    clean.docker("rmi", "-f", "team/made")
    assert "Loaded image: team/made:latest" in clean.docker("load", input=saved.body).out


# --- import ---------------------------------------------------------------------------------------

ROOT = busybox_layer()[:-1024].rstrip(b"\0")
ROOT += bytes(-len(ROOT) % 512) + tar([directory("srv/"), Node("srv/file", b"imported")])


def bring(engine: TempEngine, body: bytes | None, **query: str) -> list[Any]:
    answer = engine.request("POST", f"/v1.24/images/create?{urlencode(query)}", body)
    assert answer.status == 200, answer
    return [json.loads(line) for line in answer.body.splitlines()]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_import_of_a_body(clean: TempEngine, pack: Any) -> None:
    said = bring(clean, pack(ROOT), fromSrc="-", repo="imported", tag="v1", message="text", changes="CMD cat /srv/file")
    found = inspect(clean, "imported:v1")
    assert said[-1] == {"status": found["Id"]}
    assert found["Comment"] == "text" and found["RootFS"]["Layers"] == [digest(ROOT)]
    assert clean.docker("run", "--rm", "--network", "none", "imported:v1").out == "imported"


def test_import_through_the_cli_and_without_a_name(clean: TempEngine) -> None:
    out = clean.docker("import", "-c", "ENV A=b", "-", "cli:import", input=ROOT).out
    assert out.startswith("sha256:")
    assert inspect(clean, "cli:import")["Config"]["Env"] == ["A=b"]
    said = bring(clean, ROOT, fromSrc="-")
    assert inspect(clean, said[-1]["status"])["RepoTags"] == []
    assert inspect(clean, said[-1]["status"])["Comment"] == "Imported from -"
    assert inspect(clean, bring(clean, ROOT, fromSrc="-", repo="with:tag")[-1]["status"])["RepoTags"] == ["with:tag"]


def test_import_from_a_url(clean: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "root.tar.gz").write_bytes(gzip.compress(ROOT))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        said = bring(clean, None, fromSrc=f"{url}/root.tar.gz", repo="fetched")
        assert said[0]["status"] == f"Downloading from {url}/root.tar.gz"
        assert inspect(clean, "fetched")["RootFS"]["Layers"] == [digest(ROOT)]
        secret = url.replace("//", "//me:secret@")
        said = bring(clean, None, fromSrc=f"{secret}/root.tar.gz", repo="fetched")
        assert said[0]["status"] == f"Downloading from {url}/root.tar.gz"
        assert inspect(clean, "fetched")["Comment"] == f"Imported from {url}/root.tar.gz"
        missing = clean.request("POST", f"/v1.24/images/create?fromSrc={url}/nothing")
        assert missing.status == 404 and "404" in missing.message, missing
        server.shutdown()
    gone = clean.request("POST", f"/v1.24/images/create?fromSrc={url}/root.tar.gz")
    assert gone.status == 500 and "refused" in gone.message, gone
    for strange in ("http://" + "a" * 70 + ".example/x", "http://..%2520/x"):
        refused = clean.request("POST", f"/v1.24/images/create?fromSrc={strange}")
        assert refused.status == 400 and "its host is not a valid name or address" in refused.message, refused
    for nowhere in (
        "ftp://x/y",
        "/etc/passwd",
        "http:///x",
        "https://",
        "http://[::1",
        "http://x:99999/",
        "http://x:y/",
    ):
        refused = clean.request("POST", f"/v1.24/images/create?fromSrc={nowhere}")
        assert refused.status == 400 and nowhere in refused.message, refused


def test_what_is_no_archive_leaves_nothing(clean: TempEngine) -> None:
    for body in (b"no archive" * 100, gzip.compress(ROOT)[:-100], ROOT[:5000]):
        assert "error" in bring(clean, body, fromSrc="-", repo="bad")[-1]
    assert clean.request("GET", "/v1.24/images/bad/json").status == 404

"""Images whose configuration is odd: a load refuses them in words, or they can be inspected,
listed, saved and used like any other.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, busybox_layer, digest, tar

BUSYBOX = busybox_layer()
NAME = "odd:latest"
TAR = {"Content-Type": "application/x-tar"}


def archive(document: dict[str, Any]) -> bytes:
    raw = json.dumps(document).encode()
    item = {"Config": "c.json", "RepoTags": [NAME], "Layers": ["l/layer.tar"]}
    return tar([Node("c.json", raw), Node("l/layer.tar", BUSYBOX), Node("manifest.json", json.dumps([item]).encode())])


def image(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": "2024-01-01T00:00:00Z",
        "config": {"Cmd": ["true"], **config},
        "rootfs": {"type": "layers", "diff_ids": [digest(BUSYBOX)]},
        "history": [{"created": "2024-01-01T00:00:00Z", "created_by": "x"}],
        **fields,
    }


def loaded(engine: TempEngine, document: dict[str, Any]) -> str:
    """Load it; the words of a refusal, "" without one."""
    answer = engine.request("POST", "/v1.51/images/load?quiet=1", archive(document), TAR)
    assert answer.status == 200, answer
    last = json.loads(answer.body.splitlines()[-1])
    assert ("error" in last) or last == {"stream": f"Loaded image: {NAME}\n"}, last
    return str(last.get("error", ""))


def used(engine: TempEngine) -> list[tuple[int, str]]:
    """Status and body of create, and of start where there is a container, with the image's own
    configuration and with another command.
    """
    found = []
    for body in ({"Image": NAME}, {"Image": NAME, "Cmd": ["true"], "Entrypoint": [""], "Env": ["A=b"], "User": "0"}):
        host = {"NetworkMode": "none", "PublishAllPorts": True}
        created = engine.request("POST", "/v1.51/containers/create", body | {"HostConfig": host})
        found.append((created.status, created.body.decode()))
        if created.status == 201:
            container = created.json()["Id"]
            for path in (f"/containers/{container}/json", "/containers/json?all=1"):
                assert engine.request("GET", f"/v1.51{path}").status == 200
            started = engine.request("POST", f"/v1.51/containers/{container}/start")
            found.append((started.status, started.body.decode()))
            committed = engine.request("POST", f"/v1.51/commit?container={container}&repo=odd&tag=2", {})
            assert committed.status == 201, committed
            assert engine.request("DELETE", f"/v1.51/containers/{container}?force=1&v=1").status == 204
    return found


def shown(engine: TempEngine, name: str) -> None:
    for version in ("1.18", "1.24", "1.43", "1.51", "1.55"):
        for path in ("json?all=1", f"{name}/json", f"{name}/history", f"get?names={name}"):
            answer = engine.request("GET", f"/v{version}/images/{path}")
            assert answer.status == 200, (path, answer)


def removed(engine: TempEngine) -> None:
    for name in (NAME, "odd:2"):
        engine.request("DELETE", f"/v1.51/images/{name}?force=1")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (image({}, created="yesterday"), "created: 'yesterday' is not an RFC 3339 time"),
        (image({}, history=[{"created": "2024"}]), "history[0].created: '2024' is not an RFC 3339 time"),
        (image({"Env": [5]}), "config.Env[0]: expected string, got integer"),
        (image({"Env": "A=b"}), "config.Env: expected array or null, got string"),
        (image({"ExposedPorts": {"80": 5}}), "config.ExposedPorts[...]: expected object, got integer"),
        (image({"ExposedPorts": ["80"]}), "config.ExposedPorts: expected object"),
        (image({"StopTimeout": 10**30}), "config.StopTimeout: expected integer <= 9223372036854775807"),
        (image({"Healthcheck": {"Retries": 10**30}}), "config.Healthcheck.Retries: expected integer <= "),
        (image({"Labels": {"a": 5}}), "config.Labels[...]: expected string, got integer"),
        (image({}, os="plan9"), 'operating system "plan9"'),
        (image({}, container_config=5), "container_config: expected object or null, got integer"),
    ],
)
def test_what_a_load_refuses(clean: TempEngine, document: dict[str, Any], words: str) -> None:
    assert words in loaded(clean, document)
    assert clean.request("GET", f"/v1.51/images/{NAME}/json").status == 404


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        ({"Env": ["A=b\0c"]}, 400, "environment variable 'A' must not contain a NUL character"),
        ({"Cmd": ["true", "\0"]}, 400, "must not contain a NUL character"),
        ({"Entrypoint": ["tr\0ue"]}, 400, "must not contain a NUL character"),
        ({"Volumes": {"/v\0": {}}}, 400, "must not contain a NUL character"),
        ({"Volumes": {"/": {}}}, 400, "destination can't be '/'"),
        ({"WorkingDir": "/a\0b"}, 400, "contains a NUL"),
        ({"Cmd": []}, 400, "No command specified"),
        ({"Env": ["A", "", "=b", "C=d"]}, 201, ""),
        ({"ExposedPorts": {"none": {}, "80-81/tcp": None}}, 201, ""),
    ],
)
def test_what_a_create_refuses(clean: TempEngine, config: dict[str, Any], status: int, words: str) -> None:
    assert loaded(clean, image(config)) == ""
    shown(clean, NAME)
    answer = clean.request("POST", "/v1.51/containers/create", {"Image": NAME})
    assert answer.status == status and words in answer.body.decode(), answer
    removed(clean)


@pytest.mark.parametrize("year", ["0001", "0500", "1676", "2263", "9999"])
def test_times_far_away(clean: TempEngine, year: str) -> None:
    created = f"{year}-06-01T00:00:00Z"
    assert loaded(clean, image({}, created=created, history=[{"created": created}])) == ""
    shown(clean, NAME)
    assert clean.request("GET", f"/v1.51/images/{NAME}/json").json()["Created"] == created
    removed(clean)


# --- any documents --------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ["/", "/v", "A=b", "A", "=", "", "80/tcp", "80-90", "nobody", "0:0", "SIGTERM", "999", "NONE", "CMD", "CMD-SHELL"]
)
NUMBER = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, -1, 2**31])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
WORDS = st.lists(TEXT, max_size=3)
SET = st.dictionaries(TEXT, st.sampled_from([{}, None]), max_size=3)
HEALTHCHECK = st.fixed_dictionaries(
    {}, optional={"Test": WORDS, "Interval": NUMBER, "Timeout": NUMBER, "Retries": NUMBER}
)
CONFIG = {
    "Env": WORDS,
    "Cmd": WORDS | TEXT,
    "Entrypoint": WORDS | TEXT,
    "User": TEXT,
    "WorkingDir": TEXT,
    "ExposedPorts": SET,
    "Volumes": SET,
    "Labels": st.dictionaries(TEXT, TEXT, max_size=3),
    "StopSignal": TEXT | st.integers(-5, 99),
    "StopTimeout": NUMBER,
    "Healthcheck": HEALTHCHECK,
    "OnBuild": WORDS,
    "Shell": WORDS,
    "Hostname": TEXT,
    "Domainname": TEXT,
    "MacAddress": TEXT,
    "NetworkDisabled": st.booleans(),
    "Tty": st.booleans(),
    "OpenStdin": st.booleans(),
}
FIELDS = {
    "created": st.sampled_from(["1970-01-01T00:00:00Z", "2262-04-12T00:00:00.5+14:00", "1600-01-01T00:00:00Z"]),
    "author": TEXT,
    "comment": TEXT,
    "architecture": TEXT,
    "variant": TEXT,
    "os.version": TEXT,
    "docker_version": TEXT,
    "container": TEXT,
    "container_config": st.fixed_dictionaries({}, optional=CONFIG),
    "history": st.lists(
        st.fixed_dictionaries({}, optional={"created_by": TEXT, "comment": TEXT, "empty_layer": st.booleans()}),
        max_size=3,
    ),
}


def fields(known: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields. Of every other document one has a value of any type."""
    of_any_type = st.dictionaries(st.sampled_from([*known]), ANYTHING, max_size=1)
    return st.builds(
        lambda typed, odd: typed | odd, st.fixed_dictionaries({}, optional=known), st.just({}) | of_any_type
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=fields(CONFIG), others=fields(FIELDS))
def test_any_document(engine: TempEngine, config: dict[str, Any], others: dict[str, Any]) -> None:
    refusal = loaded(engine, image(config, **others))
    if refusal:
        assert "internal" not in refusal
        assert engine.request("GET", f"/v1.51/images/{NAME}/json").status == 404
        return
    try:
        shown(engine, NAME)
        for status, body in used(engine):
            assert status in (201, 204, 400, 404), (status, body)
    finally:
        removed(engine)

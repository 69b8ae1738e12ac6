"""Builds that run at the same time, or follow each other, over the socket: what they share and what
they do not.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.builds.building import Built, build
from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.own


class Building(threading.Thread):
    """A build in a thread of its own."""

    def __init__(self, engine: TempEngine, dockerfile: str, **parameters: Any) -> None:
        super().__init__()
        self._what = engine, dockerfile
        self._parameters = parameters
        self.start()

    def run(self) -> None:
        self._built = build(*self._what, **self._parameters)

    @property
    def built(self) -> Built:
        self.join()
        return self._built


def cached(built: Built) -> int:
    assert built.id
    return built.text.count("Using cache")


def test_steps_after_a_copy_of_a_stage_are_found_the_second_time(builder: TempEngine) -> None:
    dockerfile = "FROM busybox AS a\nRUN echo x > /x\nFROM busybox\nCOPY --from=a /x /y\nRUN cat /y\n"
    first, second = build(builder, dockerfile), build(builder, dockerfile)
    assert cached(first) == 0 and cached(second) == 3
    assert second.id == first.id


def test_a_run_is_shared_only_by_builds_with_the_same_limits(builder: TempEngine) -> None:
    """A step that fails for one build's limits does not fail for the other."""
    dockerfile = "FROM busybox\nRUN until [ -e /go ]; do sleep 0.05; done; test $(ulimit -n) -gt 100\n"
    limit = [{"Name": "nofile", "Soft": 64, "Hard": 64}]
    builds = [Building(builder, dockerfile, ulimits=limit), Building(builder, dockerfile)]

    def running() -> list[str]:
        return [each["Id"] for each in builder.request("GET", "/v1.24/containers/json").json()]

    until("a step of each runs", lambda: len(running()) == 2)
    for identifier in running():
        builder.touch(identifier, "/go")
    assert builds[0].built.code == 1
    assert builds[1].built.id


def test_locked_caches_in_any_order(builder: TempEngine) -> None:
    def dockerfile(*caches: str) -> str:
        mounts = " ".join(
            f"--mount=type=cache,id={each},target=/{number}{each},sharing=locked" for number, each in enumerate(caches)
        )
        return f"FROM busybox\nRUN {mounts} sleep 0.3\n"

    builds = [Building(builder, dockerfile(*each), nocache=1) for each in ("ab", "ba", "aa")]
    assert all(each.built.id for each in builds)


# --- stages ---------------------------------------------------------------------------------------


def test_a_trigger_of_a_base_copies_from_a_stage_that_nothing_else_needs(builder: TempEngine) -> None:
    build(builder, "FROM busybox\nONBUILD COPY --from=made /x /y\n", t="trigger:1")
    unused = "FROM missing.invalid/x AS unused\n"
    stages = "FROM busybox AS first\nRUN echo x > /x\nFROM first AS made\nRUN echo made >> /x\n"
    built = build(builder, f"{unused}{stages}FROM trigger:1\nRUN cat /y\n")
    assert built.id
    assert "Step : RUN echo made >> /x\n" in built.text and "x\nmade\n" in built.text


def test_triggers_by_which_stages_wait_for_each_other(builder: TempEngine) -> None:
    build(builder, "FROM busybox\nONBUILD COPY --from=b /etc/passwd /y\n", t="trigger:1")
    for dockerfile in (
        "FROM trigger:1 AS b\n",
        "FROM trigger:1 AS a\nFROM busybox AS b\nCOPY --from=a /y /z\nFROM busybox\nCOPY --from=b /z /\n",
    ):
        built = build(builder, dockerfile)
        assert built.error is not None
        assert "circular dependency detected on stage: " in built.error["error"]


def test_a_later_stage_that_fails_first_shows_its_output(builder: TempEngine) -> None:
    dockerfile = (
        "FROM busybox AS a\nRUN sleep 600\n"
        "FROM busybox AS b\nRUN echo why; exit 3\n"
        "FROM busybox\nCOPY --from=a /x /\nCOPY --from=b /x /\n"
    )
    built = build(builder, dockerfile)
    assert built.code == 3
    assert "Step 4 : RUN echo why; exit 3\n" in built.text and "why\n" in built.text


# --- what belongs to a key ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "hits"),
    [
        ({"memory": 64 << 20, "labels": {}}, 1),
        ({"networkmode": "none"}, 0),
        ({"extrahosts": "a:1.2.3.4"}, 0),
        ({"buildargs": {"SOURCE_DATE_EPOCH": "0"}}, 0),
        ({"buildargs": {"HTTP_PROXY": "http://x"}}, 1),
        ({"rm": 0, "forcerm": 0}, 1),
    ],
)
def test_parameters_in_the_key_of_a_run(builder: TempEngine, parameters: dict[str, Any], hits: int) -> None:
    dockerfile = "FROM busybox\nRUN true\n"
    assert cached(build(builder, dockerfile)) == 0
    assert cached(build(builder, dockerfile, **parameters)) == hits


@pytest.mark.parametrize(("mount", "hits"), [("mode=0700", 0), ("uid=1", 0), ("gid=1", 0), ("sharing=locked", 1)])
def test_options_of_mounts_in_the_key_of_a_run(builder: TempEngine, mount: str, hits: int) -> None:
    dockerfile = "FROM busybox\nRUN --mount=type=cache,id=k,target=/c{} true\n"
    assert cached(build(builder, dockerfile.format(""))) == 0
    assert cached(build(builder, dockerfile.format(f",{mount}"))) == hits


def test_what_rm_0_makes_is_what_rm_makes(builder: TempEngine) -> None:
    """Changes of declared volumes and mount points of the engine are in neither."""
    dockerfile = (
        "FROM busybox\nRUN mkdir -p /v/w /gone && echo 1 > /v/old\nVOLUME /v\n"
        "RUN --mount=type=tmpfs,target=/mnt/x "
        "rm -r /v/old /gone; echo 1 > /v/new; mkdir /made; ln /etc/passwd /made/p\n"
        "RUN find /v /gone /mnt /made 2>/dev/null | sort\n"
    )
    listed = []
    for remove in (1, 0):
        built = build(builder, dockerfile, nocache=1, rm=remove)
        assert built.id
        listed.append([line for line in built.lines if line.startswith("/")])
    assert listed[0] == listed[1] == ["/made", "/made/p", "/v", "/v/old", "/v/w"]


def test_a_writable_bind_of_a_file(builder: TempEngine) -> None:
    dockerfile = "FROM busybox\nRUN --mount=type=bind,source=a,target=/b,rw cat /b; echo 2 >> /b; cat /b; ls -l /b\n"
    built = build(builder, dockerfile, {"a": b"1\n"})
    assert built.id and built.text.count("1\n") >= 2 and "2\n" in built.text


def test_the_target_s_name_and_the_epoch_with_cachefrom(builder: TempEngine) -> None:
    dockerfile = "FROM busybox AS there\nARG TARGETSTAGE\nRUN echo $TARGETSTAGE > /x; cat /x\nENV a=b\n"
    built = build(builder, dockerfile, target="there", t="there:1")
    assert "there\n" in built.text
    epoch = {"SOURCE_DATE_EPOCH": "1"}
    dockerfile = dockerfile.replace("a=b", "a=c")
    again = build(builder, dockerfile, cachefrom=["there:1"], target="there", buildargs=epoch)
    assert cached(again) == 2
    history = builder.request("GET", f"/v1.24/images/{again.id}/history").json()
    assert [entry["Created"] for entry in history[:3]] == [1] * 3
    # The fixture removes images in the order of their times.
    assert builder.request("DELETE", f"/v1.24/images/{again.id}").status == 200


def test_a_bind_s_source_is_a_name_and_its_target_is_not_the_root(builder: TempEngine) -> None:
    files = {"a[1]": b"one\n", "a*/b": b"two\n", "a1": b""}
    mounts = "--mount=type=bind,source=a[1],target=/m0 --mount=type=bind,source=a*,target=/m1"
    built = build(builder, f"FROM busybox\nRUN {mounts} cat /m0 /m1/b\n", files)
    assert built.id and "one\ntwo\n" in built.text
    for mount in ("type=bind,target=/", "type=tmpfs,target=..", "type=cache,target=/a/.."):
        built = build(builder, f"FROM busybox\nRUN --mount={mount} true\n")
        assert built.error is not None and 'invalid mount target "/"' in built.error["error"]


def test_a_copy_from_a_stage_of_a_name_that_is_not_text(builder: TempEngine) -> None:
    dockerfile = (
        b"FROM busybox AS a\nRUN echo x > /$(printf 'a\\377')\nFROM busybox\nCOPY --from=a /a\xff /b\nRUN cat /b\n"
    )
    assert "x\n" in build(builder, dockerfile).text
    assert cached(build(builder, dockerfile)) == 3

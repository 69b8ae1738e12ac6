"""The views of a record: the text of Status, the list's summary, inspect."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers import views
from engine.containers.lifecycle import State
from engine.containers.store import ContainerRecord, Status
from engine.wire.containers import Config, EndpointSettings, HostConfig

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "Less than a second"),
        (1.5, "1 second"),
        (59.9, "59 seconds"),
        (60, "About a minute"),
        (119, "About a minute"),
        (120, "2 minutes"),
        (3599, "59 minutes"),
        (3600, "About an hour"),
        (5399, "About an hour"),
        (5400, "2 hours"),
        (47 * 3600, "47 hours"),
        (48 * 3600, "2 days"),
        (13 * 86400, "13 days"),
        (14 * 86400, "2 weeks"),
        (60 * 86400, "2 months"),
        (730 * 86400, "2 years"),
    ],
)
def test_durations_in_dockers_words(seconds: float, words: str) -> None:
    assert views.human_duration(seconds)[0] == words


@given(st.floats(0, 4e7))
def test_a_duration_stays_true_until_it_says(seconds: float) -> None:
    words, until = views.human_duration(seconds)
    assert until > seconds
    assert views.human_duration((seconds + until) / 2)[0] == words
    assert views.human_duration(until - 1e-3 if until - 1e-3 > seconds else seconds)[0] == words


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(), "Created"),
        (Status(state=State.RUNNING, started_at=97 * SECOND), "Up 3 seconds"),
        (Status(state=State.PAUSED, started_at=97 * SECOND), "Up 3 seconds (Paused)"),
        (Status(state=State.EXITED, exit_code=137, finished_at=90 * SECOND), "Exited (137) 10 seconds ago"),
        (Status(state=State.RESTARTING, exit_code=1, finished_at=98 * SECOND), "Restarting (1) 2 seconds ago"),
        (Status(state=State.REMOVING, finished_at=98 * SECOND), "Removal In Progress"),
    ],
)
def test_status_text(status: Status, text: str) -> None:
    shown, until = views.status_text(status, 100 * SECOND)
    assert shown == text and until > 100 * SECOND


RECORD = ContainerRecord(
    id="ab" * 32,
    name="web",
    created=1_700_000_000 * SECOND + 5,
    image_id="sha256:" + "1" * 64,
    parent="",
    path="sh",
    args=("-c", "echo hi"),
    config=Config(image="busybox", cmd=["sh", "-c", "echo hi"], exposed_ports={"80/tcp": {}}, labels={"a": "b"}),
    host=HostConfig(network_mode="default"),
    networks={
        "bridge": EndpointSettings(
            ip_address="172.17.0.2", gateway="172.17.0.1", ip_prefix_len=16, mac_address="02:42:ac:11:00:02"
        )
    },
    status=Status(state=State.RUNNING, pid=42, started_at=1_700_000_001 * SECOND),
)


def test_summary_has_what_the_specification_lists() -> None:
    shown = msgspec.to_builtins(views.summary(RECORD, ["/" + RECORD.name], "Up 1 second"))
    assert shown["Names"] == ["/web"] and shown["Image"] == "busybox" and shown["Created"] == 1_700_000_000
    assert shown["Command"] == "sh -c 'echo hi'" and shown["State"] == "running"
    assert shown["Ports"] == [{"PrivatePort": 80, "Type": "tcp"}]
    assert shown["HostConfig"] == {"NetworkMode": "default"} and shown["Labels"] == {"a": "b"}
    assert shown["NetworkSettings"]["Networks"]["bridge"]["IPAddress"] == "172.17.0.2"
    assert "SizeRw" not in shown and shown["Mounts"] == []


@given(st.text(), st.text(), st.text())
def test_the_status_of_an_encoded_summary_is_replaced_and_nothing_else(key: str, value: str, name: str) -> None:
    config = msgspec.structs.replace(RECORD.config, labels={"Status": "", key: value, '"Status":"': '"Status":"x"'})
    options = {"Status": "", key: value}
    networks = {"Status": EndpointSettings(aliases=['"Status":"', name], driver_opts=options), name: EndpointSettings()}
    host = msgspec.structs.replace(RECORD.host, annotations=options)
    record = msgspec.structs.replace(RECORD, config=config, networks=networks, host=host)
    before, after = (
        msgspec.json.encode(views.summary(record, ["/" + name], text))
        for text in ("Up 9 seconds", "Up 10 seconds (Paused)")
    )
    assert views.with_status(before, "Up 10 seconds (Paused)") == after
    sized = msgspec.structs.replace(views.summary(record, ["/" + name], "Up"), size_rw=1, size_root_fs=23)
    plain = msgspec.json.encode(views.summary(record, ["/" + name], "Up"))
    assert views.with_sizes(plain, 1, 23) == msgspec.json.encode(sized)


def test_inspect_shows_the_state_and_the_files() -> None:
    shown = msgspec.to_builtins(views.inspect(RECORD, Path("/c"), {"UpperDir": "/u"}))
    state = shown["State"]
    assert state["Running"] is True and state["Status"] == "running" and state["Pid"] == 42
    assert state["StartedAt"] == "2023-11-14T22:13:21Z" and state["FinishedAt"] == "0001-01-01T00:00:00Z"
    assert shown["Created"] == "2023-11-14T22:13:20.000000005Z" and shown["Name"] == "/web"
    assert shown["LogPath"] == f"/c/{RECORD.id}-json.log" or RECORD.host.log_config.type == ""
    assert shown["HostConfig"]["MemorySwappiness"] is None and shown["HostConfig"]["Dns"] == []
    assert shown["NetworkSettings"]["Networks"]["bridge"]["IPAddress"] == "172.17.0.2"
    assert shown["NetworkSettings"]["Ports"] == {"80/tcp": None}
    assert shown["GraphDriver"] == {"Name": "overlay2", "Data": {"UpperDir": "/u"}}
    assert shown["ExecIDs"] is None and "SizeRw" not in shown


@pytest.mark.parametrize(
    ("record", "mac"),
    [
        ({"macs": {"bridge": "02:42:00:00:00:01", "other": "02:42:00:00:00:02"}}, "02:42:00:00:00:01"),
        ({"macs": {"other": "02:42:00:00:00:02"}}, None),
        ({"config": Config(mac_address="02:42:00:00:00:03")}, "02:42:00:00:00:03"),
    ],
)
def test_the_requested_mac_of_the_main_network_is_shown_on_request(record: dict[str, Any], mac: str | None) -> None:
    asked = msgspec.structs.replace(RECORD, **record)
    assert msgspec.to_builtins(views.inspect(asked, Path("/c"), {}, mac=True))["Config"].get("MacAddress") == mac
    assert "MacAddress" not in msgspec.to_builtins(views.inspect(asked, Path("/c"), {}))["Config"]


def test_a_container_that_ended_shows_no_ports_and_no_sandbox() -> None:
    ended = msgspec.structs.replace(RECORD, status=Status(state=State.EXITED, exit_code=3, finished_at=SECOND))
    shown = msgspec.to_builtins(views.inspect(ended, Path("/c"), {}))
    assert shown["NetworkSettings"]["SandboxKey"] == "" and shown["NetworkSettings"]["Ports"] == {}
    assert shown["State"]["ExitCode"] == 3 and shown["State"]["Running"] is False

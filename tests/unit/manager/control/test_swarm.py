"""The swarm: inspect, update, rotation of tokens and of the CA, /info; and what all verbs share."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError, Unimplemented, WrongState
from engine.manager import roots
from engine.manager.certificates import digest, new_root
from engine.manager.control import validate
from engine.manager.control.context import OutOfSequence
from engine.manager.control.table import VERBS
from engine.manager.records import CLUSTER, LEADER, Leader
from engine.manager.store import Put
from engine.swarm_session.messages import Call
from engine.swarm_session.states import Availability, Role
from engine.wire.swarm import InitRequest
from tests.support import PATIENCE
from tests.unit.manager.control.conftest import NODE, Swarm, spec


async def test_inspect(swarm: Swarm) -> None:
    await swarm.found()
    found = await swarm.swarm_inspect()
    assert len(found["ID"]) == 25 and found["Version"]["Index"] > 0
    assert found["JoinTokens"]["Worker"].startswith("SWMTKN-1-")
    assert found["JoinTokens"]["Worker"] != found["JoinTokens"]["Manager"]
    assert found["Spec"]["Name"] == "default"
    assert found["Spec"]["Orchestration"] == {"TaskHistoryRetentionLimit": 5}
    assert found["Spec"]["Raft"] == {
        "SnapshotInterval": 10000, "KeepOldSnapshots": 0, "LogEntriesForSlowFollowers": 500,
        "ElectionTick": 10, "HeartbeatTick": 1,
    }  # fmt: skip
    assert found["Spec"]["Dispatcher"] == {"HeartbeatPeriod": 5_000_000_000}
    assert found["Spec"]["CAConfig"] == {"NodeCertExpiry": 7_776_000_000_000_000}
    assert found["RootRotationInProgress"] is False
    assert found["TLSInfo"]["TrustRoot"].startswith("-----BEGIN CERTIFICATE-----")


async def test_update(swarm: Swarm) -> None:
    await swarm.found()
    before = await swarm.swarm_inspect()
    swarm.clock.set(1)
    body = {"Orchestration": {"TaskHistoryRetentionLimit": 3}, "Labels": {"a": "b"}}
    assert await swarm.swarm_update(body=body, version=before["Version"]["Index"]) is None
    after = await swarm.swarm_inspect()
    assert after["Spec"] == before["Spec"] | body
    assert after["JoinTokens"] == before["JoinTokens"]
    assert after["UpdatedAt"] > after["CreatedAt"]
    with pytest.raises(OutOfSequence, match="update out of sequence"):
        await swarm.swarm_update(body=body, version=before["Version"]["Index"])
    with pytest.raises(InvalidParameter, match="version"):
        await swarm.swarm_update(body=body)
    body = {"Raft": {"ElectionTick": 11, "HeartbeatTick": 2}, "Dispatcher": {"HeartbeatPeriod": 11_000_000_000}}
    await swarm.swarm_update(body=body, version=after["Version"]["Index"])
    last = (await swarm.swarm_inspect())["Spec"]
    assert last["Raft"] == before["Spec"]["Raft"] | body["Raft"] and last["Labels"] == {}
    assert last["Orchestration"] == {"TaskHistoryRetentionLimit": 3}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"Name": "other"}, "Name: invalid value 'other'"),
        ({"CAConfig": {"NodeCertExpiry": 1_800_000_000_000}}, "minimum certificate expiry time"),
        ({"CAConfig": {"NodeCertExpiry": -1}}, "NodeCertExpiry"),
        ({"CAConfig": {"ExternalCAs": [{"Protocol": "acme", "URL": "https://a"}]}}, "Protocol: invalid value 'acme'"),
        ({"CAConfig": {"ExternalCAs": [{"Protocol": "cfssl", "URL": "a"}]}}, "URL: invalid value 'a'"),
        ({"Dispatcher": {"HeartbeatPeriod": -1}}, "HeartbeatPeriod: invalid value -1"),
        ({"Raft": {"ElectionTick": 1}}, "ElectionTick: invalid value 1: it must be greater than HeartbeatTick"),
        ({"Raft": {"HeartbeatTick": 10}}, "ElectionTick"),
        ({"Raft": {"HeartbeatTick": -1}}, "HeartbeatTick"),
        ({"Raft": {"SnapshotInterval": -5}}, "SnapshotInterval"),
        ({"Raft": {"KeepOldSnapshots": -5}}, "KeepOldSnapshots"),
        ({"Raft": {"LogEntriesForSlowFollowers": 1 << 40}}, "LogEntriesForSlowFollowers"),
        ({"TaskDefaults": {"LogDriver": {"Options": {"a": "b"}}}}, "LogDriver"),
        (
            {"TaskDefaults": {"LogDriver": {"Name": "syslog", "Options": {"a": "b"}}}},
            r"TaskDefaults\.LogDriver: unknown log opt 'a' for syslog log driver",
        ),
        ({"TaskDefaults": {"LogDriver": {"Name": "awslogs"}}}, r"TaskDefaults\.LogDriver: .*'awslogs-group'"),
        ({"Labels": {"": "b"}}, "Labels"),
        ({"Labels": []}, "Labels"),
    ],
)
async def test_bad_settings(swarm: Swarm, body: dict[str, Any], words: str) -> None:
    await swarm.found()
    index = (await swarm.swarm_inspect())["Version"]["Index"]
    with pytest.raises(InvalidParameter, match=words):
        await swarm.swarm_update(body=body, version=index)
    assert (await swarm.swarm_inspect())["Version"]["Index"] == index


async def test_a_default_log_driver(swarm: Swarm) -> None:
    """That of another engine, or a plugin, may exist on other nodes."""
    await swarm.found()
    for driver in (
        {"Name": "syslog", "Options": {"syslog-address": "udp://192.0.2.1:514"}},
        {"Name": "papyrus", "Options": {"a": "b"}},
        {"Name": "none"},
    ):
        found = await swarm.swarm_inspect()
        await swarm.swarm_update(body={"TaskDefaults": {"LogDriver": driver}}, version=found["Version"]["Index"])
        assert (await swarm.swarm_inspect())["Spec"]["TaskDefaults"]["LogDriver"] == driver


INIT = [
    ({"Availability": "asleep"}, "Availability: invalid value 'asleep'"),
    ({"DataPathPort": 80}, "DataPathPort: invalid value 80"),
    ({"DataPathPort": 50000}, "DataPathPort: invalid value 50000"),
    ({"SubnetSize": 30}, "SubnetSize: invalid value 30"),
    ({"SubnetSize": -1}, "SubnetSize: invalid value -1"),
    ({"DefaultAddrPool": ["x"]}, "DefaultAddrPool: invalid value 'x'"),
    ({"DefaultAddrPool": ["fd00::/8"]}, "IPv4"),
    ({"DefaultAddrPool": ["10.0.0.0/28"]}, "SubnetSize: invalid value 24"),
    ({"DefaultAddrPool": ["10.0.0.0/8", "10.1.0.0/16"]}, "overlaps"),
]


@pytest.mark.parametrize(("body", "words"), INIT)
def test_bad_requests_to_init(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        validate.init_request(msgspec.convert(body, InitRequest))


def test_requests_to_init() -> None:
    validate.init_request(InitRequest())
    good = InitRequest(default_addr_pool=["10.0.0.0/8", "172.16.0.0/12"], subnet_size=26, data_path_port=7789)
    validate.init_request(good)
    with pytest.raises(Unimplemented, match="AutoLockManagers"):
        validate.init_request(InitRequest(auto_lock_managers=True))
    assert validate.availability("") == validate.availability("ACTIVE") == Availability.ACTIVE


async def test_autolock_is_not_there(swarm: Swarm) -> None:
    await swarm.found()
    index = (await swarm.swarm_inspect())["Version"]["Index"]
    with pytest.raises(Unimplemented, match="AutoLockManagers"):
        await swarm.swarm_update(body={"EncryptionConfig": {"AutoLockManagers": True}}, version=index)
    with pytest.raises(Unimplemented, match="rotateManagerUnlockKey"):
        await swarm.swarm_update(body={}, version=index, rotate_manager_unlock_key=True)
    assert await swarm.swarm_unlockkey() == {"UnlockKey": ""}


async def test_rotation_of_tokens(swarm: Swarm) -> None:
    await swarm.found()
    first = await swarm.swarm_inspect()
    await swarm.swarm_update(body=first["Spec"], version=first["Version"]["Index"], rotate_worker_token=True)
    second = await swarm.swarm_inspect()
    assert second["JoinTokens"]["Worker"] != first["JoinTokens"]["Worker"]
    assert second["JoinTokens"]["Worker"].split("-")[2] == first["JoinTokens"]["Worker"].split("-")[2]
    assert second["JoinTokens"]["Manager"] == first["JoinTokens"]["Manager"]
    await swarm.swarm_update(body=first["Spec"], version=second["Version"]["Index"], rotate_manager_token=True)
    third = await swarm.swarm_inspect()
    assert third["JoinTokens"]["Worker"] == second["JoinTokens"]["Worker"]
    assert third["JoinTokens"]["Manager"] != second["JoinTokens"]["Manager"]


async def test_rotation_of_the_ca(swarm: Swarm) -> None:
    await swarm.found()
    first = await swarm.swarm_inspect()
    body = first["Spec"] | {"CAConfig": {"ForceRotate": 1}}
    await swarm.swarm_update(body=body, version=first["Version"]["Index"])
    second = await swarm.swarm_inspect()
    assert second["RootRotationInProgress"] is True
    assert second["Spec"]["CAConfig"]["ForceRotate"] == 1
    assert "SigningCAKey" not in str(second)
    assert second["TLSInfo"]["TrustRoot"] == first["TLSInfo"]["TrustRoot"]
    assert second["TLSInfo"]["CertIssuerPublicKey"] != first["TLSInfo"]["CertIssuerPublicKey"]
    body = first["Spec"] | {"CAConfig": {"ForceRotate": 1, "SigningCACert": first["TLSInfo"]["TrustRoot"]}}
    await swarm.swarm_update(body=body, version=second["Version"]["Index"])
    back = await swarm.swarm_inspect()
    assert back["RootRotationInProgress"] is True, "nodes may have certificates of the other root"
    assert back["TLSInfo"] == first["TLSInfo"]


async def test_rotations_without_end_are_refused(swarm: Swarm) -> None:
    await swarm.found()

    async def rotate(count: int) -> None:
        before = await swarm.swarm_inspect()
        body = before["Spec"] | {"CAConfig": {"ForceRotate": count}}
        await swarm.swarm_update(body=body, version=before["Version"]["Index"])

    for count in range(1, roots.MOST_ABANDONED + 1):
        await rotate(count)
    before = await swarm.swarm_inspect()
    with pytest.raises(WrongState, match="no more roots of abandoned rotations are kept"):
        await rotate(100)
    assert await swarm.swarm_inspect() == before


async def test_issuers_of_nodes(swarm: Swarm) -> None:
    """As the docker CLI compares them."""
    await swarm.found()
    cluster = swarm.store.record(CLUSTER)
    assert cluster is not None
    worker = await swarm.node("w1", issuer=digest(cluster.root))
    await swarm.node("w2", issuer="of another swarm")
    first = await swarm.swarm_inspect()
    assert (await swarm.nodes_inspect(worker))["Description"]["TLSInfo"] == first["TLSInfo"]
    assert (await swarm.nodes_inspect("w2"))["Description"]["TLSInfo"] == {}
    body = first["Spec"] | {"CAConfig": {"ForceRotate": 1}}
    await swarm.swarm_update(body=body, version=first["Version"]["Index"])
    second = await swarm.swarm_inspect()
    assert (await swarm.nodes_inspect(worker))["Description"]["TLSInfo"] == first["TLSInfo"] != second["TLSInfo"]
    cluster = swarm.store.record(CLUSTER)
    assert cluster is not None
    renewed = await swarm.node("w3", issuer=digest(cluster.rotation))
    assert (await swarm.nodes_inspect(renewed))["Description"]["TLSInfo"] == second["TLSInfo"]
    await swarm.swarm_update(body=body | {"CAConfig": {"ForceRotate": 2}}, version=second["Version"]["Index"])
    assert (await swarm.nodes_inspect(renewed))["Description"]["TLSInfo"] == second["TLSInfo"], "an abandoned one"


async def test_a_root_of_the_operator_is_not_shown(swarm: Swarm) -> None:
    """The settings that a client has read and sends again leave the CA as it is."""
    await swarm.found()
    pem, key = new_root(swarm.clock.now())
    before = await swarm.swarm_inspect()
    body = before["Spec"] | {"CAConfig": {"SigningCACert": pem, "SigningCAKey": key}}
    await swarm.swarm_update(body=body, version=before["Version"]["Index"])
    shown = await swarm.swarm_inspect()
    for settings in (shown["Spec"], (await swarm.call("info"))["Cluster"]["Spec"]):
        assert not {"SigningCACert", "SigningCAKey"} & settings["CAConfig"].keys()
    cluster = swarm.store.record(CLUSTER)
    assert cluster is not None and cluster.rotation == pem
    await swarm.swarm_update(body=shown["Spec"], version=shown["Version"]["Index"])
    again = swarm.store.record(CLUSTER)
    assert again is not None and (again.root, again.rotation) == (cluster.root, pem)


async def test_info(swarm: Swarm) -> None:
    assert await swarm.call("info") == {
        "Error": "", "RemoteManagers": [], "Nodes": 0, "Managers": 0, "Cluster": None,
    }  # fmt: skip
    await swarm.found()
    await swarm.node("w1")
    await swarm.node("m2", role=Role.MANAGER)
    found = await swarm.call("info")
    assert (found["Nodes"], found["Managers"]) == (3, 2)
    assert found["RemoteManagers"] == [{"NodeID": NODE, "Addr": "10.0.0.1:2377"}]
    assert found["Cluster"]["ID"] == (await swarm.swarm_inspect())["ID"]
    assert "JoinTokens" not in str(found) and "SWMTKN" not in str(found)


async def test_an_unknown_verb(swarm: Swarm) -> None:
    with pytest.raises(NotFound, match=r"no such verb: services\.destroy"):
        await swarm.call("services.destroy")


async def test_reads_without_quorum_warn(swarm: Swarm, etcd: Any, clock: Any) -> None:
    """They answer with what the cache has."""
    await swarm.found()
    await swarm.service()
    etcd.down = True
    reading = asyncio.create_task(swarm.control.call(Call(seq=1, verb="services.list")))
    await clock.advance(6)
    done = await asyncio.wait_for(reading, 5 * PATIENCE)
    assert b'"web"' in done.body and "lost its quorum" in done.warning
    done = await asyncio.wait_for(swarm.control.call(Call(seq=1, verb="info")), 1)
    assert not done.warning


async def test_no_manager_leads_as_far_as_one_without_etcd_knows(swarm: Swarm, etcd: Any, clock: Any) -> None:
    """Its own records say that it does: they expire where it cannot see it."""
    await swarm.found()
    await swarm.store.commit([Put(LEADER, "", Leader(NODE, 1))])
    (node,) = await swarm.nodes_list()
    assert node["ManagerStatus"] == {"Leader": True, "Reachability": "reachable", "Addr": "10.0.0.1:2377"}
    etcd.down = True
    reading = asyncio.create_task(swarm.control.call(Call(seq=1, verb="nodes.list")))
    await clock.advance(6)
    done = await asyncio.wait_for(reading, 5 * PATIENCE)
    (node,) = msgspec.json.decode(done.body)
    assert node["ManagerStatus"] == {"Reachability": "unknown", "Addr": "10.0.0.1:2377"}


async def test_writes_without_quorum_fail_in_time(swarm: Swarm, etcd: Any, clock: Any) -> None:
    await swarm.found()
    etcd.down = True
    writing = asyncio.create_task(swarm.services_create(body=spec()))
    await clock.advance(22)
    with pytest.raises(ServerError, match="context deadline exceeded"):
        await asyncio.wait_for(writing, 5 * PATIENCE)
    assert swarm.store.get(CLUSTER) is not None


@pytest.mark.parametrize("verb", sorted(VERBS))
@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"Name": 1}', b"\xff", b"null", b'"x"', b"[" * 2000])
async def test_no_body_is_a_bug(swarm: Swarm, verb: str, body: bytes) -> None:
    """Whatever the body is, the answer is a document or one of the kinds of errors."""
    await swarm.found()
    try:
        await swarm.control.call(Call(seq=1, verb=verb, name=NODE, body=body, query={"version": 1}))
    except EngineError as error:
        assert error.message

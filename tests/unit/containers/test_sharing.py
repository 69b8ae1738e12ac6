"""Links: the lines and variables that they bring."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.containers import sharing
from engine.containers.lifecycle import State
from engine.containers.store import ContainerRecord, Status
from engine.errors import NotFound, ServerError
from engine.wire.containers import Config, EndpointSettings, HostConfig


def record(name: str, config: Config, **fields: object) -> ContainerRecord:
    base = {"id": name * 3, "name": name, "created": 0, "image_id": "", "parent": "", "path": "x", "args": ()}
    return ContainerRecord(**base | {"config": config, "host": HostConfig()} | fields)  # type: ignore[arg-type]


@dataclass
class Peer:
    record: ContainerRecord
    directory: Path = Path("/")

    @property
    def running(self) -> bool:
        return self.record.status.state == State.RUNNING


CHILD = record(
    "child",
    Config(
        hostname="ch",
        env=["A=1", "HOME=/x", "PATH=/y", "NOVALUE"],
        exposed_ports={"53/udp": {}, "81": {}, "80/tcp": {}},
    ),
    networks={"bridge": EndpointSettings(ip_address="10.0.0.2")},
    status=Status(state=State.RUNNING),
)
PARENT = record("parent", Config(), links={"my-db": "childchildchild"})


def test_what_a_link_brings() -> None:
    hosts, environment = sharing.links(PARENT, lambda name: Peer(CHILD))
    assert hosts == ("10.0.0.2\tmy-db ch child",)
    assert environment == (
        "MY_DB_PORT=tcp://10.0.0.2:80",
        "MY_DB_PORT_80_TCP=tcp://10.0.0.2:80",
        "MY_DB_PORT_80_TCP_ADDR=10.0.0.2",
        "MY_DB_PORT_80_TCP_PORT=80",
        "MY_DB_PORT_80_TCP_PROTO=tcp",
        "MY_DB_PORT_81_TCP=tcp://10.0.0.2:81",
        "MY_DB_PORT_81_TCP_ADDR=10.0.0.2",
        "MY_DB_PORT_81_TCP_PORT=81",
        "MY_DB_PORT_81_TCP_PROTO=tcp",
        "MY_DB_PORT_53_UDP=udp://10.0.0.2:53",
        "MY_DB_PORT_53_UDP_ADDR=10.0.0.2",
        "MY_DB_PORT_53_UDP_PORT=53",
        "MY_DB_PORT_53_UDP_PROTO=udp",
        "MY_DB_NAME=/parent/my-db",
        "MY_DB_ENV_A=1",
    )


def test_links_that_lead_nowhere() -> None:
    def missing(name: str) -> Peer:
        raise NotFound(f"No such container: {name}")

    stopped = record("child", Config())
    lonely = record("child", Config(), status=Status(state=State.RUNNING))
    for find, words in (
        (missing, "removed container"),
        (lambda name: Peer(stopped), "non running container: /child AS /parent/my-db"),
        (lambda name: Peer(lonely), "Cannot link to /child, as it does not belong to the default network"),
    ):
        with pytest.raises(ServerError, match=words):
            sharing.links(PARENT, find)


def test_the_path_of_a_user_namespace_is_none_that_runc_reads_a_process_from() -> None:
    """runc takes all that begins with /proc/PID for /proc/PID/ns/user."""
    with open("/proc/self/ns/user") as namespace:
        path = sharing.path(namespace.fileno())
        assert Path(path).samefile("/proc/self/ns/user")
        assert not re.match(r"/proc/\d", path)

"""Secrets and configs: which files a container gets, and that the content is kept no longer than it
is needed."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cluster.bodies import Node
from engine.cluster.delivery import Deliveries
from engine.containers.extra_mounts import File
from engine.errors import InvalidParameter
from engine.swarm_session.messages import Assigned, Delivery
from engine.wire.services import ServiceSpec
from engine.wire.tasks import ConfigReference, ContainerSpec, FileTarget, RuntimeTarget, SecretReference, TaskSpec

NODE = Node(id="n1", hostname="host1", architecture="x86_64")


def spec(**fields: Any) -> ServiceSpec:
    return ServiceSpec(name="web", task_template=TaskSpec(container_spec=ContainerSpec(image="busybox", **fields)))


def task(**fields: Any) -> Assigned:
    return Assigned(id="t1", service="s1", name="web.1.t1", spec="s1/1", desired=512, slot=1, **fields)


def reference(secret: str, **file: Any) -> SecretReference:
    return SecretReference(secret_id=f"id-{secret}", secret_name=secret, file=FileTarget(**{"name": secret} | file))


def filled() -> Deliveries:
    made = Deliveries()
    made.put(
        [Delivery(id="id-a", name="a", data=b"A"), Delivery(id="id-b", name="b", data=b"B{{.Task.Slot}}")],
        [Delivery(id="id-c", name="c", data=b'{{secret "a"}}{{config "/c"}}{{env "X"}}', template="golang")],
    )
    return made


def test_files() -> None:
    config = ConfigReference(config_id="id-c", config_name="c", file=FileTarget(name="/c", mode=0o100644))
    wanted = spec(
        secrets=[
            reference("a", uid="5", gid="6", mode=0o4440),
            reference("b", name="sub/../b"),
            reference("a", name="/etc/a"),
        ],
        configs=[config, ConfigReference(config_id="id-c", config_name="c", runtime=RuntimeTarget())],
        env=["X={{.Service.Name}}"],
    )
    assert filled().files(task(), wanted, NODE) == (
        File(destination="/run/secrets/a", content=b"A", mode=0o440, uid=5, gid=6),
        File(destination="/run/secrets/b", content=b"B{{.Task.Slot}}", mode=0o444),
        File(destination="/etc/a", content=b"A", mode=0o444),
        File(destination="/c", content=b'A{{secret "a"}}{{config "/c"}}{{env "X"}}web', mode=0o644),
    )


def test_a_relative_config_is_at_the_root() -> None:
    config = ConfigReference(config_id="id-c", config_name="c", file=FileTarget(name="app.conf"))
    wanted = spec(configs=[config], secrets=[reference("a")])
    with pytest.raises(InvalidParameter, match="c: template: config target /c not found"):
        filled().files(task(), wanted, NODE)
    made = Deliveries()
    made.put([], [Delivery(id="id-c", name="c", data=b"plain")])
    assert [each.destination for each in made.files(task(), spec(configs=[config]), NODE)] == ["/app.conf"]


@pytest.mark.parametrize("value", ["root", "-1", "1.5", "99999999999", "٣"])
def test_numbers_of_users(value: str) -> None:
    with pytest.raises(InvalidParameter, match="UID"):
        filled().files(task(), spec(secrets=[reference("a", uid=value)]), NODE)


def test_missing_and_kept() -> None:
    made = filled()
    config = ConfigReference(config_id="id-x", config_name="x", file=FileTarget(name="/x"))
    wanted = spec(secrets=[reference("a"), reference("gone")], configs=[config])
    assert made.missing(task(), wanted) == ["secret gone", "config x"]
    assert made.missing(task(), spec(secrets=[reference("a")])) == []
    made.keep([task(secrets=("id-b",))])
    assert made.missing(task(), spec(secrets=[reference("a"), reference("b")])) == ["secret a"]


def test_the_content_is_not_shown() -> None:
    assert "A" not in repr(filled()) and repr(filled()) == "Deliveries(2 secrets, 1 configs)"


def test_a_template_that_is_no_text() -> None:
    made = Deliveries()
    made.put([Delivery(id="id-a", name="a", data=b"\xff{{.}}", template="golang")], [])
    with pytest.raises(InvalidParameter, match="a: the template is not UTF-8"):
        made.files(task(), spec(secrets=[reference("a")]), NODE)

"""Secrets and configs."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from engine.errors import Conflict, InvalidParameter, NotFound, Unimplemented
from engine.manager.control.context import OutOfSequence
from engine.manager.records import CLAIMS, CONFIGS, SECRETS
from engine.manager.store import Store
from tests.unit.manager.control.conftest import Swarm, spec

SORTS = pytest.mark.parametrize("sort", ["secret", "config"])


def claims(swarm: Swarm) -> int:
    """The number of claims beside those of networks."""
    return sum(not key.startswith("network") for key in swarm.store.all(CLAIMS))


def data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def create(swarm: Swarm, sort: str, name: str = "one", text: str = "content", **fields: Any) -> str:
    created = await swarm.call(f"{sort}s.create", body={"Name": name, "Data": data(text), **fields})
    assert set(created) == {"ID"}
    return str(created["ID"])


def using(sort: str, key: str, name: str = "one", **fields: Any) -> dict[str, Any]:
    """A service that refers to it."""
    title = sort.capitalize()
    reference = {
        "File": {"Name": "file", "UID": "0", "GID": "0", "Mode": 0o444},
        f"{title}ID": key,
        f"{title}Name": name,
    }
    return spec(TaskTemplate={"ContainerSpec": {"Image": "busybox", f"{title}s": [reference | fields]}})


@SORTS
async def test_create_inspect_list(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    key = await create(swarm, sort, Labels={"a": "1"})
    await create(swarm, sort, "two")
    for text in (key, "one", key[:9]):
        found = await swarm.call(f"{sort}s.inspect", text)
        assert found["ID"] == key and found["Spec"]["Name"] == "one" and found["Spec"]["Labels"] == {"a": "1"}
        assert found["Version"]["Index"] > 0 and found["CreatedAt"] == found["UpdatedAt"]
        if sort == "secret":
            assert "Data" not in found["Spec"]
        else:
            assert base64.b64decode(found["Spec"]["Data"]) == b"content"

    async def names(**filters: list[str]) -> list[str]:
        return sorted(one["Spec"]["Name"] for one in await swarm.call(f"{sort}s.list", filters=filters))

    assert await names() == ["one", "two"]
    assert await names(name=["o"]) == ["one"]
    assert await names(names=["o"]) == []
    assert await names(names=["two"]) == ["two"]
    assert await names(label=["a=1"]) == ["one"]
    assert await names(id=[key]) == ["one"]
    with pytest.raises(InvalidParameter, match="Invalid filter 'color'"):
        await names(color=["red"])


@SORTS
async def test_the_content_is_encrypted(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    key = await create(swarm, sort, text="very secret")
    record = swarm.store.record(SECRETS if sort == "secret" else CONFIGS, key)
    assert record is not None
    assert b"very secret" not in record.data and record.spec.data == b""


@SORTS
@pytest.mark.parametrize("name", ["", "a" * 65, "-a", "a-", "a b", "a/b", ".", "é"])
async def test_bad_names(swarm: Swarm, sort: str, name: str) -> None:
    await swarm.found()
    with pytest.raises(InvalidParameter, match="Name: invalid name"):
        await create(swarm, sort, name)


@SORTS
async def test_bad_bodies(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    limit = 500 * 1024 if sort == "secret" else 1000 * 1024
    await create(swarm, sort, "long", "x" * (limit - 1))
    for text in ("", "x" * limit):
        with pytest.raises(InvalidParameter, match="data must be larger than 0 and less than"):
            await create(swarm, sort, "bad", text)
    with pytest.raises(InvalidParameter, match="Data"):
        await swarm.call(f"{sort}s.create", body={"Name": "bad", "Data": "not base64!"})
    with pytest.raises(InvalidParameter, match="Templating"):
        await create(swarm, sort, "bad", Templating={"Name": "jinja"})
    await create(swarm, sort, "template", Templating={"Name": "golang"})
    if sort == "secret":
        with pytest.raises(Unimplemented, match="Driver"):
            await create(swarm, sort, "bad", Driver={"Name": "vault"})


@SORTS
async def test_names_are_unique(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    results = await asyncio.gather(*(create(swarm, sort) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, Conflict) for result in results) == 4
    await create(swarm, "config" if sort == "secret" else "secret")  # other names


@SORTS
async def test_update(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    key = await create(swarm, sort)
    before = await swarm.call(f"{sort}s.inspect", key)
    index = before["Version"]["Index"]
    for body in ({"Name": "other"}, {"Name": "one", "Data": data("else")}, {"Templating": {"Name": "golang"}}):
        with pytest.raises(InvalidParameter, match="only updates to Labels are allowed"):
            await swarm.call(f"{sort}s.update", key, body, version=index)
    with pytest.raises(OutOfSequence, match="update out of sequence"):
        await swarm.call(f"{sort}s.update", key, {"Name": "one"}, version=index + 1)
    with pytest.raises(InvalidParameter, match="version"):
        await swarm.call(f"{sort}s.update", key, {"Name": "one"})
    swarm.clock.set(1)
    body = {"Name": "one", "Labels": {"b": "2"}, "Data": data("content")}
    assert await swarm.call(f"{sort}s.update", "one", body, version=index) is None
    after = await swarm.call(f"{sort}s.inspect", key)
    assert after["Spec"]["Labels"] == {"b": "2"} and after["UpdatedAt"] > after["CreatedAt"]
    if sort == "config":
        assert base64.b64decode(after["Spec"]["Data"]) == b"content"


@SORTS
async def test_remove(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    key = await create(swarm, sort)
    service = (await swarm.services_create(body=using(sort, key)))["ID"]
    with pytest.raises(InvalidParameter, match=f"{sort} 'one' is in use by the following service: web"):
        await swarm.call(f"{sort}s.remove", "one")
    await swarm.services_remove(service)
    assert await swarm.call(f"{sort}s.remove", "one") is None
    with pytest.raises(NotFound, match=f"{sort} one not found"):
        await swarm.call(f"{sort}s.inspect", "one")
    assert claims(swarm) == 0
    await create(swarm, sort)


@SORTS
async def test_references_of_services(swarm: Swarm, sort: str) -> None:
    await swarm.found()
    key = await create(swarm, sort)
    with pytest.raises(InvalidParameter, match=f"{sort} not found: gone"):
        await swarm.services_create(body=using(sort, "0" * 25, "gone"))
    with pytest.raises(InvalidParameter, match=f"{sort} not found: another"):
        await swarm.services_create(body=using(sort, key, "another"))
    with pytest.raises(InvalidParameter, match=f"malformed {sort} reference"):
        await swarm.services_create(body=using(sort, ""))
    service = await swarm.service()
    index = (await swarm.services_inspect(service))["Version"]["Index"]
    with pytest.raises(InvalidParameter, match=f"{sort} not found: gone"):
        await swarm.services_update(service, body=using(sort, "0" * 25, "gone"), version=index)
    await swarm.services_update(service, body=using(sort, key), version=index)


@SORTS
async def test_a_removal_does_not_overlook_a_service(swarm: Swarm, sort: str, etcd: Any, clock: Any) -> None:
    """A service of another manager refers to it, in the moment of the removal."""
    await swarm.found()
    other = Store(etcd, clock)
    await other.load()
    second = Swarm(other, clock)
    for _ in range(10):
        key = await create(swarm, sort)
        results = await asyncio.gather(
            swarm.call(f"{sort}s.remove", key),
            second.services_create(body=using(sort, key)),
            return_exceptions=True,
        )
        assert [isinstance(result, InvalidParameter) for result in results].count(True) == 1, results
        assert claims(swarm) in (0, 3)
        if isinstance(results[0], InvalidParameter):
            await swarm.services_remove("web")
            await swarm.call(f"{sort}s.remove", key)
    await other.close()

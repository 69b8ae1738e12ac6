"""The set of assigned tasks: what a message changes, what is on disk, what a full disk does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.tasks import Observed, SpecRecord, TaskRecord, TaskSet
from engine.errors import ServerError
from engine.storage.records import Change, Records, Table
from engine.swarm_session.messages import Assigned, Assignments
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec
from engine.wire.swarm import Driver


class Memory:
    """Records in memory, which may be full."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], bytes] = {}
        self.full = False

    def table(self, kind: str, record_type: type) -> Table[msgspec.Struct]:
        return Table(self, kind, record_type)  # type: ignore[arg-type]

    def rows(self, kind: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for (of, key), value in self.found.items() if of == kind)

    async def commit(self, *changes: Change) -> None:
        if self.full:
            raise ServerError("full")
        for kind, key, value in changes:
            if value is None:
                self.found.pop((kind, key), None)
            else:
                self.found[kind, key] = value


@pytest.fixture
def records() -> Memory:
    return Memory()


def task(name: str, spec: str = "s/1", desired: int = 512) -> Assigned:
    return Assigned(id=name, service=spec.partition("/")[0], name=f"web.1.{name}", spec=spec, desired=desired)


def spec(name: str = "web") -> ServiceSpec:
    return ServiceSpec(name=name)


def loaded(records: Memory) -> TaskSet:
    made = TaskSet(records)  # type: ignore[arg-type]
    made.load()
    return made


def same(one: TaskSet, other: TaskSet) -> bool:
    return (one._all, one._specs, +one._users) == (other._all, other._specs, +other._users)


async def test_put_change_and_forget(records: Memory) -> None:
    tasks = loaded(records)
    applied = await tasks.apply(
        Assignments(
            put=(task("a"), task("b", "s/2")),
            specs={"s/1": spec(), "s/2": spec("two")},
            auths={"s": "secret"},
            log_driver={"Name": "none", "Options": {"a": "b"}},
        )
    )
    assert (applied.put, applied.gone) == (("a", "b"), ())
    assert tasks.spec(task("a")) == SpecRecord(spec=spec(), auth="secret")
    assert "secret" not in repr(tasks.spec(task("a")))
    assert (await tasks.apply(Assignments(put=(task("a"),)))).put == ()
    assert (await tasks.apply(Assignments(put=(task("a", desired=640),)))).put == ("a",)
    await tasks.observe([("a", Observed(state=TaskState.RUNNING, container="c")), ("unknown", Observed())])
    assert same(loaded(records), tasks)
    applied = await tasks.apply(Assignments(remove=("a", "unknown")))
    assert applied.gone == ("a",) and tasks.get("a") is not None
    await tasks.forget("a")
    assert tasks.get("a") is None and tasks.spec(task("a")) is None and tasks.spec(task("b", "s/2")) is not None
    assert same(loaded(records), tasks)
    await tasks.clear()
    assert not records.found and not len(tasks)


async def test_a_task_keeps_the_default_log_driver_that_it_came_with(records: Memory) -> None:
    first, second = {"Name": "none", "Options": {"a": "b"}}, {"Name": "syslog"}
    tasks = loaded(records)
    await tasks.apply(Assignments(put=(task("a"),), specs={"s/1": spec()}, log_driver=first))
    await tasks.apply(Assignments(put=(task("a", desired=640), task("b")), log_driver=second))
    await tasks.observe([("a", Observed(state=TaskState.RUNNING)), ("b", Observed(state=TaskState.RUNNING))])
    await tasks.apply(Assignments(whole=True, put=(task("a"), task("b"), task("c")), specs={"s/1": spec()}))
    found = {record.assigned.id: record.log_driver for record in loaded(records)}
    assert found == {"a": Driver("none", {"a": "b"}), "b": Driver("syslog"), "c": None}


async def test_a_whole_set(records: Memory) -> None:
    tasks = loaded(records)
    await tasks.apply(Assignments(put=(task("a"), task("b")), specs={"s/1": spec()}))
    await tasks.observe([("a", Observed(state=TaskState.RUNNING))])
    applied = await tasks.apply(Assignments(whole=True, put=(task("a"), task("c")), specs={"s/1": spec()}))
    assert (applied.put, applied.gone) == (("a", "c"), ("b",))
    found = tasks.get("a")
    assert found is not None and found.observed.state == TaskState.RUNNING


async def test_a_new_authorization(records: Memory) -> None:
    tasks = loaded(records)
    await tasks.apply(Assignments(put=(task("a"),), specs={"s/1": spec()}, auths={"s": "old"}))
    await tasks.apply(Assignments(auths={"s": "new", "other": "x"}))
    found = loaded(records).spec(task("a"))
    assert found is not None and found.auth == "new"
    # A later version of the spec has the one that came before, unless the set is whole.
    await tasks.apply(Assignments(put=(task("b", "s/2"),), specs={"s/2": spec()}))
    found = tasks.spec(task("b", "s/2"))
    assert found is not None and found.auth == "new"
    await tasks.apply(Assignments(whole=True, put=(task("b", "s/2"),), specs={"s/2": spec()}))
    found = tasks.spec(task("b", "s/2"))
    assert found is not None and found.auth == ""


async def test_a_spec_that_was_not_sent(records: Memory) -> None:
    tasks = loaded(records)
    with pytest.raises(ServerError, match="s/9, which was not sent"):
        await tasks.apply(Assignments(put=(task("a", "s/9"),)))
    assert not len(tasks)


async def test_a_full_disk(records: Memory) -> None:
    tasks = loaded(records)
    await tasks.apply(Assignments(put=(task("a"), task("b")), specs={"s/1": spec()}))
    records.full = True
    with pytest.raises(ServerError):
        await tasks.apply(Assignments(put=(task("a", desired=640), task("c", "s/2")), specs={"s/2": spec("two")}))
    with pytest.raises(ServerError):
        await tasks.observe([("a", Observed(state=TaskState.RUNNING))])
    with pytest.raises(ServerError):
        await tasks.forget("b")
    assert tasks.get("b") is not None
    records.full = False
    whole = Assignments(
        whole=True,
        put=(task("a", desired=640), task("b"), task("c", "s/2")),
        specs={"s/1": spec(), "s/2": spec("two")},
    )
    assert set((await tasks.apply(whole)).put) == {"a", "b", "c"}
    assert same(loaded(records), tasks)


async def test_in_the_real_records(tmp_path: Path) -> None:
    def opened() -> Iterator[Records]:
        made = Records(tmp_path / "state.db")
        yield made
        made.close()

    assigned = msgspec.structs.replace(task("a"), secrets=("x",), slot=4)
    for records in opened():
        tasks = TaskSet(records)
        tasks.load()
        await tasks.apply(Assignments(put=(assigned,), specs={"s/1": spec()}))
        await tasks.observe([("a", Observed(state=TaskState.FAILED, error="e", exit_code=3, since=5))])
    for records in opened():
        tasks = TaskSet(records)
        tasks.load()
        assert list(tasks) == [
            TaskRecord(assigned=assigned, observed=Observed(state=TaskState.FAILED, error="e", exit_code=3, since=5))
        ]


_STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "whole", "forget", "observe", "full", "room"]), st.sets(st.sampled_from("abcd"))),
    max_size=12,
)


@given(_STEPS)
def test_disk_and_memory_agree_after_a_whole_set(steps: list[tuple[str, set[str]]]) -> None:
    asyncio.run(_agree(steps))


async def _agree(steps: list[tuple[str, set[str]]]) -> None:
    records = Memory()
    tasks = loaded(records)
    for verb, names in steps:
        try:
            if verb in ("put", "whole"):
                put = tuple(task(name, f"s/{name}") for name in sorted(names))
                specs = {each.spec: spec(each.id) for each in put}
                await tasks.apply(Assignments(whole=verb == "whole", put=put, specs=specs))
            elif verb == "forget":
                for name in names:
                    await tasks.forget(name)
            elif verb == "observe":
                await tasks.observe((name, Observed(state=TaskState.RUNNING)) for name in names)
            else:
                records.full = verb == "full"
        except ServerError:
            assert records.full
    records.full = False
    put = (task("a", "s/a"), task("b", "s/b"))
    applied = await tasks.apply(Assignments(whole=True, put=put, specs={each.spec: spec(each.id) for each in put}))
    for name in applied.gone:
        await tasks.forget(name)
    assert same(loaded(records), tasks)
    assert {each.assigned.id for each in tasks} == {"a", "b"}

"""Secrets and configs: list, inspect, create, update of the labels, remove. They differ in that the
content of a secret is never shown.

The content is encrypted in the store. Names are claimed as those of services; a secret or config
that a service refers to cannot be removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine.common import times
from engine.errors import Conflict, InvalidParameter
from engine.manager.control import filters, validate
from engine.manager.control.context import Context, body, check_version, encode, find
from engine.manager.records import (
    CLAIMS,
    CONFIGS,
    SECRETS,
    SERVICES,
    Claim,
    ConfigRecord,
    Kind,
    SecretRecord,
    name_claim,
    new_id,
    use_claim,
)
from engine.manager.store import Compare, Delete, Entry, Put, Store
from engine.swarm_session.messages import Call
from engine.wire.secrets import Config, ConfigSpec, ObjectCreated, Secret, SecretSpec
from engine.wire.services import ServiceSpec
from engine.wire.swarm import Version
from engine.wire.tasks import ContainerSpec

Spec = SecretSpec | ConfigSpec
Record = SecretRecord | ConfigRecord


class Sort(msgspec.Struct, frozen=True):
    """Secrets, or configs."""

    name: str
    kind: Kind[Any]
    spec: type[Spec]
    record: type[Record]
    check: Callable[[Any], None]
    view: Callable[[Context, Entry[Any]], Secret | Config]
    used: Callable[[ContainerSpec], set[str]]
    """Ids that a container refers to."""

    def find(self, store: Store, text: str) -> Entry[Any]:
        def named(name: str) -> list[str]:
            claim = store.record(CLAIMS, name_claim(self.name, name))
            return [] if claim is None else [claim.holder]

        return find(store, self.kind, self.name, text, named)

    async def list_all(self, context: Context, call: Call) -> bytes:
        found = filters.given(call.query, ("id", "name", "names", "label"))
        names = frozenset(found.get("names", ()))
        id_starts, name_starts = filters.starts(found, "id"), filters.starts(found, "name")
        has_labels = filters.have_labels(found)
        return encode(
            [
                self.view(context, entry)
                for key, entry in sorted(context.store.all(self.kind).items())
                if id_starts(key)
                and name_starts(entry.record.spec.name)
                and (not names or entry.record.spec.name in names)
                and has_labels(entry.record.spec.labels)
            ]
        )

    async def inspect(self, context: Context, call: Call) -> bytes:
        return encode(self.view(context, self.find(context.store, call.name)))

    async def create(self, context: Context, call: Call) -> bytes:
        store, now = context.store, context.clock.now()
        spec: Any = body(call, self.spec)
        self.check(spec)
        claim = name_claim(self.name, spec.name)
        if store.get(CLAIMS, claim) is not None:
            raise Conflict(f"name conflicts with an existing object: {self.name} {spec.name} already exists")
        key = new_id()
        record = self.record(
            created=now,
            updated=now,
            spec=msgspec.structs.replace(spec, data=b""),
            data=context.authority.seal(key, spec.data),
        )
        await store.commit([Put(self.kind, key, record), Put(CLAIMS, claim, Claim(key))], [Compare(CLAIMS, claim)])
        return encode(ObjectCreated(key))

    async def update(self, context: Context, call: Call) -> bytes:
        """Labels alone can change. The body may repeat the rest."""
        store = context.store
        entry = self.find(store, call.name)
        spec: Any = body(call, self.spec)
        old = entry.record.spec
        validate.labels("Labels", spec.labels)
        check_version(call, self.name, entry)
        same = spec.name in ("", old.name) and (spec.templating is None or spec.templating == old.templating)
        if not same or (spec.data and spec.data != context.authority.unseal(entry.key, entry.record.data)):
            raise InvalidParameter(f"{self.name} {old.name}: only updates to Labels are allowed")
        changed = msgspec.structs.replace(
            entry.record, updated=context.clock.now(), spec=msgspec.structs.replace(old, labels=spec.labels)
        )
        await store.commit([Put(self.kind, entry.key, changed)], [Compare(self.kind, entry.key, entry.revision)])
        return b""

    async def remove(self, context: Context, call: Call) -> bytes:
        store = context.store
        entry = self.find(store, call.name)
        use = store.get(CLAIMS, use_claim(entry.key))
        users = [
            service.record.spec.name
            for service in store.all(SERVICES).values()
            if self._refers(service.record.spec, entry.key)
        ]
        name = entry.record.spec.name
        if users:
            services = "service" if len(users) == 1 else "services"
            raise InvalidParameter(
                f"{self.name} '{name}' is in use by the following {services}: {', '.join(sorted(users))}"
            )
        await store.commit(
            [
                Delete(self.kind, entry.key),
                Delete(CLAIMS, name_claim(self.name, name)),
                Delete(CLAIMS, use_claim(entry.key)),
            ],
            [
                Compare(self.kind, entry.key, entry.created, by_creation=True),
                Compare(CLAIMS, use_claim(entry.key), 0 if use is None else use.revision),
            ],
        )
        return b""

    def _refers(self, spec: ServiceSpec, key: str) -> bool:
        container = spec.task_template.container_spec
        return container is not None and key in self.used(container)


def _secret(context: Context, entry: Entry[SecretRecord]) -> Secret:
    record = entry.record
    return Secret(
        id=entry.key,
        version=Version(entry.revision),
        created_at=times.rfc3339(record.created),
        updated_at=times.rfc3339(record.updated),
        spec=record.spec,
    )


def _config(context: Context, entry: Entry[ConfigRecord]) -> Config:
    record = entry.record
    return Config(
        id=entry.key,
        version=Version(entry.revision),
        created_at=times.rfc3339(record.created),
        updated_at=times.rfc3339(record.updated),
        spec=msgspec.structs.replace(record.spec, data=context.authority.unseal(entry.key, record.data)),
    )


SECRET = Sort(
    "secret",
    SECRETS,
    SecretSpec,
    SecretRecord,
    validate.secret_spec,
    _secret,
    lambda container: {one.secret_id for one in container.secrets},
)
CONFIG = Sort(
    "config",
    CONFIGS,
    ConfigSpec,
    ConfigRecord,
    validate.config_spec,
    _config,
    lambda container: {one.config_id for one in container.configs},
)

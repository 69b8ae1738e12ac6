"""The networks of the engine as records: the three predefined ones, with ids that stay.

Owns: the rows of kind `network`. Not here: what a driver does (`bridge.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec

from engine.errors import InvalidParameter, NotFound
from engine.storage.records import Records

BRIDGE, HOST, NONE = "bridge", "host", "none"


class NetworkRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One network. `created` in ns since the epoch. Subnet and addresses are the driver's to know."""

    id: str
    name: str
    driver: str
    created: int
    scope: str = "local"
    internal: bool = False
    options: dict[str, str] = {}
    labels: dict[str, str] = {}


PREDEFINED = ((BRIDGE, "bridge"), (HOST, "host"), (NONE, "null"))
"""Name and driver."""


class NetworkStore:
    """Networks by name, id and id prefix."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table = records.table("network", NetworkRecord)
        self._all: dict[str, NetworkRecord] = {}

    async def open(self) -> None:
        """Load the records; make the predefined ones that are not there."""
        self._all = self._table.load()
        names = {record.name for record in self._all.values()}
        made = [
            NetworkRecord(id=secrets.token_hex(32), name=name, driver=driver, created=time.time_ns())
            for name, driver in PREDEFINED
            if name not in names
        ]
        await self._records.commit(*(self._table.put(record.id, record) for record in made))
        self._all |= {record.id: record for record in made}

    def __iter__(self) -> Iterator[NetworkRecord]:
        return iter(self._all.values())

    def get(self, text: str) -> NetworkRecord:
        """By name, full id or unique id prefix. Raises NotFound in Docker's words, InvalidParameter for an ambiguous prefix."""
        for record in self._all.values():
            if text in (record.name, record.id):
                return record
        found = [record for record in self._all.values() if text and record.id.startswith(text)]
        if len(found) > 1:
            raise InvalidParameter(f"network {text} is ambiguous ({len(found)} matches found based on ID prefix)")
        if not found:
            raise NotFound(f"network {text} not found")
        return found[0]

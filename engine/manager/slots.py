"""The tasks of each service by place: by slot, or by node for global services. An index that each
manager keeps up to date from the store's events.

Threads: the event loop's.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.records import TASKS, Task
from engine.manager.store import Entry, Event, Store
from engine.manager.tasks import Place


class Slots:
    name = "slots"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[str, dict[Place, tuple[str, ...]]] = {}

    def changed(self, event: Event) -> None:
        if event.kind is not TASKS:
            return
        old: Task | None = None if event.old is None else event.old.record
        new: Task | None = None if event.new is None else event.new.record
        if old is not None and new is not None and rules.place_of(old) == rules.place_of(new):
            return
        if old is not None:
            places = self._places[old.service]
            keys = tuple(key for key in places[rules.place_of(old)] if key != event.key)
            if keys:
                places[rules.place_of(old)] = keys
            else:
                del places[rules.place_of(old)]
                if not places:
                    del self._places[old.service]
        if new is not None:
            places = self._places.setdefault(new.service, {})
            place = rules.place_of(new)
            places[place] = (*places.get(place, ()), event.key)

    def of(self, service: str) -> Mapping[Place, tuple[str, ...]]:
        """The keys of all tasks of the service by place, also of those that have ended. Copy it
        before an await.
        """
        return self._places.get(service, {})

    def at(self, service: str, place: Place) -> list[tuple[str, Entry[Task]]]:
        """The tasks of one place, by age."""
        found = rules.entries(self._store, self._places.get(service, {}).get(place, ()))
        found.sort(key=rules.age)
        return found

    def live_at(self, service: str, place: Place) -> list[tuple[str, Entry[Task]]]:
        return [item for item in self.at(service, place) if rules.live(item[1].record)]

    def take_over(self) -> None:
        pass

    def due(self) -> float | None:
        return None

    async def step(self, acting: Acting) -> None:
        pass

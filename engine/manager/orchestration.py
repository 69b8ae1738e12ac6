"""The loops of the leader that make tasks of services, in the order in which they run."""

from __future__ import annotations

from engine.manager.addresses import Addresses
from engine.manager.allocator import Allocator
from engine.manager.global_services import Global
from engine.manager.jobs import Jobs
from engine.manager.keeper import Keeper
from engine.manager.loops import Loop
from engine.manager.reaper import Reaper
from engine.manager.replicated import Replicated
from engine.manager.restarts import Restarts
from engine.manager.scheduler import Scheduler
from engine.manager.slots import Slots
from engine.manager.store import Store
from engine.manager.updates import Updates
from engine.swarm_session.clock import Clock


def loops(store: Store, clock: Clock) -> list[Loop]:
    """Make them before the store is loaded, as each follows all records from the first."""
    slots = Slots(store)
    addresses = Addresses(store, clock)
    scheduler = Scheduler(store, clock, addresses)
    restarts = Restarts(store, clock, slots, scheduler)
    return [
        slots,
        addresses,
        Allocator(store, clock, addresses),
        Keeper(store, clock, restarts),
        restarts,
        Replicated(store, clock, slots, scheduler),
        Global(store, clock, slots, scheduler),
        Jobs(store, clock, slots, scheduler),
        Updates(store, clock, slots, scheduler),
        scheduler,
        Reaper(store, clock, slots),
    ]

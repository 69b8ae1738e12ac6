"""Makes bridges again that other programs delete, with their endpoints; rtnetlink reports the
deletion.

An operator may delete a bridge, or a tool that resets the network. Only bridges that the engine
made are made again.

Owns: the listening socket and at most one task. Runs on the event loop; the work itself is
`BridgeDriver.port`, in a thread. Locks: takes `changing` (see `networks.py`) for each bridge.
Raises: OSError when the kernel gives no notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from engine.errors import EngineError, words
from engine.networks.bridge.driver import BridgeDriver
from engine.networks.endpoints import Network
from engine.system.netlink import rtnl
from engine.system.tasks import spawn

_log = logging.getLogger(__name__)

InThread = Callable[[Callable[[Network], None], Network], Awaitable[None]]


class Repair:
    """Watches from its creation until `close`."""

    def __init__(
        self,
        bridges: BridgeDriver,
        networks: Mapping[str, Network],
        changing: asyncio.Lock,
        in_thread: InThread,
        others: Callable[[Collection[int] | None], None],
    ) -> None:
        """`networks`, by id, are read at each notice.

        `changing` keeps them from being removed meanwhile. `others` gets the indexes of the links,
        too.
        """
        self._bridges = bridges
        self._networks = networks
        self._changing = changing
        self._in_thread = in_thread
        self._others = others
        self._gone: set[str] = set()
        """Ids of networks whose bridge was deleted."""
        self._returning: asyncio.Task[None] | None = None
        self._removals = rtnl.Removals()
        asyncio.get_running_loop().add_reader(self._removals.fileno(), self._removed)

    def _removed(self) -> None:
        indexes = self._removals.take()
        self._others(indexes)
        for network in self._networks.values():
            link = network.link
            if link is None:
                continue
            own = (indexes is None or link.ifindex in indexes) and self._bridges.made(network)
            if own or self._bridges.trunks.lost(network, indexes):
                self._gone.add(network.record.id)
        if self._gone and self._returning is None:
            self._returning = spawn(self._put_back(), "putting deleted bridges back")

    async def _put_back(self) -> None:
        try:
            while self._gone:
                async with self._changing:
                    network = self._networks.get(self._gone.pop()) if self._gone else None
                    if network is not None:
                        try:
                            await self._in_thread(self._bridges.mend, network)
                        except (EngineError, OSError) as error:
                            _log.error("network %s: cannot restore its bridge: %s", network.record.name, words(error))
        finally:
            self._returning = None

    async def close(self) -> None:
        """Stop watching; wait for the bridge that is being made again."""
        asyncio.get_running_loop().remove_reader(self._removals.fileno())
        self._removals.close()
        self._gone.clear()
        if self._returning is not None:
            await self._returning

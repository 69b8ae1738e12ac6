"""`python -m bench.network_plugin SOCKET`: a trivial network plugin, for the row of
`rows/networks.py`: a bridge per network, and a veth pair per endpoint, made with ip(8).

It prints `ready`, and answers each line on stdin: `move` with the seconds in which the kernel moves
a link into another namespace, others with the seconds that it has worked so far.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

from engine.system import namespaces
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from tests.support.plugins.networks import NetworkPlugin, ip
from tests.support.plugins.protocol import Answer


class Timed(NetworkPlugin):
    seconds = 0.0

    def _answer(self, method: str, body: Answer) -> tuple[int, bytes]:
        begin = time.perf_counter()
        try:
            return super()._answer(method, body)
        finally:
            self.seconds += time.perf_counter() - begin


def move(prefix: str) -> float:
    outer, inner = f"{prefix}x", f"{prefix}y"
    ip("link", "add", outer, "type", "veth", "peer", "name", inner)
    with RouteSocket() as host, namespaces.new_network() as namespace:
        link = host.link(inner)
        assert link is not None
        begin = time.perf_counter()
        host.apply(rtnl.move_link(link.ifindex, namespace, inner))
        taken = time.perf_counter() - begin
    # before the kernel removes the namespace with the link, at a time of its own
    ip("link", "delete", outer)
    os.close(namespace)
    return taken


def main() -> None:
    plugin = Timed(f"p{secrets.token_hex(2)}")
    plugin.listen(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(move(plugin.prefix) if line == "move\n" else plugin.seconds, flush=True)
    plugin.remove_all()


if __name__ == "__main__":
    main()

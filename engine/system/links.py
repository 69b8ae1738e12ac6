"""Links that no start of a container waits for, made with pyroute2: parents of macvlan networks,
VLANs, tunnels.

pyroute2 knows every kind of link. Importing it takes 0.4 s and 11 MB, so it is imported by the
first call and never by an engine that has only bridges, and starts use `netlink/rtnl.py`.

Blocking: run in a thread. Acts in that thread's network namespace. Owns nothing. Raises:
NetlinkError (an OSError) with the kernel's errno.
"""

from __future__ import annotations

import os

from engine.system.netlink.codec import NetlinkError


def create(name: str, kind: str, **attributes: object) -> None:
    """Make a link of this kind.

    `attributes` are those of pyroute2's `IPRoute.link`, for example `link` and `vlan_id`.
    """
    import pyroute2
    from pyroute2.netlink.exceptions import NetlinkError as Refused

    with pyroute2.IPRoute() as kernel:
        try:
            kernel.link("add", ifname=name, kind=kind, **attributes)
        except Refused as error:
            raise NetlinkError(error.code, f"{kind} {name}: {os.strerror(error.code)}") from error

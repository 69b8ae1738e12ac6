"""Links that plugins have made, moved into sandboxes and back, and the paths by which plugins find
sandboxes.

A plugin gets the path of a namespace (libnetwork's sandbox key), which has to be valid in the
host's mount namespace and while no daemon runs. So the namespace of a container with an endpoint of
a plugin is mounted on a file in RUN/netns. These mounts are the only ones that the engine makes for
networks; they exist until the container has left its networks.

Everything blocks on the kernel and is called in threads. Owns nothing.
Raises: ServerError with the name of the link or of the mount, OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from engine.errors import ServerError
from engine.networks import sandboxes
from engine.networks.remote.driver import Joined, Route
from engine.networks.sandboxes import Interface
from engine.system import mounts, namespaces
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket


def show(namespace: int, key: Path) -> set[str]:
    """Mount the namespace on the file `key`, unless it is mounted already. Returns the names of its
    links.
    """
    key.parent.mkdir(mode=0o711, exist_ok=True)
    if not is_shown(key):
        key.touch(mode=0o600)
        try:
            mounts.mount(f"/proc/self/fd/{namespace}", key, flags=mounts.MS_BIND)
        except BaseException:
            key.unlink()
            raise
    return {*sandboxes.macs(namespace)}


def is_shown(key: Path) -> bool:
    try:
        return key.lstat().st_dev != key.parent.lstat().st_dev
    except FileNotFoundError:
        return False


def hide(key: Path) -> None:
    """Undo `show`. A missing file is fine."""
    mounts.unmount(key)
    key.unlink(missing_ok=True)


def hide_all(directory: Path, kept: Iterable[str] = ()) -> None:
    """Remove the files of a directory of keys, except those of these names; and the directory when
    it is empty.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in {*os.listdir(directory)}.difference(kept):
            hide(directory / name)
    with contextlib.suppress(OSError):  # not empty, or missing
        directory.rmdir()


def inner_name(wanted: str, joined: Joined, present: Collection[str]) -> str:
    """The name of an endpoint's link in the sandbox. `wanted` is what the client asked for. Does
    not block.

    Raises ServerError for one that is `present`.
    """
    name = wanted or joined.name
    if name in present:
        raise ServerError(f"the container has an interface {name} already")
    return name or sandboxes.next_name(joined.prefix, present)


def move_in(kernel: RouteSocket, key: Path, source: str, interface: Interface, routes: Iterable[Route]) -> None:
    """Move the host's link `source` into the sandbox, under the interface's name, and configure it.

    A failure moves it back.
    """
    link = kernel.link(source)
    if link is None:
        raise ServerError(f"the driver's interface {source} does not exist on this host")
    with _opened(key) as namespace:
        # As `source`: a new name in the same request would cost another RCU grace period.
        failure = kernel.outcomes([rtnl.move_link(link.ifindex, namespace, source)])[0]
        name = source
        if failure is not None:
            if failure.errno != errno.EEXIST:
                raise failure
            name = interface.name
            kernel.apply(rtnl.move_link(link.ifindex, namespace, name))
        try:
            if name != interface.name:
                name = _renamed(namespace, name, interface.name)
            sandboxes.finish(namespace, name, interface)
            sandboxes.add_routes(namespace, name, routes)
        except BaseException:
            with contextlib.suppress(OSError):
                _move_out(namespace, name, source)
            raise


def _renamed(namespace: int, name: str, new: str) -> str:
    with _inside(namespace) as inside:
        link = inside.link(name)
        if link is None:
            raise ServerError(f"the driver's interface {name} is not in the sandbox any more")
        inside.apply(rtnl.rename_link(link.ifindex, new))
    return new


def move_out(key: Path, name: str, source: str) -> None:
    """Move an endpoint's link back to the host, under its former name, as libnetwork does between
    Leave and DeleteEndpoint. A link or a sandbox that is gone is fine.
    """
    if is_shown(key):
        with _opened(key) as namespace:
            _move_out(namespace, name, source)


def _move_out(namespace: int, name: str, source: str) -> None:
    home = namespaces.network()
    try:
        with _inside(namespace) as inside:
            link = inside.link(name)
            if link is not None:
                # The new name may be that of another link in the sandbox; then the move gives it.
                inside.outcomes([rtnl.change_link(name, up=False), rtnl.rename_link(link.ifindex, source)])
                inside.apply(rtnl.move_link(link.ifindex, home, source))
    finally:
        os.close(home)


@contextlib.contextmanager
def _inside(namespace: int) -> Iterator[RouteSocket]:
    with namespaces.inside_network(namespace):
        inside = RouteSocket()
    with inside:
        yield inside


@contextlib.contextmanager
def _opened(key: Path) -> Iterator[int]:
    namespace = os.open(key, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield namespace
    finally:
        os.close(namespace)

"""The local driver: volumes that are directories of this host, and file systems that it mounts for
them (options `type`, `device`, `o`).

```
ROOT/volumes/<name>/_data    what containers see; with options the file system is mounted there
ROOT/volumes/.volume-<name>  is being made or removed; at the next start the record decides which
```
A container may have the directory above a `_data` bound, and put a link in its place. So everything
here is opened through openat2(2) without links, below the descriptor of ROOT/volumes, and the
runtime gets a mount made from such a descriptor.

Owns: those directories, the mounts on them, the users of each mount, and the threads that do this
      work: an NFS mount may hang for minutes, and must not block the threads of others. The kernel
      knows the mounts, so no count of this module has to survive a crash.
Rules: Docker's local driver (its option names and messages), mount(8) for the words in `o`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from engine._fast import tree
from engine.errors import EngineError, InvalidParameter, ServerError, words
from engine.system import detached_mounts, files, mounts
from engine.system.host_paths import HostPaths
from engine.system.tasks import spawn
from engine.system.threads import Threads, opened
from engine.volumes import sources

NAME = "local"
HIDDEN = ".volume-"
LONGEST_NAME = 255 - len(HIDDEN)
"""Bytes: NAME_MAX less the prefix of a volume that is being made."""
THREADS = 4
"""For short work on the driver's own directories."""
SLOW_THREADS = 32
"""For work that waits for a disk: removals, sizes of files, and the images' content."""

_COUNTED_AT_ONCE = 256
"""Volumes whose files one thread counts: a thread for each would take more time than the files."""
_PATTERN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_OPTIONS = ("type", "device", "o")

_log = logging.getLogger(__name__)
T = TypeVar("T")


# --- names and options: pure ----------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raises InvalidParameter in Docker's words. The name becomes a directory's name."""
    if len(name) == 1:
        raise InvalidParameter(
            f"create {name}: volume name is too short, names should be at least two alphanumeric characters"
        )
    if not _PATTERN.fullmatch(name):
        raise InvalidParameter(
            f'create {name[:300]}: "{name[:300]}" includes invalid characters for a local volume name, only '
            '"[a-zA-Z0-9][a-zA-Z0-9_.-]" are allowed. If you intended to pass a host directory, use absolute path'
        )
    if len(name) > LONGEST_NAME:
        raise InvalidParameter(f"create {name[:40]}...: volume name is longer than {LONGEST_NAME} characters")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a volume's file system is mounted: mount(2)'s arguments, and mount(8)'s words."""

    type: str
    device: str
    words: str
    flags: int
    propagation: int
    data: str


_FLAGS: dict[str, tuple[int, int]] = {
    "defaults": (0, 0),
    "ro": (mounts.MS_RDONLY, 0),
    "rw": (0, mounts.MS_RDONLY),
    "nosuid": (mounts.MS_NOSUID, 0),
    "suid": (0, mounts.MS_NOSUID),
    "nodev": (mounts.MS_NODEV, 0),
    "dev": (0, mounts.MS_NODEV),
    "noexec": (mounts.MS_NOEXEC, 0),
    "exec": (0, mounts.MS_NOEXEC),
    "sync": (mounts.MS_SYNCHRONOUS, 0),
    "async": (0, mounts.MS_SYNCHRONOUS),
    "dirsync": (mounts.MS_DIRSYNC, 0),
    "mand": (mounts.MS_MANDLOCK, 0),
    "nomand": (0, mounts.MS_MANDLOCK),
    "noatime": (mounts.MS_NOATIME, 0),
    "atime": (0, mounts.MS_NOATIME),
    "nodiratime": (mounts.MS_NODIRATIME, 0),
    "diratime": (0, mounts.MS_NODIRATIME),
    "relatime": (mounts.MS_RELATIME, 0),
    "norelatime": (0, mounts.MS_RELATIME),
    "strictatime": (mounts.MS_STRICTATIME, 0),
    "nostrictatime": (0, mounts.MS_STRICTATIME),
    "bind": (mounts.MS_BIND, 0),
    "rbind": (mounts.MS_BIND | mounts.MS_REC, 0),
}
"""Word of `o` → flags that it sets, and flags that it clears."""
_PROPAGATIONS = {
    "private": mounts.MS_PRIVATE,
    "rprivate": mounts.MS_PRIVATE | mounts.MS_REC,
    "shared": mounts.MS_SHARED,
    "rshared": mounts.MS_SHARED | mounts.MS_REC,
    "slave": mounts.MS_SLAVE,
    "rslave": mounts.MS_SLAVE | mounts.MS_REC,
    "unbindable": mounts.MS_UNBINDABLE,
    "runbindable": mounts.MS_UNBINDABLE | mounts.MS_REC,
}
_NETWORK_TYPES = {"nfs", "nfs4", "cifs"}
"""Their `addr=` may be a host name, which the kernel does not resolve."""


def parse_options(name: str, given: Mapping[str, str]) -> Options | None:
    """DriverOpts of the volume `name`; None for a plain directory.

    Raises InvalidParameter naming the option.
    """
    for key, value in given.items():
        if key not in _OPTIONS:
            raise InvalidParameter(f'create {name}: invalid option key: "{key[:100]}"')
        if "\0" in value:
            raise InvalidParameter(f'create {name}: option "{key}" holds a NUL character')
    words, device, kind = given.get("o", ""), given.get("device", ""), given.get("type", "")
    if not (words or device or kind):
        return None
    for key, value in (("device", device), ("type", kind)):
        if not value:
            raise InvalidParameter(f'create {name}: missing required option: "{key}"')
    flags = propagation = 0
    data: list[str] = []
    for word in words.split(","):
        if word in _FLAGS:
            add, take = _FLAGS[word]
            flags = (flags | add) & ~take
        elif word in _PROPAGATIONS:
            propagation = _PROPAGATIONS[word]
        elif word in ("remount", "move"):
            raise InvalidParameter(f'create {name}: option "o": {word} is not supported for a new mount')
        elif word:
            data.append(word)
    if flags & mounts.MS_BIND and not device.startswith("/"):
        raise InvalidParameter(f'create {name}: option "device": {device[:300]} is not an absolute path')
    if len(",".join(data).encode()) >= mounts.PAGE:
        raise InvalidParameter(f'create {name}: option "o" is longer than the kernel reads ({mounts.PAGE - 1} bytes)')
    return Options(type=kind, device=device, words=words, flags=flags, propagation=propagation, data=",".join(data))


def resolved(data: str) -> str:
    """`addr=HOST` with the host's address, IPv4 if it has one. Raises OSError when it has none."""
    words = data.split(",")
    for index, word in enumerate(words):
        key, _, host = word.partition("=")
        if key != "addr" or not host:
            continue
        try:
            ipaddress.ip_address(host)
        except ValueError:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.sort(key=lambda each: each[0] != socket.AF_INET)
            words[index] = f"addr={found[0][4][0]}"
    return ",".join(words)


# --- the driver -----------------------------------------------------------------------------------


class Content(NamedTuple):
    """The content of a volume, or a part of it, as the source of a mount."""

    name: str
    path: str = ""
    """Where a plugin has mounted it; empty for a volume of this driver."""
    subpath: str = ""
    """The part that is wanted, relative to it; empty: all of it."""
    tree: int = -1
    """A detached mount of all of it, for a volume that the host does not see. The descriptor stays
    the caller's.
    """


class LocalDriver:
    """Volumes below one directory.

    Calls about one volume must not overlap: the store holds its lock.
    """

    name = NAME
    scope = "local"

    def __init__(self, directory: Path, run: Path, owner: tuple[int, int] = (0, 0)) -> None:
        """`run`: where mounts for the runtime appear, one directory per container, for the time
        of its start. `owner`: uid and gid of new volumes, those of the root of containers.
        """
        self._owner = owner
        self.directory = directory
        self._run = run
        self._threads = Threads(THREADS, ready=True)
        self._slow_threads = Threads(SLOW_THREADS)
        self._foreign = HostPaths()
        """For file systems that volumes mount."""
        self._top = -1
        self._users: dict[str, set[str]] = {}
        """Volume with options → its users."""
        self._leaving: dict[str, asyncio.Future[None]] = {}

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await self._threads.run(work, *arguments)

    async def _in_slow_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await self._slow_threads.run(work, *arguments)

    async def _with(self, contents: Iterable[Content], work: Callable[..., T], *arguments: object) -> T:
        """As `_in_thread`, unless some of the content is on a file system of its own."""
        if any(each.path or each.tree >= 0 or each.name in self._users for each in contents):
            return await self._foreign.run(work, *arguments)
        return await self._in_thread(work, *arguments)

    # --- start and end of the engine --------------------------------------------------------------

    async def open(self, recorded: Iterable[str]) -> None:
        """Finish work that a crash interrupted: directories are created or removed to match the
        records.
        """
        await self._in_thread(self._open, set(recorded))

    def _open(self, recorded: set[str]) -> None:
        self._top = files.open_directory(self.directory)
        files.spread(self.directory)
        names = set(os.listdir(self._top))
        for hidden in sorted(name for name in names if name.startswith(HIDDEN)):
            name = hidden.removeprefix(HIDDEN)
            self._unmount(hidden)
            if name in recorded and name not in names:
                os.rename(hidden, name, src_dir_fd=self._top, dst_dir_fd=self._top)
            else:
                _log.info("removing %s: no volume uses it", self.directory / hidden)
                self._discard(name)
        for name in recorded:
            if not os.path.isdir(self.directory / name):
                _log.warning("volume %s: its directory is missing, starting with an empty one", name)
                self._make_below(name)
        self._clear_run()

    def _clear_run(self) -> None:
        """Mounts for starts that a crash interrupted."""
        for entry in reversed(mounts.mounts(self._run)):
            mounts.unmount(entry.target)
        files.remove_tree(self._run)

    def resume(self, name: str, user: str) -> None:
        """Register a container that outlived the last daemon as a user of its mount."""
        self._users.setdefault(name, set()).add(user)

    async def sweep(self, with_options: set[str]) -> None:
        """Unmount volumes that no running container uses.

        Call it after every `resume`. Mounts made by the operator are left alone.
        """
        await self._in_thread(self._sweep, with_options - self._users.keys())

    def _sweep(self, names: set[str]) -> None:
        prefix = len(os.path.realpath(self.directory)) + 1
        below = {entry.target[prefix:].partition("/")[0] for entry in mounts.mounts(self.directory)}
        for name in below & names:
            _log.info("volume %s: unmounting what a crash has left", name)
            self._unmount(name)

    async def close(self) -> None:
        """Waits for background work."""
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        if self._top >= 0:
            os.close(self._top)
            self._top = -1
        for threads in (self._threads, self._slow_threads):
            threads.close()

    # --- creation and removal
    # -------------------------------------------------------------------------

    def check(self, name: str, options: Mapping[str, str]) -> None:
        check_name(name)
        parse_options(name, options)

    def mountpoint(self, name: str) -> str:
        return f"{self.directory}/{name}/_data"

    async def create(self, name: str, options: Mapping[str, str]) -> None:
        """Create its directory under a temporary name. Raises ServerError."""
        self.check(name, options)
        await self._in_thread(self.create_now, name)

    def create_now(self, name: str) -> None:
        """As `create`, in a thread, for a name and options that `check` has passed."""
        try:
            try:
                self._make_below(HIDDEN + name)
            except FileExistsError:  # an earlier failure has left it
                self._discard(name)
                self._make_below(HIDDEN + name)
        except OSError as error:
            raise ServerError(f"create {name}: {error.strerror or error}") from error

    def _make_below(self, name: str) -> None:
        for path in (name, f"{name}/_data"):
            os.mkdir(path, 0o755, dir_fd=self._top)
            os.chmod(path, 0o755, dir_fd=self._top)
        if self._owner != (0, 0):
            os.chown(path, *self._owner, dir_fd=self._top)

    async def keep(self, name: str) -> None:
        """Give it its final name, now that its record exists."""
        await self._in_thread(self.keep_now, name)

    def keep_now(self, name: str) -> None:
        """As `keep`, in a thread. A failure is logged: the next start tries again."""
        try:
            self._rename(HIDDEN + name, name)
        except OSError as error:
            _log.error("volume %s: %s: the next start will try again", name, words(error))

    async def hide(self, name: str) -> None:
        """Move it to a temporary name before its record is deleted; `restore` undoes it, `discard`
        completes it. Raises ServerError.
        """
        await self._in_thread(self.hide_now, name)

    def hide_now(self, name: str) -> None:
        """As `hide`, in a thread."""
        try:
            try:
                self._rename(name, HIDDEN + name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # `discard` has left what it could not remove, which is little
                self._discard(name)
                self._rename(name, HIDDEN + name)
        except FileNotFoundError:
            _log.warning("volume %s: its directory is missing", name)
        except OSError as error:
            raise ServerError(f"remove {name}: {error.strerror or error}") from error

    async def restore(self, name: str) -> None:
        """Undo `hide`. Raises ServerError."""
        try:
            await self._in_thread(self._rename, HIDDEN + name, name)
        except FileNotFoundError:
            pass  # `hide` has found and logged that there is no directory
        except OSError as error:
            raise ServerError(f"volume {name}: restoring its directory: {error.strerror or error}") from error

    async def discard(self, name: str) -> None:
        """Remove a directory of `create` or `hide`.

        A failure is logged: the next start tries again.
        """
        try:
            await self._in_slow_thread(self._discard, name)
        except OSError as error:
            _log.warning("volume %s: removing its files: %s", name, words(error))

    def discard_empty(self, name: str) -> bool:
        """As `discard`, in a thread, for a volume without content: two system calls. Returns False
        if it stays.
        """
        try:
            os.rmdir(f"{HIDDEN}{name}/_data", dir_fd=self._top)
            os.rmdir(HIDDEN + name, dir_fd=self._top)
        except OSError:  # `discard` finds out why
            return False
        return True

    undo_create = discard

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._top, dst_dir_fd=self._top)

    def _discard(self, name: str) -> None:
        # Mounts in the tree are not entered: rmdir(2) of a mount point is EBUSY, and `remove_tree`
        # tries that first. Few volumes have mounts, and the list of all mounts of a host is long.
        hidden = HIDDEN + name
        try:
            tree.remove_tree(self._top, os.fsencode(hidden))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._unmount(hidden)
            tree.remove_tree(self._top, os.fsencode(hidden))

    # --- use --------------------------------------------------------------------------------------

    async def mount(self, name: str, options: Mapping[str, str], user: str) -> str:
        """Mount its file system, when it has options.

        Returns the path for containers. Raises ServerError.
        """
        if parsed := parse_options(name, options):
            if not self._users.get(name):
                await self._foreign.run(self._mount, name, parsed)
            self._users.setdefault(name, set()).add(user)
        return self.mountpoint(name)

    async def unmount(self, name: str, user: str) -> None:
        """Remove a user; the last one unmounts it."""
        users = self._users.get(name)
        if users is not None:
            users.discard(user)
            if not users:
                del self._users[name]
                await self._foreign.run(self._unmount, name)

    def _mount(self, name: str, options: Options) -> None:
        path = self.mountpoint(name)
        with self._data(name) as place:
            if self._mounted(name, place):
                return
            try:
                data = resolved(options.data) if options.type in _NETWORK_TYPES else options.data
                mounts.mount(options.device, f"/proc/self/fd/{place}", options.type, options.flags, data)
                try:
                    self._adjust(name, options)
                except (EngineError, OSError):
                    self._unmount(name)
                    raise
            except (EngineError, OSError) as error:
                cause = error.__cause__ if isinstance(error, EngineError) and error.__cause__ else error
                reason = (cause.strerror or str(cause)).lower() if isinstance(cause, OSError) else str(cause)
                raise ServerError(
                    f"error while mounting volume '{path}': failed to mount local volume: "
                    f"mount {options.device}:{path}, data: {options.words}: {reason}"
                ) from error

    def _adjust(self, name: str, options: Options) -> None:
        """Settings that mount(2) only takes in calls of their own: propagation, and the flags of a
        bind.
        """
        with self._data(name) as top:  # another descriptor than before: that of the new mount
            where = f"/proc/self/fd/{top}"
            if options.propagation:
                mounts.mount("", where, flags=options.propagation)
            if options.flags & mounts.MS_BIND and options.flags & ~(mounts.MS_BIND | mounts.MS_REC):
                mounts.mount("", where, flags=(options.flags | mounts.MS_REMOUNT) & ~mounts.MS_REC)

    def _mounted(self, name: str, place: int) -> bool:
        above = files.open_without_links(self._top, name, _DIRECTORY)
        try:
            return mounts.mount_id(place) != mounts.mount_id(above)
        finally:
            os.close(above)

    def _unmount(self, name: str) -> None:
        # Asked of the kernel, not by path: a container that has the directory above bound may have
        # renamed `_data`.
        for entry in reversed(mounts.mounts(self.directory / name)):
            try:
                mounts.unmount(entry.target)
            except ServerError as error:
                _log.warning("volume %s: %s", name, error.message)

    @contextlib.contextmanager
    def _data(self, name: str) -> Iterator[int]:
        descriptor = self._open_data(name)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_data(self, name: str) -> int:
        try:
            return files.open_without_links(self._top, f"{name}/_data", _DIRECTORY)
        except OSError as error:
            reason = "a link" if error.errno in (errno.ELOOP, errno.EXDEV) else (error.strerror or "").lower()
            raise ServerError(f"volume {name}: {self.mountpoint(name)} is not its directory: {reason}") from error

    async def place(self, container_id: str, wanted: Mapping[str, Content]) -> dict[str, str]:
        """Attach the content of volumes at places for the runtime that no container can change,
        until `leave_places`.

        `wanted` by destination, like the returned paths.
        """
        if leaving := self._leaving.get(container_id):
            await leaving
        return await self._with(wanted.values(), self._place, container_id, wanted)

    def _place(self, container_id: str, wanted: Mapping[str, Content]) -> dict[str, str]:
        directory = self._run / container_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: dict[str, str] = {}
        for index, (destination, content) in enumerate(wanted.items()):
            target = f"{directory}/{index}"
            if content.tree < 0:
                self._place_part(content, target)
            elif content.subpath:
                whole = f"{target}.whole"
                _attach(content.tree, whole)
                self._place_part(content._replace(path=whole), target)
            else:
                _attach(content.tree, target)
            found[destination] = target
        return found

    def _place_part(self, content: Content, target: str) -> None:
        with contextlib.ExitStack() as stack:
            descriptor = self._open_content(content)
            stack.callback(os.close, descriptor)
            tree = detached_mounts.clone(descriptor, recursive=True)
            stack.callback(os.close, tree)
            _attach(tree, target)

    async def open_content(self, content: Content) -> int:
        """A descriptor (O_PATH) of it, including a mount on it. The caller closes it."""
        return await opened(self._with([content], self._open_content, content))

    def _open_content(self, content: Content) -> int:
        top = sources.open_path(content.path) if content.path else self._open_data(content.name)
        if not content.subpath:
            return top
        try:
            return sources.open_below(top, content.name, content.subpath)
        finally:
            os.close(top)

    def leave_places(self, container_id: str) -> None:
        """Unmount those places in the background: each unmount waits for an RCU grace period,
        milliseconds that a start need not wait.
        """
        leaving = spawn(self._in_thread(self._leave_places, container_id), f"container {container_id}: volumes")
        self._leaving[container_id] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(container_id, None))

    def _leave_places(self, container_id: str) -> None:
        directory = self._run / container_id
        try:
            for target in directory.iterdir():
                with contextlib.suppress(ServerError):
                    detached_mounts.detach(str(target))
                if target.is_dir():
                    target.rmdir()
                else:
                    target.unlink()
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s: %s", directory, words(error))

    async def is_empty(self, name: str) -> bool:
        """True if its directory has no entry; a mount on it counts as it is now."""
        return await self._in_thread(self._is_empty, name)

    def _is_empty(self, name: str) -> bool:
        with self._data(name) as place:
            return not os.listdir(f"/proc/self/fd/{place}")

    async def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of the files of each; -1 where they cannot be counted. After `hide` a volume has
        the name with the prefix HIDDEN.
        """
        parts = [names[begin : begin + _COUNTED_AT_ONCE] for begin in range(0, len(names), _COUNTED_AT_ONCE)]
        counted = await asyncio.gather(*(self._in_slow_thread(self._sizes, part) for part in parts))
        return [size for part in counted for size in part]

    def _sizes(self, names: Sequence[str]) -> list[int]:
        found = tree.sizes(self._top, [os.fsencode(f"{name}/_data") for name in names])
        for name, size in zip(names, found, strict=True):
            if size < 0 and size != -errno.ENOENT:  # it has just been removed
                _log.warning("volume %s: its size: %s", name, os.strerror(-size).lower())
        return [max(size, -1) for size in found]

    # --- the image's content ----------------------------------------------------------------------

    async def populate(self, name: str, source: int, *, staged: bool) -> None:
        """Copy the content, mode and owner of the directory `source` (a descriptor) into an empty
        volume; others stay as they are.

        `staged`: the volume still has its temporary name and no mount. Raises ServerError; then the
        copy has been removed.
        """
        run = self._foreign.run if name in self._users else self._slow_threads.run
        await run(self._populate, name, source, staged)

    def _populate(self, name: str, source: int, staged: bool) -> None:
        with self._data(HIDDEN + name if staged else name) as place:
            target = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sources.populate(name, source, target)
        finally:
            os.close(target)


def _attach(tree: int, target: str) -> None:
    """Attach a detached mount at `target`, which is made: a directory, or a file for a file."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.mkdir(target, 0o700)
    else:
        os.mknod(target, 0o600)
    detached_mounts.attach(tree, target)

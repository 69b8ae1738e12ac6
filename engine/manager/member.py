"""The etcd member of this manager: a child process, its flags, its data, its end.

The child dies with this process (PDEATHSIG) and is started again when it dies alone: at once, and
with growing pauses when it dies again soon. Its client side is a Unix socket in RUN/swarm, which is
the child's working directory; its peer side is mutual TLS with the certificates of managers.

etcd reads its certificate at each handshake, and the trusted roots only when it starts. So a change
of the roots ends the child in order, and the next one reads them; the managers take turns.

Owns:    ROOT/swarm/etcd, ROOT/swarm/peer-port, RUN/swarm/etcd:0 and etcd.pid; the child.
Threads: the event loop's. The child is spawned by the main thread, whose end it follows.
Raises:  ServerError when etcd is missing, unfit, or does not start: with its own last words.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import platform
import select
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from engine.errors import ServerError, reason
from engine.manager import versions
from engine.manager.etcd import SOCKET, EtcdClient
from engine.manager.kv import EtcdError, Status
from engine.manager.versions import PROGRAM
from engine.system.files import write_atomically
from engine.system.tasks import spawn
from engine.wire.swarm import RaftConfig

PEER_PORT_DISTANCE = 7946 - 2377
"""From the port of agents to the port of etcd's peers: firewalls of swarm hosts have 7946 open."""

START = 20.0
"""Seconds for a new or joining member until it serves."""
RESTART = 3.0
"""Seconds that a member with data is waited for: without quorum it serves no earlier than others
are back, which can take any time.
"""
STOP = 5.0
"""Seconds for an orderly end, in which a raft leader hands over."""
LONGEST_PAUSE = 5.0
STEADY = 10.0
"""A child that lived this long is started again without a pause."""
ROOTS_CHECK = 5.0
"""Seconds between looks at ca.crt."""
TURN = 10.0
"""Seconds between the restarts of two managers for new roots."""
ADDRESS_RETRY = 1.0

QUOTA = 4 << 30

_INTERESTING = ("fatal", "panic", "error", "removed from")

_log = logging.getLogger(__name__)


# --- what etcd is given ---------------------------------------------------------------------------


def timings(raft: RaftConfig) -> tuple[int, int]:
    """etcd's heartbeat interval and election timeout, in milliseconds.

    ElectionTick, in seconds, promises that a lost leader is replaced within that time. etcd needs
    one to two election timeouts for it. The timeout is a third of ElectionTick up to 3, then a
    second, and from 10 on a tenth. etcd wants five heartbeats in a timeout, and at most 50 s.
    """
    tick = raft.election_tick or 10
    election = min(max(min(tick * 1000 // 3, 1000), tick * 100, 300), 50_000)
    heartbeat = min(max((raft.heartbeat_tick or 1) * 100, 10), election // 5)
    return heartbeat, election


def flags(
    *,
    node: str,
    data: Path,
    directory: Path,
    listen_url: str,
    peer_url: str,
    raft: RaftConfig,
    initial_cluster: str = "",
    force: bool = False,
    quota: int = QUOTA,
) -> list[str]:
    """The arguments of one start. `initial_cluster`: of the cluster to join; "" for a new one of
    this member, which counts only without data.
    """
    heartbeat, election = timings(raft)
    given = {
        "name": node,
        "data-dir": str(data),
        "listen-peer-urls": listen_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": initial_cluster or f"{node}={peer_url}",
        "initial-cluster-state": "existing" if initial_cluster else "new",
        "initial-cluster-token": "engined",
        "listen-client-urls": f"unix://{SOCKET}",
        "advertise-client-urls": f"unix://{SOCKET}",
        "peer-client-cert-auth": "true",
        "peer-trusted-ca-file": str(directory / "ca.crt"),
        "peer-cert-file": str(directory / "node.crt"),
        "peer-key-file": str(directory / "node.key"),
        "peer-cert-allowed-hostname": "swarm-manager",
        # A manager may connect from another address than the advertised one: NAT, several
        # addresses.
        "experimental-peer-skip-client-san-verification": "true",
        "heartbeat-interval": str(heartbeat),
        "election-timeout": str(election),
        "snapshot-count": str(raft.snapshot_interval or 10_000),
        "max-snapshots": str((raft.keep_old_snapshots or 0) + 1),
        "strict-reconfig-check": "false",
        "pre-vote": "true",
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": "10000",
        "max-txn-ops": "4096",
        "max-request-bytes": str(10 << 20),
        "quota-backend-bytes": str(quota),
        "logger": "zap",
        "log-outputs": "stderr",
        "log-level": "error",
    }
    return [f"--{name}={value}" for name, value in given.items()] + (["--force-new-cluster"] if force else [])


async def installed() -> None:
    """Raises ServerError when the host's etcd is missing or unfit."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ServerError("etcd is not installed: managers of a swarm need it (Debian: apt install etcd-server)")
    process = await asyncio.create_subprocess_exec(
        program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=_environment()
    )
    output, _ = await process.communicate()
    versions.check(output.decode(errors="replace"))


def _environment() -> dict[str, str]:
    """etcd reads settings from ETCD_*: none of the host's.

    3.4 runs on arm64 only when it is told so.
    """
    own = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR", "GOMAXPROCS")}
    if platform.machine() in ("aarch64", "arm64"):
        own["ETCD_UNSUPPORTED_ARCH"] = "arm64"
    own["GOGC"] = "50"
    return own


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _url(host: str, port: int) -> str:
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


# --- the child ------------------------------------------------------------------------------------


class Member:
    """`root`: ROOT/swarm; `run`: RUN/swarm; `listen` and `advertise`: host:port of the manager's
    own listener, of which the port of etcd's peers is derived.
    """

    def __init__(self, root: Path, run: Path, *, node: str, listen: str, advertise: str, raft: RaftConfig) -> None:
        self.root, self.run, self.node = root, run, node
        self.quota = QUOTA
        """Bytes of the database, at which it refuses writes."""
        self.raft = raft
        self.on_removed: Callable[[], None] | None = None
        """Called when etcd says that this member was removed from its cluster.

        It has ended then.
        """
        self.etcd = EtcdClient(str(run / SOCKET))
        self._data = root / "etcd"
        host, port = split_address(listen)
        peer_port = self._choose_port(host, port)
        self.peer_url = _url(split_address(advertise)[0], peer_port)
        self._listen_url = _url(host, peer_port)
        self._process: asyncio.subprocess.Process | None = None
        self._words: collections.deque[str] = collections.deque(maxlen=20)
        self._keeper: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = self.removed = False
        self.trouble = ""
        """Why the child cannot run: it has ended soon after its start. "" when it can."""
        self._roots = b""

    @property
    def exists(self) -> bool:
        """This member has data, from which it starts again."""
        wal = self._data / "member" / "wal"
        return wal.is_dir() and any(wal.iterdir())

    @property
    def roots(self) -> str:
        """The roots that the child trusts: ca.crt as it was when the child was started."""
        return self._roots.decode("ascii", "replace")

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    def _choose_port(self, host: str, port: int) -> int:
        """The port of the peers is kept: it is in the member list of the whole cluster."""
        file = self.root / "peer-port"
        with contextlib.suppress(OSError, ValueError):
            return int(file.read_text())
        wanted = port + PEER_PORT_DISTANCE
        chosen = wanted if wanted < 65536 and _free(host, wanted) else 0
        if not chosen:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.bind((host, 0))
                chosen = probe.getsockname()[1]
        write_atomically(file, str(chosen).encode(), 0o600)
        return chosen

    def wipe(self) -> None:
        """Remove the data: this node is not a member any more."""
        shutil.rmtree(self._data / "member", ignore_errors=True)
        with contextlib.suppress(OSError):  # a mount point stays
            self._data.rmdir()
        with contextlib.suppress(FileNotFoundError):
            (self.root / "peer-port").unlink()

    async def start(self, *, initial_cluster: str = "", force: bool = False) -> EtcdClient:
        """Start the child, and start it again whenever it ends, until `stop`. Returns its client.

        Without data: a new cluster of this member, or with `initial_cluster` a learner of that one.
        `force`: a new cluster of this member alone, out of its data. The first two return when the
        member serves; one with data may have to wait for its peers, and so does the client.
        """
        await installed()
        self._stopping = self.removed = False
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self._data, 0o700)
        restart = self.exists and not force
        process = await self._spawn(initial_cluster, force=force)
        served = asyncio.ensure_future(self._serves())
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait(
                {served, ended}, timeout=RESTART if restart else START, return_when=asyncio.FIRST_COMPLETED
            )
            if not served.done() and (ended.done() or not restart):
                removed = self._is_removed(process)
                await self._end(process)
                if not removed:
                    raise ServerError(f"etcd does not start: {self._last_words(process)}")
        finally:
            served.cancel()
            if not ended.done():
                ended.cancel()
        self._keeper = spawn(self._keep(process), "manager: etcd", fatal=True)
        self._tasks = [
            spawn(self._keep_address(), "manager: address of the member"),
            spawn(self._keep_roots(), "manager: roots of etcd"),
        ]
        return self.etcd

    async def stop(self) -> None:
        """End the child in order: a raft leader hands over. It has ended when this returns."""
        self._stopping = True
        self.trouble = ""
        for task in (*self._tasks, *([self._keeper] if self._keeper else [])):
            task.cancel()
        self._tasks, self._keeper = [], None
        if self._process is not None:
            await self._end(self._process)
        await self.etcd.close()
        self.etcd = EtcdClient(str(self.run / SOCKET))
        self._remove_socket()

    async def _serves(self) -> Status:
        """Wait until the member answers and knows a leader."""
        while True:
            with contextlib.suppress(EtcdError):
                status = await self.etcd.status()
                if status.leader:
                    return status
            await asyncio.sleep(0.05)

    async def _spawn(self, initial_cluster: str = "", *, force: bool = False) -> asyncio.subprocess.Process:
        self._end_orphan()
        self._remove_socket()
        self._roots = _content(self.root / "ca.crt")
        arguments = flags(
            node=self.node,
            data=self._data,
            directory=self.root,
            listen_url=self._listen_url,
            peer_url=self.peer_url,
            raft=self.raft,
            initial_cluster=initial_cluster,
            force=force,
            quota=self.quota,
        )
        program = shutil.which(PROGRAM)
        setpriv = shutil.which("setpriv")
        if program is None or setpriv is None:
            raise ServerError(f"{PROGRAM if program is None else 'setpriv (package util-linux)'} is not installed")
        self._words.clear()
        # setpriv becomes etcd: the setting outlives execve.
        process = await asyncio.create_subprocess_exec(
            setpriv,
            "--pdeathsig=KILL",
            program,
            *arguments,
            cwd=self.run,
            env=_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._process = process
        write_atomically(self.run / "etcd.pid", f"{process.pid} {_started(process.pid)}".encode(), 0o600)
        assert process.stderr is not None
        spawn(self._read(process.stderr), "manager: messages of etcd")
        return process

    async def _read(self, messages: asyncio.StreamReader) -> None:
        """etcd's messages: the last ones are kept for the reason of an end."""
        while True:
            try:
                line = await messages.readline()
            except ValueError:  # longer than the reader's limit
                continue
            if not line:
                return
            text = _plain(line.decode(errors="replace").strip())
            if text:
                self._words.append(text)
                _log.debug("etcd: %s", text)

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """Start the child again when it has ended, with growing pauses when that happens often."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            began = loop.time()
            await self._runs_until_its_end(process)
            await asyncio.sleep(0)  # its last words
            if self._is_removed(process):
                _log.warning("this manager was removed from the swarm's members: etcd has ended")
                self.removed = True
                if self.on_removed is not None:
                    self.on_removed()
                return
            if loop.time() - began > STEADY:
                pause = 0.0
            elif pause and process.returncode != -signal.SIGTERM:
                self.trouble = self._last_words(process)
            _log.warning("etcd has ended and is started again: %s", self._last_words(process))
            while True:
                await asyncio.sleep(pause)
                pause = min(max(2 * pause, 0.1), LONGEST_PAUSE)
                try:
                    process = await self._spawn()
                    break
                except (OSError, ServerError) as error:
                    self.trouble = error.message if isinstance(error, ServerError) else reason(error)
                    _log.error("etcd is not started: %s", self.trouble)

    async def _runs_until_its_end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of the child. One that has lived for `STEADY` can run."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEADY):
                await process.wait()
                return
        if self.trouble:
            _log.info("etcd runs again")
            self.trouble = ""
        await process.wait()

    def _is_removed(self, process: asyncio.subprocess.Process) -> bool:
        """etcd ends by itself, without a failure, only when its cluster does not have it any
        more.
        """
        return process.returncode == 0 and not self._stopping

    def _last_words(self, process: asyncio.subprocess.Process) -> str:
        reasons = [words for words in self._words if any(word in words.lower() for word in _INTERESTING)]
        code = process.returncode
        end = "it does not serve"
        if code is not None:
            end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        words = (reasons or list(self._words))[-1:]
        return "; ".join((end, *words))[:1000]

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
            try:
                async with asyncio.timeout(STOP):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await asyncio.sleep(0)

    def _end_orphan(self) -> None:
        """Kill a child of an earlier manager that died in the moment of spawning it: it holds the
        data.
        """
        with contextlib.suppress(OSError, ValueError):
            pid, started = (self.run / "etcd.pid").read_text().split()
            if self._process is not None and self._process.returncode is None:
                return
            if started and _started(int(pid)) == started:
                os.kill(int(pid), signal.SIGKILL)
                _wait_gone(int(pid), started)

    def _remove_socket(self) -> None:
        """etcd does not replace a socket that an earlier process has left."""
        path = self.run / SOCKET
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()

    # --- what changes while it runs ---------------------------------------------------------------

    async def _keep_address(self) -> None:
        """Others reach this member at `peer_url`; tell them when the address has changed."""
        while True:
            with contextlib.suppress(EtcdError):
                own = (await self.etcd.status()).member
                members = {member.id: member for member in await self.etcd.members()}
                if own in members:
                    if members[own].peer_url == self.peer_url:
                        return
                    await self.etcd.update_member(own, self.peer_url)
                    _log.info("the address of this member is %s now", self.peer_url)
            await asyncio.sleep(ADDRESS_RETRY)

    async def _keep_roots(self) -> None:
        """Restart the child when the trusted roots have changed. The members take turns, so that
        the cluster keeps its quorum.
        """
        while True:
            await asyncio.sleep(ROOTS_CHECK)
            roots = _content(self.root / "ca.crt")
            process = self._process
            if not roots or roots == self._roots or process is None:
                continue
            with contextlib.suppress(EtcdError):
                own = (await self.etcd.status()).member
                ids = sorted(member.id for member in await self.etcd.members())
                await asyncio.sleep(TURN * (ids.index(own) if own in ids else 0))
                _log.info("the trusted roots have changed: etcd is started again")
                await self._end(process)
                await asyncio.sleep(TURN)


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _started(pid: int) -> str:
    """The start time of a process in clock ticks, which with its pid names it; "" when it is
    gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _wait_gone(pid: int, started: str) -> None:
    """Wait for the end of a killed process that is no child, at most a second."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _started(pid) == started:
                select.select([descriptor], [], [], 1.0)
        finally:
            os.close(descriptor)


def _plain(line: str) -> str:
    """The message and the error of a line of etcd's log, which is JSON; other lines as they are."""
    if not line.startswith("{"):
        return line
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return ": ".join(str(found[name]) for name in ("level", "msg", "error") if found.get(name))

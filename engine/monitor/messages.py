"""What the daemon and the monitor say to each other over one SOCK_SEQPACKET connection, one message per packet.

Each packet is one MessagePack value (`encode`, `decode_order`, `decode_report`); descriptors travel beside it as SCM_RIGHTS in the
order that the message's docstring gives. Orders go to the monitor and carry `seq`; the monitor answers each with `Done` or `Failed` of that
`seq`, but `Drop` and `Forget`, which nobody awaits, only when they fail. Reports come unasked. A *process* is a container's init (key: the
container's id) or an exec (key: the exec's id): the monitor does not know the difference.

Not here: sockets and loops (`client.py`, `process.py`).
"""

from __future__ import annotations

import msgspec

PROTOCOL = 3

PACKET = 128 << 10
"""Bytes of the longest packet: a Unix socket with the usual send buffer takes it whole."""

STDIN, STDOUT, STDERR = 0, 1, 2


class LogFile(msgspec.Struct, array_like=True, frozen=True):
    """A json-file log: absolute path, size in bytes at which it rotates (0: never), number of files kept (>= 1).

    `attrs`: an encoded JSON object that every entry carries (log options `labels`, `env`, `tag`), or empty.
    """

    path: str
    max_size: int = 0
    max_file: int = 1
    attrs: bytes = b""


class Size(msgspec.Struct, array_like=True, frozen=True):
    """Terminal size in characters."""

    rows: int
    columns: int


# --- orders: daemon → monitor -------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First packet of a daemon. Answered by one `State` per process known and `Kept`, when something is kept, then by `Done`.

    `Done` waits a few seconds for processes that a gone daemon had ordered and that are still being made; one that comes later is told by
    an unasked `State`. A newer daemon's Hello ends an older connection, which is told `Failed` with seq 0 first.
    `attach_stall`: seconds after which a client that took nothing of its output is disconnected; -1: as before.
    """

    seq: int
    protocol: int = PROTOCOL
    attach_stall: int = -1


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Give a client's socket (the packet's one descriptor) to a process, which need not run yet.

    `head` is written before anything else, then output as it comes: frames, or raw bytes when `raw` (a tty, or a websocket relay).
    `early` are bytes of stdin that the daemon had already read. With `hold` nothing but `head`'s registration happens until `Release`:
    output from the instant of registration is kept for the client (bounded: the process stalls at the bound). Answer: `Done` with `client`
    and, for a process with a log, `log_inode` and `log_offset`: where the log ended at the instant of registration (a held client is first
    given the part of a line that is read but not logged yet); `pid` is the process's, 0 when the client waits for a Run.
    Long `early` bytes come in a memory file, the packet's second descriptor, since a packet has a limit (`PACKET`).
    """

    seq: int
    key: str
    stdin: bool
    stdout: bool
    stderr: bool
    raw: bool
    head: bytes = b""
    early: bytes = b""
    detach_keys: bytes = b"\x10\x11"
    hold: bool = False


class Run(msgspec.Struct, tag="run", frozen=True):
    """Make the stdio, spawn `argv` (the OCI runtime, detached), wait for it, take the pid that it wrote, watch that pid.

    The monitor puts paths at the place of these arguments of `argv`: `@pid@` and `@log@` (where the runtime writes the pid and its own words),
    `@process@` (what the packet's first descriptor holds, with `document`), `@console@` (with `tty`, the console socket). stdio of the runtime is
    the process's. With `attach` its client is there before the process is, as by an order of its own (seq and key are this one's). With `namespace`
    the runtime is started in the mount namespace that the packet's last descriptor stands for.
    Answer: `Done` with `pid` (descriptors: pidfd, then the stdio descriptors in the order of `State`), or `Failed` with the runtime's own words;
    after `Failed` nothing of the process is left but attached clients, which wait for the next Run or a Drop.
    """

    seq: int
    key: str
    argv: tuple[str, ...]
    cwd: str
    tty: bool = False
    open_stdin: bool = False
    stdin_once: bool = False
    size: Size | None = None
    log: LogFile | None = None
    document: bool = False
    attach: Attach | None = None
    namespace: bool = False


class Release(msgspec.Struct, tag="release", frozen=True):
    """The held `client` of `key` takes its kept output now and lives on as any other."""

    seq: int
    key: str
    client: int


class Resize(msgspec.Struct, tag="resize", frozen=True):
    """TIOCSWINSZ on the process's terminal. Failed when it has none or does not run."""

    seq: int
    key: str
    size: Size


class Watch(msgspec.Struct, tag="watch", frozen=True):
    """Answer `Done` as soon as the log of `key` is not (`inode`, `offset`) any more, or the process has ended: at once, or later."""

    seq: int
    key: str
    inode: int
    offset: int


class Unwatch(msgspec.Struct, tag="unwatch", frozen=True):
    """Nobody waits for the `Watch` of that seq any more."""

    seq: int
    watch: int


class Follow(msgspec.Struct, tag="follow", frozen=True):
    """The reader `reader` of the log of `key` holds its files up to `inode` (0: none yet): rotation waits for it, within bounds (`LogWriter`).

    The first one of a `reader`, a number of the daemon's choice, says that it is there.
    """

    seq: int
    key: str
    reader: int
    inode: int


class Unfollow(msgspec.Struct, tag="unfollow", frozen=True):
    """That reader of the log of `key` is gone."""

    seq: int
    key: str
    reader: int


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """No process will run under `key` (start failed for good, container removed): its waiting clients are closed."""

    seq: int
    key: str


class Forget(msgspec.Struct, tag="forget", frozen=True):
    """The exit of `key` is on the daemon's disk: its journal entry and record can go."""

    seq: int
    key: str


class Adopt(msgspec.Struct, tag="adopt", frozen=True):
    """A process that a dead monitor watched. Descriptors: pidfd, then stdio as in `State`."""

    seq: int
    key: str
    pid: int
    stdio: str
    stdin_once: bool
    log: LogFile | None


class Keep(msgspec.Struct, tag="keep", frozen=True):
    """A descriptor that the next daemon is to have, in the place of the one kept before."""

    seq: int


class Reaped(msgspec.Struct, tag="reaped", frozen=True):
    """The daemon, parent by subreaping, collected the adopted process `key`; `status` as in `Exited`."""

    seq: int
    key: str
    status: int


class Relay(msgspec.Struct, tag="relay", frozen=True):
    """Take the connections of a listening IPv6 socket (the packet's one descriptor), to which the host's rules give those for other ports,
    and pass each on to its own port at `address` (IPv4, packed). In the place of the socket before; its connections go on.
    """

    seq: int
    address: bytes


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the monitor. Only sent when no process is left (`engined stop`)."""

    seq: int


Order = (
    Hello
    | Run
    | Attach
    | Release
    | Resize
    | Watch
    | Unwatch
    | Follow
    | Unfollow
    | Drop
    | Forget
    | Adopt
    | Keep
    | Reaped
    | Relay
    | Shutdown
)


# --- answers and reports: monitor → daemon ------------------------------------------------------------------------


class Done(msgspec.Struct, tag="done", frozen=True):
    seq: int
    pid: int = 0
    client: int = 0
    log_inode: int = 0
    log_offset: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """`status`: exit status of the runtime, or -1 when it was not run; `reason`: its own words; `attached`: the client of a Run waits."""

    seq: int
    reason: str
    status: int = -1
    attached: bool = False


class State(msgspec.Struct, tag="state", frozen=True):
    """One process at Hello. Descriptors when it runs: pidfd, then `stdio`, a letter each: `i` stdin, `o` stdout, `e` stderr, `t` terminal."""

    key: str
    pid: int
    running: bool
    stdio: str = ""
    stdin_once: bool = False
    log: LogFile | None = None
    status: int = 0
    at: int = 0


class Kept(msgspec.Struct, tag="kept", frozen=True):
    """The descriptor of the last `Keep`, at Hello."""


class Exited(msgspec.Struct, tag="exited", frozen=True):
    """The process ended and its output has been drained. `status`: 0 to 255, 128 + signal when killed; `at`: ns since the epoch."""

    key: str
    status: int
    at: int


class InputEnded(msgspec.Struct, tag="input", frozen=True):
    """The monitor closed the process's stdin: the daemon's duplicate of it must go too, or the process sees no end of file."""

    key: str


class Detached(msgspec.Struct, tag="detached", frozen=True):
    """A client left: by its detach keys (`keys`), by closing, or by the stall limit."""

    key: str
    client: int
    keys: bool


Report = Done | Failed | State | Kept | Exited | InputEnded | Detached

_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)

encode = msgspec.msgpack.Encoder().encode
decode_order = _orders.decode
decode_report = _reports.decode

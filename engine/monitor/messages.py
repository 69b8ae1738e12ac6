"""The messages between daemon and monitor, over one SOCK_SEQPACKET connection, one message per
packet.

Each packet is one MessagePack value. Descriptors accompany it as SCM_RIGHTS, in the order that the
message's docstring gives. Orders go to the monitor and carry `seq`. The monitor answers each with
`Done` or `Failed` of that `seq`. `Drop` and `Forget`, whose answers nothing awaits, are answered
only when they fail. Reports are sent unasked. A *process* is a container's init (key: the
container's id) or an exec (key: the exec's id); the monitor does not distinguish them.

Versions. The monitor outlives the daemon, so that after an upgrade a daemon meets a monitor of the
version before, and after a downgrade one of the version after it. Both directions are served
without touching a container:

- A daemon says Hello in its own protocol. A monitor that does not speak it answers `Failed` and
  keeps the connection; the daemon says Hello again in the previous protocol (`client.py`).
- A monitor speaks its own protocol and the previous one, whichever the Hello names, for the whole
  connection (`monitor.py`).

A daemon may also start a monitor of another version, because an upgrade has replaced the files. So
the arguments `--connection` and `--lock` (`monitor.py`) keep their meaning.

A monitor of an older protocol is replaced when it ends: at the next reboot, `engined stop` or
crash. Until then the daemon does without what only newer monitors have. A change of a message here
raises `PROTOCOL`, and `previous.py` becomes the conversion to the protocol that was current before;
the one before that is dropped. A field with a default may be added without a new number when a peer
that ignores it stays correct, and so may an order that a monitor may refuse (`Hold`).

Not here: sockets and loops (`client.py`, `connection.py`); the previous protocol (`previous.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.logs.targets import Target

PROTOCOL = 4
"""4: targets of logs are tagged; `Superseded` is a report of its own."""

PACKET = 128 << 10
"""Bytes of the longest packet: a Unix socket with the usual send buffer takes it whole."""

STDIN, STDOUT, STDERR = 0, 1, 2


class Size(msgspec.Struct, array_like=True, frozen=True):
    """Terminal size in characters."""

    rows: int
    columns: int


# --- orders: daemon → monitor ---------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First packet of a daemon. Answered by one `State` per known process, by `Kept` when a
    descriptor is kept, with `held` by one `Held` per descriptor of `Hold`, then by `Done`.

    `Done` waits a few seconds for processes that an earlier daemon had ordered and that are still
    being created. A process created after that is reported by an unasked `State`. A newer daemon's
    Hello ends an older connection, which is sent `Superseded` first. `attach_stall`: seconds after
    which a client that accepts no output is disconnected; -1: unchanged. With `rotated` this daemon
    gets `Rotated`, with `dropped` it gets `Dropped`, with `unlogged` it gets `Unlogged`.
    """

    seq: int
    protocol: int = PROTOCOL
    attach_stall: int = -1
    held: bool = False
    rotated: bool = False
    dropped: bool = False
    unlogged: bool = False


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Give a client's socket (the packet's only descriptor) to a process, which need not run yet.

    `head` is written before anything else, then output as it arrives: frames, or raw bytes when
    `raw` (a terminal, or a websocket relay). `early` are bytes of stdin that the daemon had already
    read. With `hold`, the client is only registered until `Release`; output from the moment of
    registration is buffered for it. The buffer is bounded, and the process stalls at the bound.
    Answer: `Done` with `client`; `pid`, which is 0 when the client waits for a Run; and, for a
    process with a log, `log_inode` and `log_offset`, the end of the log at the moment of
    registration. A held client is first given the part of a line that is read but not logged yet.
    Long `early` bytes come in a memory file, the packet's second descriptor, because a packet is
    limited (`PACKET`).
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
    """Make the stdio, spawn `argv` (the OCI runtime, detached), wait for it, read the pid that it
    wrote, and watch that pid.

    The monitor replaces these arguments of `argv` with paths: `@pid@` and `@log@` (where the
    runtime writes the pid and its messages), `@process@` (the content of the packet's first
    descriptor, with `document`), `@console@` (with `tty`, the console socket). The runtime inherits
    the process's stdio. With `attach`, that client is attached before the process exists, as by a
    separate order with this order's seq and key. With `namespace`, the runtime is started in the
    mount namespace given by the packet's last descriptor.
    Answer: `Done` with `pid` (descriptors: pidfd, then the stdio descriptors in the order of
            `State`), or `Failed` with the runtime's message. After `Failed` only attached clients
            remain, which wait for the next Run or a Drop.
    """

    seq: int
    key: str
    argv: tuple[str, ...]
    cwd: str
    tty: bool = False
    open_stdin: bool = False
    stdin_once: bool = False
    size: Size | None = None
    log: Target | None = None
    document: bool = False
    attach: Attach | None = None
    namespace: bool = False
    owner: tuple[int, int] | None = None
    """uid and gid of its stdio on the host, for a process in a user namespace; None: root."""


class Release(msgspec.Struct, tag="release", frozen=True):
    """Send the held `client` of `key` its buffered output now; from then on it is like any other
    client."""

    seq: int
    key: str
    client: int


class Resize(msgspec.Struct, tag="resize", frozen=True):
    """TIOCSWINSZ on the process's terminal. Failed when it has none or does not run."""

    seq: int
    key: str
    size: Size


class Watch(msgspec.Struct, tag="watch", frozen=True):
    """Answer `Done` once the end of the log of `key` differs from (`inode`, `offset`), or once the
    process has ended. May be immediate."""

    seq: int
    key: str
    inode: int
    offset: int


class Unwatch(msgspec.Struct, tag="unwatch", frozen=True):
    """Cancel the `Watch` of that seq."""

    seq: int
    watch: int


class Follow(msgspec.Struct, tag="follow", frozen=True):
    """The reader `reader` of the log of `key` holds its files open up to `inode` (0: none yet).
    Rotation waits for it, within bounds (`LogWriter`).

    The first order for a `reader`, a number that the daemon chooses, registers it.
    """

    seq: int
    key: str
    reader: int
    inode: int


class Unfollow(msgspec.Struct, tag="unfollow", frozen=True):
    """The reader of the log of `key` has finished."""

    seq: int
    key: str
    reader: int


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """No process will run under `key` (start failed for good, container removed): close its waiting
    clients."""

    seq: int
    key: str


class Forget(msgspec.Struct, tag="forget", frozen=True):
    """The exit of `key` is on the daemon's disk: its journal entry and record can be deleted."""

    seq: int
    key: str


class Adopt(msgspec.Struct, tag="adopt", frozen=True):
    """Hand over a process that a dead monitor watched. Descriptors: pidfd, then stdio as in
    `State`."""

    seq: int
    key: str
    pid: int
    stdio: str
    stdin_once: bool
    log: Target | None


class Keep(msgspec.Struct, tag="keep", frozen=True):
    """Hold a descriptor for the next daemon. It replaces the one kept before."""

    seq: int


class Hold(msgspec.Struct, tag="hold", frozen=True):
    """Hold a descriptor (the packet's only one) for the next daemon under a name. It replaces the
    one of that name. Without a descriptor that one is closed."""

    seq: int
    name: str


class Reaped(msgspec.Struct, tag="reaped", frozen=True):
    """The daemon, parent by subreaping, reaped the adopted process `key`; `status` as in
    `Exited`."""

    seq: int
    key: str
    status: int


class Relay(msgspec.Struct, tag="relay", frozen=True):
    """Accept connections on a listening IPv6 socket (the packet's only descriptor), to which the
    host's rules redirect other ports. Pass each connection on to its own port at `address` (IPv4,
    packed). Replaces the earlier listening socket; connections already accepted continue."""

    seq: int
    address: bytes


class Serve(msgspec.Struct, tag="serve", frozen=True):
    """Hold a listening socket (the packet's only descriptor) under `name` as `Hold` does, and pass
    what comes to it on to `port` at `address` (packed), from connections or datagrams. An order
    `Hold` for the name ends this. Connections already accepted continue."""

    seq: int
    name: str
    address: bytes
    port: int


class Ship(msgspec.Struct, tag="ship", frozen=True):
    """Have a shipper run, which looks at the spools in `root`/logs again: one was removed with its
    container, or has something to deliver and no process."""

    seq: int
    root: str


class Compressed(msgspec.Struct, tag="compressed", frozen=True):
    """The rotated file with that inode, of the log of `key`, is compressed in the file at `path`:
    put that one into its place. Failed when there is no such file any more; then `path` is the
    daemon's to remove."""

    seq: int
    key: str
    inode: int
    path: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the monitor. Sent only when no process is left (`engined stop`)."""

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
    | Hold
    | Reaped
    | Relay
    | Serve
    | Ship
    | Compressed
    | Shutdown
)


# --- answers and reports: monitor → daemon --------------------------------------------------------


class Done(msgspec.Struct, tag="done", frozen=True):
    seq: int
    pid: int = 0
    client: int = 0
    log_inode: int = 0
    log_offset: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """`status`: the runtime's exit status, or -1 when it was not run; `reason`: its message;
    `attached`: the client of a Run waits."""

    seq: int
    reason: str
    status: int = -1
    attached: bool = False


class State(msgspec.Struct, tag="state", frozen=True):
    """One process, reported at Hello. Descriptors when it runs: pidfd, then one per letter of
    `stdio`: `i` stdin, `o` stdout, `e` stderr, `t` terminal."""

    key: str
    pid: int
    running: bool
    stdio: str = ""
    stdin_once: bool = False
    log: Target | None = None
    status: int = 0
    at: int = 0


class Kept(msgspec.Struct, tag="kept", frozen=True):
    """The descriptor of the last `Keep`, sent at Hello."""


class Held(msgspec.Struct, tag="held", frozen=True):
    """The descriptor of the last `Hold` of this name, sent at Hello."""

    name: str


class Exited(msgspec.Struct, tag="exited", frozen=True):
    """The process ended and its output has been drained.

    `status`: 0 to 255, 128 + signal when killed; `at`: ns since the epoch.
    """

    key: str
    status: int
    at: int


class InputEnded(msgspec.Struct, tag="input", frozen=True):
    """The monitor closed the process's stdin. The daemon must close its duplicate too, or the
    process never sees end of file."""

    key: str


class Detached(msgspec.Struct, tag="detached", frozen=True):
    """A client left: by its detach keys (`keys`), by closing its socket, or by the stall limit."""

    key: str
    client: int
    keys: bool


class Rotated(msgspec.Struct, tag="rotated", frozen=True):
    """The log of `key` has a file more that can be compressed."""

    key: str


class Dropped(msgspec.Struct, tag="dropped", frozen=True):
    """So many entries of the log of `key` could not be written since its process started. Sent
    some time after such a failure, and at Hello."""

    key: str
    lines: int


class Unlogged(msgspec.Struct, tag="unlogged", frozen=True):
    """The monitor's file of what it has read and not logged yet (`_fast/unlogged.pyx`), sent at
    Hello if there is one. The packet's only descriptor, for reading."""


class Superseded(msgspec.Struct, tag="superseded", frozen=True):
    """Another daemon has said Hello. This connection ends; the monitor and its processes now belong
    to that daemon."""


Report = (
    Done | Failed | State | Kept | Held | Exited | InputEnded | Detached | Rotated | Dropped | Unlogged | Superseded
)


NOT_A_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised by decoding of malformed packets: msgspec has no errors of its own for text that is not
UTF-8, and for deep nesting."""


class Codec:
    """How messages of one protocol are written and read.

    `decode_order` and `decode_report` raise one of `NOT_A_MESSAGE`.
    """

    def __init__(
        self,
        protocol: int,
        encode: Callable[[object], bytes],
        decode_order: Callable[[bytes], Order],
        decode_report: Callable[[bytes], Report],
    ) -> None:
        self.protocol = protocol
        self.encode = encode
        self.decode_order = decode_order
        self.decode_report = decode_report


_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)

encode = msgspec.msgpack.Encoder().encode
decode_order = _orders.decode
decode_report = _reports.decode

CURRENT = Codec(PROTOCOL, encode, decode_order, decode_report)


class _Numbered(msgspec.Struct):
    seq: int = 0


def number(data: bytes) -> int:
    """The `seq` of a packet, which need not be a valid order; 0 when it has none."""
    try:
        return max(0, _numbered.decode(data).seq)
    except NOT_A_MESSAGE:
        return 0


_numbered = msgspec.msgpack.Decoder(_Numbered)

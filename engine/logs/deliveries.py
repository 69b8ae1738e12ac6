"""What the shipper needs to deliver one container's lines to a remote target: the document
`delivery` in the container's directory of ROOT/logs.

The daemon writes it before each start of a container with a remote driver, the shipper reads it.
Every option is parsed and typed here; a sender parses no option. The modules of `logs/drivers` make
the targets. Pure: certificate files are read by the sender that connects.

Documents are JSON, and unknown fields are ignored, so that a shipper of another version can read
them. A document may hold secrets (a Splunk token): its file has mode 0600.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.wire.log_plugins import LogInfo

Key: TypeAlias = tuple[str, ...]
"""Identifies a destination: feeds of equal keys can share a connection. For a log line or an error
message, the second element is the address."""


class Tls(msgspec.Struct, frozen=True, omit_defaults=True):
    """TLS of a connection. Paths of PEM files on this host; empty means not given.

    `ca`: certificates that may sign the server's; the system's without it. `cert`, `key`: of the
    client. `skip_verify`: accept any server certificate. `server_name`: expected in the server's
    certificate instead of the host's name.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    skip_verify: bool = False
    server_name: str = ""

    @property
    def parts(self) -> Key:
        """Part of a destination's key."""
        return ("tls", self.ca, self.cert, self.key, str(self.skip_verify), self.server_name)


class Syslog(msgspec.Struct, frozen=True, tag_field="driver", tag="syslog"):
    """A syslog server.

    `scheme`: "" for the local socket (see `LOCAL_SYSLOG`), "udp", "tcp", "tcp+tls", "unix" (stream)
    or "unixgram". `host` (IPv6 without brackets) and `port` belong to the network schemes, `path`
    to the sockets. `tls` is given only for "tcp+tls".

    `facility`: 0 to 23 (RFC 5424 6.2.1). `format`: "unix" is RFC 3164 without a host name.
    """

    scheme: Literal["", "udp", "tcp", "tcp+tls", "unix", "unixgram"] = ""
    host: str = ""
    port: int = 514
    path: str = ""
    facility: int = 3
    format: Literal["unix", "rfc3164", "rfc5424", "rfc5424micro"] = "unix"
    tls: Tls | None = None

    @property
    def octet_counted(self) -> bool:
        """True if a message begins with its length (RFC 5425 4.3) instead of ending in a newline.
        Docker's driver does so for RFC 5424 over TLS only."""
        return self.scheme == "tcp+tls" and self.format.startswith("rfc5424")

    @property
    def destination(self) -> Key:
        framing = "octets" if self.octet_counted else "lines"
        return ("syslog", self.address, framing, *_tls(self.tls))

    @property
    def address(self) -> str:
        return _address(self.scheme, self.host, self.port, self.path) if self.scheme else "local"


LOCAL_SYSLOG = ("/dev/log", "/var/run/syslog", "/var/run/log")
"""Sockets of the local syslog. Each is tried as a datagram socket first, then all as streams."""


class Journald(msgspec.Struct, frozen=True, tag_field="driver", tag="journald"):
    """The journal of this host (`JOURNAL`)."""

    @property
    def destination(self) -> Key:
        return ("journald", self.address)

    @property
    def address(self) -> str:
        return JOURNAL


JOURNAL = "/run/systemd/journal/socket"
"""Datagram socket of systemd's journal, for native messages."""


class Gelf(msgspec.Struct, frozen=True, tag_field="driver", tag="gelf"):
    """A server of GELF 1.1, "udp" or "tcp".

    `compression` and its `level` (1 is the fastest, 9 the smallest, 0 stores, -1 is zlib's choice)
    are for datagrams; messages over TCP are never compressed. `reconnect_delay`: seconds after a
    lost TCP connection.
    """

    scheme: Literal["udp", "tcp"]
    host: str
    port: int
    compression: Literal["gzip", "zlib", "none"] = "gzip"
    level: int = 1
    reconnect_delay: int = 1

    @property
    def destination(self) -> Key:
        return ("gelf", self.address, str(self.reconnect_delay))

    @property
    def address(self) -> str:
        return _address(self.scheme, self.host, self.port)


class Fluentd(msgspec.Struct, frozen=True, tag_field="driver", tag="fluentd"):
    """A server of Fluentd's forward protocol over "tcp", "tls" or "unix" (`path`).

    All times are in seconds. `async_`: a start does not wait for a connection; then
    `async_reconnect_interval` is the time between two connections made anew (0: never).
    `retry_wait`: after the first failed connection. `request_ack`: every chunk is acknowledged by
    the server. `sub_second`: times are EventTime (nanoseconds) instead of integers. Timeouts of 0
    are none.
    """

    scheme: Literal["tcp", "tls", "unix"] = "tcp"
    host: str = "127.0.0.1"
    port: int = 24224
    path: str = ""
    async_: bool = False
    async_reconnect_interval: float = 0.0
    retry_wait: float = 1.0
    request_ack: bool = False
    sub_second: bool = False
    write_timeout: float = 0.0
    read_timeout: float = 0.0

    @property
    def destination(self) -> Key:
        times = (self.async_reconnect_interval, self.retry_wait, self.write_timeout, self.read_timeout)
        return ("fluentd", self.address, *map(str, (self.request_ack, *times)))

    @property
    def address(self) -> str:
        return _address(self.scheme, self.host, self.port, self.path)


class Splunk(msgspec.Struct, frozen=True, tag_field="driver", tag="splunk"):
    """Splunk's HTTP Event Collector.

    `url`: scheme, host and port, with the collector's path (`/services/collector/event/1.0` unless
    the option had another). `token` is a secret. `source`, `sourcetype`, `index`: of the events, if
    not empty. `format`: of a line in an event. `verify_connection`: a start asks the collector
    first. `gzip`: of the bodies, with a `gzip_level` as in `Gelf`.
    `index_acknowledgment`: lines count as delivered when the indexer says so. `tls` is given
    exactly for https.
    """

    url: str
    token: str
    source: str = ""
    sourcetype: str = ""
    index: str = ""
    format: Literal["inline", "json", "raw"] = "inline"
    verify_connection: bool = True
    gzip: bool = False
    gzip_level: int = -1
    index_acknowledgment: bool = False
    tls: Tls | None = None

    @property
    def destination(self) -> Key:
        body = (self.gzip, self.gzip_level, self.index_acknowledgment)
        return ("splunk", self.url, self.token, *map(str, body), *_tls(self.tls))

    @property
    def address(self) -> str:
        return self.url


class Awslogs(msgspec.Struct, frozen=True, tag_field="driver", tag="awslogs"):
    """A stream of Amazon CloudWatch Logs.

    `region`: empty if neither the option nor AWS_REGION has it; the sender then asks the instance's
    metadata. `endpoint`: URL, empty for the region's own. `credentials_endpoint`: path below
    `CREDENTIALS_HOST`, empty for the default chain. `create_group`, `create_stream`: make what does
    not exist. `multiline`: a regular expression in RE2's syntax
    (`engine.common.patterns.compiled`); a line in which it matches anywhere begins an event. Empty:
    every line is an event. `flush_interval`: seconds between two batches. `format`: "json/emf"
    makes the sender set the header `x-amzn-logs-format`.
    """

    region: str
    group: str
    stream: str
    create_group: bool = False
    create_stream: bool = True
    multiline: str = ""
    credentials_endpoint: str = ""
    endpoint: str = ""
    flush_interval: int = 5
    format: Literal["", "json/emf"] = ""

    @property
    def destination(self) -> Key:
        """Streams share the client; a batch belongs to one stream."""
        return ("awslogs", self.address, self.region, self.endpoint, self.credentials_endpoint, self.format)

    @property
    def address(self) -> str:
        return self.endpoint or (f"logs.{self.region}.amazonaws.com" if self.region else "logs.amazonaws.com")


CREDENTIALS_HOST = "http://169.254.170.2"
"""Where `credentials_endpoint` is a path: the credentials of a task role."""


class LogPlugin(msgspec.Struct, frozen=True, tag_field="driver", tag="plugin"):
    """A plugin that reads entries from a FIFO for each container.

    `name`: as the container's configuration has it. `fifo`: path of the FIFO, which the daemon
    makes. `info`: what the daemon tells the plugin of the container. The document keeps it for a
    daemon that starts later.
    """

    name: str
    fifo: str = ""
    info: LogInfo = LogInfo()

    @property
    def destination(self) -> Key:
        return (self.name, self.address)

    @property
    def address(self) -> str:
        return "plugin"


Remote: TypeAlias = Syslog | Journald | Gelf | Fluentd | Splunk | Awslogs | LogPlugin
"""A remote target, tagged with `driver`. Each has `destination`, the key of feeds that can share a
connection, and `address`, for messages."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One container's lines and their target.

    `name`: without the leading slash. `tag`: rendered. `attributes`: labels and variables that the
    options name. `host`: the host's name. `image_id`: with its algorithm. `command`: path and
    arguments, separated by spaces. `created`: nanoseconds since the epoch. `pid`: the daemon's, for
    syslog. `blocking`, `quota`: as in `targets.Spool`. `keep`: read lines stay in the spool for
    `docker logs`; without it (option `cache-disabled`) files are removed when they are delivered.
    """

    id: str
    name: str
    tag: str
    target: Remote
    attributes: dict[str, str] = {}
    host: str = ""
    image_id: str = ""
    image_name: str = ""
    command: str = ""
    created: int = 0
    pid: int = 0
    blocking: bool = True
    quota: int = 0
    keep: bool = True


def encode(delivery: Delivery) -> bytes:
    return _encoder.encode(delivery)


def decode(document: bytes) -> Delivery:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(document)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Delivery)


def _address(scheme: str, host: str, port: int, path: str = "") -> str:
    if path:
        return f"{scheme}://{path}"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _tls(tls: Tls | None) -> Key:
    return tls.parts if tls is not None else ()


__all__ = [
    "CREDENTIALS_HOST",
    "JOURNAL",
    "LOCAL_SYSLOG",
    "Awslogs",
    "Delivery",
    "Fluentd",
    "Gelf",
    "Journald",
    "Key",
    "LogPlugin",
    "Remote",
    "Splunk",
    "Syslog",
    "Tls",
    "decode",
    "encode",
]

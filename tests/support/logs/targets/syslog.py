"""rsyslog and syslog-ng with sources of every transport, and the messages as they parse them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from engine.logs.deliveries import Syslog
from tests.support.logs.targets.certificates import Authority, Pair
from tests.support.logs.targets.programs import UNPACKED, Server, binds, free_port, listens

PROPERTIES = (
    *("msg", "rawmsg", "hostname", "source", "syslogtag", "programname", "pri", "pri-text", "syslogfacility"),
    *("syslogseverity", "timereported", "app-name", "procid", "msgid", "structured-data", "protocol-version"),
    "inputname",
)
"""Properties of rsyslog, https://www.rsyslog.com/doc/configuration/properties.html."""
NAMES = ("MSG", "RAWMSG", "HOST", "PROGRAM", "PID", "MSGID", "PRI", "FACILITY", "LEVEL", "S_ISODATE", "SDATA", "SOURCE")
"""Macros of syslog-ng."""


class _Both(Server):
    """What the two have in common: ports and paths of their sources, and the file of messages."""

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        """`authority`: signs the certificate of the TLS source, which is absent without it."""
        super().__init__(directory)
        self.tcp = free_port()
        self.tls = free_port()
        self.udp = free_port(socket.SOCK_DGRAM)
        self.stream_path = str(directory / "stream")
        self.datagram_path = str(directory / "datagram")
        self.received = directory / "received"
        self.authority = authority
        self.pair: Pair | None = authority.sign(f"server-{self.tls}") if authority is not None else None

    def target(self, scheme: Any, **more: Any) -> Syslog:
        """A target at the source of that scheme. Further arguments are those of `Syslog`."""
        path = {"unix": self.stream_path, "unixgram": self.datagram_path}.get(scheme, "")
        port = {"udp": self.udp, "tcp": self.tcp, "tcp+tls": self.tls}.get(scheme, 514)
        return Syslog(scheme=scheme, host="" if path else "127.0.0.1", port=port, path=path, **more)

    def messages(self) -> list[dict[str, str]]:
        """All messages so far. Bytes that are no UTF-8 are surrogates."""
        try:
            data = self.received.read_bytes()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        return [json.loads(line.decode(errors="surrogateescape"), strict=False) for line in whole.splitlines()]


class Rsyslog(_Both):
    """rsyslogd. Its Unix sources are datagram sockets only."""

    def start(self) -> None:
        modules = UNPACKED / "usr/lib" / _triplet() / "rsyslog"
        outputs = " ".join(f'property(name="{name}" outname="{name}" format="jsonf")' for name in PROPERTIES)
        lines = [
            f'global(workDirectory="{self.directory}" maxMessageSize="64k"',
            '    parser.escapeControlCharactersOnReceive="off" net.enableDNS="off" shutdown.queue.doublesize="off"',
        ]
        if self.pair is not None and self.authority is not None:
            lines += [
                '    defaultNetstreamDriver="gtls"',
                f'    defaultNetstreamDriverCAFile="{self.authority.cert}"',
                f'    defaultNetstreamDriverCertFile="{self.pair.cert}"',
                f'    defaultNetstreamDriverKeyFile="{self.pair.key}"',
            ]
        lines += [
            ")",
            'module(load="imudp") module(load="imtcp") module(load="imuxsock" sysSock.use="off")',
            f'input(type="imudp" address="127.0.0.1" port="{self.udp}")',
            f'input(type="imtcp" address="127.0.0.1" port="{self.tcp}" streamDriver.name="ptcp" streamDriver.mode="0")',
            f'input(type="imuxsock" socket="{self.datagram_path}" useSpecialParser="off" useSysTimeStamp="off"',
            '    ignoreTimestamp="off" ratelimit.interval="0" unlink="on")',
        ]
        if self.pair is not None:
            lines += [
                f'input(type="imtcp" address="127.0.0.1" port="{self.tls}" streamDriver.name="gtls"',
                '    streamDriver.mode="1" streamDriver.authmode="anon")',
            ]
        lines += [
            f'template(name="all" type="list" option.jsonf="on") {{ {outputs} }}',
            f'action(type="omfile" file="{self.received}" template="all" asyncWriting="off" ioBufferSize="64k"',
            '    flushOnTXEnd="on")',
        ]
        (self.directory / "conf").write_text("\n".join(lines) + "\n")
        (self.directory / "pid").unlink(missing_ok=True)
        program = str(UNPACKED / "usr/sbin/rsyslogd")
        command = [program, "-n", "-f", "conf", "-i", str(self.directory / "pid"), "-M", str(modules)]
        self.run(command, self._ready)

    def _ready(self) -> bool:
        tls = self.pair is None or listens(self.tls)
        return listens(self.tcp) and tls and binds(self.udp) and os.path.exists(self.datagram_path)


class SyslogNg(_Both):
    """syslog-ng. Its sources take RFC 3164, in lines where they are streams."""

    def __init__(self, directory: Path, authority: Authority | None = None, *, modern: bool = False) -> None:
        """`modern`: all sources take RFC 5424; the TLS source with octet counts (RFC 5425 4.3)."""
        super().__init__(directory, authority)
        self._flags = "syslog-protocol,store-raw-message" if modern else "store-raw-message"
        self._modern = modern

    def start(self) -> None:
        common = f"flags({self._flags}) keep-hostname(yes)"
        local = f'ip("127.0.0.1") {common}'
        many = "max-connections(256) log-iw-size(25600)"
        sources = [
            f'network(transport("udp") port({self.udp}) {local});',
            f'network(transport("tcp") port({self.tcp}) {local} {many});',
            f'unix-stream("{self.stream_path}" {common} {many});',
            f'unix-dgram("{self.datagram_path}" {common});',
        ]
        if self.pair is not None:
            tls = f'tls(key-file("{self.pair.key}") cert-file("{self.pair.cert}") peer-verify(optional-untrusted))'
            # RFC 5425: with octet counts
            kind = "syslog" if self._modern else "network"
            sources.append(f'{kind}(transport("tls") port({self.tls}) {local} {many} {tls});')
        pairs = " ".join(f'{name}=\\"${{{name}}}\\"' for name in NAMES)
        text = f"""@version: 3.38
@module afsocket
@module affile
@module syslogformat
@module json-plugin
options {{ chain-hostnames(no); use-dns(no); stats-freq(0); log-msg-size(65536); flush-lines(1); }};
source all {{ {" ".join(sources)} }};
destination out {{ file("{self.received}" template("$(format-json {pairs})\\n")); }};
log {{ source(all); destination(out); }};
"""
        (self.directory / "conf").write_text(text)
        where = [f"--{name}={self.directory}/{name}" for name in ("control", "persist-file", "pidfile")]
        home = UNPACKED / "usr/lib/syslog-ng"
        modules = next(path for path in home.iterdir() if path.name[0].isdigit())
        command = [
            *(str(UNPACKED / "usr/sbin/syslog-ng"), "-F", "-f", "conf", *where, "--no-caps"),
            f"--module-path={modules}",
        ]
        self.run(command, self._ready)

    def _ready(self) -> bool:
        tls = self.pair is None or listens(self.tls)
        paths = all(os.path.exists(path) for path in (self.stream_path, self.datagram_path))
        return listens(self.tcp) and tls and binds(self.udp) and paths


def _triplet() -> str:
    return next(path.name for path in (UNPACKED / "usr/lib").iterdir() if path.name.endswith("-linux-gnu"))

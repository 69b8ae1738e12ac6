"""The driver fluentd: a server of Fluentd's forward protocol, over TCP, TLS or a Unix socket."""

from __future__ import annotations

from engine.errors import InvalidParameter
from engine.logs.deliveries import Fluentd
from engine.logs.options import Address, Options, address

NAME = "fluentd"
OPTIONS = frozenset((
    "fluentd-address", "fluentd-async", "fluentd-async-connect", "fluentd-async-reconnect-interval",
    "fluentd-buffer-limit", "fluentd-max-retries", "fluentd-request-ack", "fluentd-retry-wait",
    "fluentd-sub-second-precision", "fluentd-write-timeout", "fluentd-read-timeout",
))  # fmt: skip
"""`fluentd-async-connect` is the name of `fluentd-async` before Docker 20.10."""

_HOST = "127.0.0.1"
_PORT = 24224
_MOST_RETRIES = (1 << 31) - 1
_BUFFER = 1 << 20
_BUFFER_MAX = 1 << 40
_SHORTEST, _LONGEST = 0.1, 10.0


def parse(options: Options) -> Fluentd:
    scheme, host, port, path = _address(options.text("fluentd-address"))
    if "fluentd-async" in options and "fluentd-async-connect" in options:
        raise InvalidParameter("conflicting options: cannot specify both 'fluentd-async' and 'fluentd-async-connect'")
    interval = options.seconds("fluentd-async-reconnect-interval", 0.0)
    if interval and not _SHORTEST <= interval <= _LONGEST:
        raise options.invalid("fluentd-async-reconnect-interval", "value must be between 100ms and 10s")
    buffer_limit = options.size("fluentd-buffer-limit", _BUFFER, binary=True)
    if not 0 < buffer_limit <= _BUFFER_MAX:
        raise options.invalid("fluentd-buffer-limit", f"must be from 1 to {_BUFFER_MAX} bytes")
    # Lines wait in the spool instead, as long as it takes.
    options.integer("fluentd-max-retries", _MOST_RETRIES, 0, _MOST_RETRIES)
    asynchronous = options.boolean("fluentd-async", options.boolean("fluentd-async-connect", False))
    return Fluentd(
        scheme,  # type: ignore[arg-type]  # one of those that `_address` accepts
        host,
        port,
        path,
        async_=asynchronous,
        async_reconnect_interval=interval if asynchronous else 0.0,
        retry_wait=options.seconds("fluentd-retry-wait", 1.0),
        request_ack=options.boolean("fluentd-request-ack", False),
        sub_second=options.boolean("fluentd-sub-second-precision", False),
        write_timeout=options.seconds("fluentd-write-timeout", 0.0),
        read_timeout=options.seconds("fluentd-read-timeout", 0.0),
    )


def _address(text: str) -> Address:
    if not text:
        return Address("tcp", _HOST, _PORT)
    try:
        found = address(text if "://" in text else f"tcp://{text}", ("tcp", "tls"), ("unix",))
    except ValueError as error:
        raise InvalidParameter(f"invalid fluentd-address {text}: {error}") from error
    return found if found.path else found._replace(host=found.host or _HOST, port=found.port or _PORT)

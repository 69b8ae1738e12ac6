"""Protocol 3, in use until log targets were tagged: converts its messages to and from those of
`messages.py`.

Differences from protocol 4:
- A log is `[path, max_size, max_file, attrs]`, without the tag "json-file" in front. Other targets
  cannot be expressed.
- A daemon that was superseded is sent `Failed` with seq 0 and the reason `SUPERSEDED`.
- Run has no owner of the stdio: a process in a user namespace cannot be expressed.
- Hello does not ask for held descriptors, for the file of what is not logged yet, nor for reports
  of rotated logs and dropped lines.

Not here: which protocol a connection speaks (`client.py`, `monitor.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.monitor import messages
from engine.monitor.messages import PROTOCOL, Codec, Hello, Order, Report, Superseded

PREVIOUS = PROTOCOL - 1
SUPERSEDED = "another daemon has come"
_TAG = "json-file"


def encode(message: object) -> bytes:
    """Raises ValueError for a target, or the owner of a stdio, that protocol 3 cannot express."""
    if isinstance(message, Superseded):
        message = messages.Failed(0, SUPERSEDED)
    if isinstance(message, Hello):
        message = msgspec.structs.replace(message, protocol=PREVIOUS)
    document: Any = msgspec.to_builtins(message, builtin_types=(bytes,))
    if isinstance(message, Hello):
        for field in ("held", "rotated", "dropped", "unlogged"):
            document.pop(field, None)
    if document.pop("owner", None) is not None:
        raise ValueError(f"a monitor of protocol {PREVIOUS} cannot run processes in user namespaces")
    log = document.get("log")
    if log is not None:
        if log[0] != _TAG:
            raise ValueError(f"a monitor of protocol {PREVIOUS} has no log driver {log[0]!r}")
        document["log"] = log[1:5]  # rotated files are not compressed
    return msgspec.msgpack.encode(document)


def _decode(data: bytes, kind: Any) -> Any:
    document = msgspec.msgpack.decode(data)
    if isinstance(document, dict) and isinstance(document.get("log"), list):
        document["log"] = [_TAG, *document["log"]]
    return msgspec.convert(document, kind, builtin_types=(bytes,))


def decode_order(data: bytes) -> Order:
    order: Order = _decode(data, Order)
    return order


def decode_report(data: bytes) -> Report:
    report: Report = _decode(data, Report)
    if isinstance(report, messages.Failed) and report.seq == 0 and report.reason == SUPERSEDED:
        return Superseded()
    return report


CODEC = Codec(PREVIOUS, encode, decode_order, decode_report)

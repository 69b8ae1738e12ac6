"""The senders: a module per kind of transport, and the table of drivers.

A module is imported when the first container needs it, because those for HTTP are large.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from engine.logs.deliveries import Delivery, Gelf, LogPlugin, Syslog

if TYPE_CHECKING:
    from engine.shipper.destination import Destination, Owner

_SENDERS = {
    "syslog": ("streams", "SyslogStream"),
    "syslog datagrams": ("datagrams", "SyslogDatagrams"),
    "gelf": ("streams", "GelfStream"),
    "gelf datagrams": ("datagrams", "GelfDatagrams"),
    "journald": ("datagrams", "Journal"),
    "fluentd": ("fluentd", "FluentdStream"),
    "splunk": ("splunk", "SplunkCollector"),
    "awslogs": ("awslogs", "CloudWatch"),
    "plugin": ("plugin", "Plugin"),
}


def destination(owner: Owner, document: Delivery) -> Destination:
    """The destination of a container's lines, which others with the same key may share."""
    target = document.target
    name = target.destination[0]
    if isinstance(target, Syslog) and target.scheme in ("", "udp", "unixgram"):
        name += " datagrams"
    if isinstance(target, Gelf) and target.scheme == "udp":
        name += " datagrams"
    if isinstance(target, LogPlugin):
        name = "plugin"
    module, kind = _SENDERS[name]
    made: Destination = getattr(importlib.import_module(f"{__name__}.{module}"), kind)(owner, document)
    return made

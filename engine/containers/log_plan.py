"""Where a container's output goes, by its log driver: the facts that the drivers ask for
(`engine.logs` is pure), and the places of its log below ROOT.

Not here: reading a log (`logs.py`); writing it (the monitor); delivering it (the shipper).
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.config import Config
from engine.containers.store import ContainerRecord
from engine.logs import drivers
from engine.logs.deliveries import JOURNAL
from engine.logs.drivers import Plan
from engine.logs.facts import Facts
from engine.wire.containers import LogConfig

SPOOLS = "logs"
"""Below ROOT: a directory for each container whose lines are delivered to a remote target."""

SPOOL = "spool.log"
"""The newest file of a spool."""

FIFOS = "logging"
"""Below RUN: a FIFO for each container whose driver is a plugin."""


def plan(config: Config, record: ContainerRecord) -> Plan:
    """For a start. Raises ServerError."""
    return drivers.plan(record.host.log_config, _facts(config, record))


def details(config: Config, record: ContainerRecord) -> str:
    """The prefix of each line with `details=1`."""
    return drivers.details(record.host.log_config, _facts(config, record))


def path(config: Config, record: ContainerRecord) -> Path | None:
    """The newest file of its log; None if the log cannot be read."""
    log = record.host.log_config
    if not drivers.readable(log):
        return None
    return spool(config, record.id) / SPOOL if drivers.remote(log) else _file(config, record.id)


def delivered(record: ContainerRecord) -> bool:
    """True if its lines go to a remote target."""
    return drivers.remote(record.host.log_config)


def rotates(record: ContainerRecord) -> bool:
    """False if its log has one file only."""
    log = record.host.log_config
    return log.type not in ("", "json-file") or "max-size" in log.config


def may_compress(record: ContainerRecord) -> bool:
    """False if rotated files of its log are never compressed."""
    log = record.host.log_config
    return log.type not in ("", "json-file", "none") or "compress" in log.config


def spool(config: Config, container_id: str) -> Path:
    """The directory of its undelivered lines, of their delivery document and of the position up to
    which they are delivered."""
    return config.root / SPOOLS / container_id


def resolved(log: LogConfig, config: Config) -> LogConfig:
    """A create's configuration, completed by the daemon's defaults. Raises InvalidParameter."""
    found = drivers.resolve(log, drivers.of_daemon(config))
    drivers.validate(found)
    return found


def has_journal() -> bool:
    """True if this host runs systemd's journal."""
    return os.path.exists(JOURNAL)


def _file(config: Config, container_id: str) -> Path:
    return config.root / f"containers/{container_id}/{container_id}-json.log"


def _facts(config: Config, record: ContainerRecord) -> Facts:
    return Facts(
        id=record.id,
        name=record.name,
        image_id=record.image_id,
        image_name=record.config.image,
        path=record.path,
        args=record.args,
        created=record.created,
        labels=record.config.labels or {},
        environment=record.config.env or (),
        hostname=os.uname().nodename,
        pid=os.getpid(),
        journal=has_journal(),
        region=os.environ.get("AWS_REGION", ""),
        log_path=str(_file(config, record.id)),
        spool=str(spool(config, record.id)),
        fifo=str(config.run / FIFOS / record.id),
    )

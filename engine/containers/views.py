"""A container as clients see it: the list's summary and inspect, made from its record. Pure; reads
no disk and takes no lock.

Not here: differences of older versions (`api/versions/`), sizes (the caller gives them).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from engine.common.times import rfc3339
from engine.containers import security
from engine.containers.body import strings
from engine.containers.lifecycle import State
from engine.containers.store import ContainerRecord, Health, Status
from engine.networks import ports
from engine.networks.network import BRIDGE, DEFAULT_MODES
from engine.runtime import apparmor
from engine.storage.overlay import DRIVER_NAME
from engine.wire.containers import (
    ContainerInspect,
    ContainerState,
    ContainerSummary,
    GraphDriver,
    HealthLogEntry,
    HealthState,
    HealthSummary,
    HostConfig,
    MountPoint,
    NetworkSettings,
    Port,
    SummaryHostConfig,
    SummaryNetworks,
)

SECOND = 1_000_000_000
FOREVER = 1 << 62
NO_HEALTH = HealthSummary("none", 0)
"""Of a container without a health check."""
_HEALTH = {"starting": " (health: starting)", "healthy": " (healthy)", "unhealthy": " (unhealthy)"}
_REMOVING = "Removal In Progress"


def human_duration(seconds: float) -> tuple[str, float]:
    """Docker's words for a time span, and the seconds at which they change."""
    whole = max(0, int(seconds))
    if seconds < 1:
        return "Less than a second", 1
    if whole == 1:
        return "1 second", 2
    if whole < 60:
        return f"{whole} seconds", whole + 1
    minutes = whole // 60
    if minutes == 1:
        return "About a minute", 120
    if minutes < 60:
        return f"{minutes} minutes", (minutes + 1) * 60
    hours = int(seconds / 3600 + 0.5)
    change = (hours + 0.5) * 3600
    if hours == 1:
        return "About an hour", change
    if hours < 48:
        return f"{hours} hours", change
    if hours < 24 * 7 * 2:
        return f"{hours // 24} days", change
    if hours < 24 * 30 * 2:
        return f"{hours // 24 // 7} weeks", change
    if hours < 24 * 365 * 2:
        return f"{hours // 24 // 30} months", change
    return f"{hours // 24 // 365} years", change


def status_text(status: Status, now: int) -> tuple[str, int]:
    """The list's `Status` at `now`, and the time (ns) until which it stays true."""
    state = status.state
    if state in (State.RUNNING, State.PAUSED):
        words, change = human_duration((now - status.started_at) / SECOND)
        suffix = _HEALTH.get(status.health.status, "") if status.health is not None else ""
        if state == State.PAUSED:
            suffix = " (Paused)"
        return f"Up {words}{suffix}", status.started_at + int(change * SECOND)
    if state == State.CREATED or not status.finished_at:
        return {State.CREATED: "Created", State.REMOVING: _REMOVING}.get(state, "Exited"), FOREVER
    if state == State.REMOVING:
        return _REMOVING, FOREVER
    words, change = human_duration((now - status.finished_at) / SECOND)
    verb = "Restarting" if state == State.RESTARTING else "Exited"
    return f"{verb} ({status.exit_code}) {words} ago", status.finished_at + int(change * SECOND)


def command_line(record: ContainerRecord) -> str:
    """The list's `Command`: path and arguments, quoted as Docker does where they hold blanks."""
    line = " ".join((record.path, *record.args))
    if line.count(" ") == len(record.args):
        return line
    return " ".join(f"'{word}'" if " " in word else word for word in (record.path, *record.args))


def summary(record: ContainerRecord, names: list[str], text: str, image: str = "") -> ContainerSummary:
    """One element of the list, with `text` as its Status text and `image` in place of the
    container's own image name.
    """
    status = record.status
    return ContainerSummary(
        id=record.id,
        names=names,
        image=image or record.config.image,
        image_id=record.image_id,
        command=command_line(record),
        created=record.created // SECOND,
        ports=listed_ports(record),
        labels=record.config.labels,
        state=str(status.state),
        status=text,
        health=HealthSummary(status.health.status, status.health.failing_streak) if status.health else NO_HEALTH,
        host_config=SummaryHostConfig(record.host.network_mode, record.host.annotations or msgspec.UNSET),
        network_settings=SummaryNetworks(record.networks),
        mounts=_mounts(record),
    )


def with_status(encoded: bytes, status: str) -> bytes:
    """An encoded summary with another Status text, whose words change with time alone."""
    # It is the last field: labels, annotations and driver options may have the same key. No string
    # can match it, because quotes in strings are escaped.
    begin = encoded.rindex(_STATUS) + len(_STATUS)
    return b"%b%b%b" % (encoded[:begin], status.encode(), encoded[encoded.index(b'"', begin) :])


def with_sizes(encoded: bytes, own: int, whole: int) -> bytes:
    """An encoded summary with the bytes of its own layer, and of its whole root."""
    # Nothing before the labels has keys of clients, and quotes in strings are escaped.
    at = encoded.index(_LABELS)
    return b'%b"SizeRw":%d,"SizeRootFs":%d,%b' % (encoded[:at], own, whole, encoded[at:])


_STATUS = b'"Status":"'
_LABELS = b'"Labels":'


def listed_ports(record: ContainerRecord) -> list[Port]:
    """The ports of the list: those of a running container."""
    exposed = _exposed(record)
    if not (exposed or record.ports) or record.status.state not in (State.RUNNING, State.PAUSED):
        return []
    return ports.listed(exposed, record.ports)


def _exposed(record: ContainerRecord) -> Collection[str]:
    return record.config.exposed_ports if isinstance(record.config.exposed_ports, dict) else ()


def _apparmor_profile(host: HostConfig) -> str:
    if host.privileged:
        return security.UNCONFINED if apparmor.enabled() else ""
    return security.shown_apparmor_profile(host.security_opt or ())


def inspect(
    record: ContainerRecord,
    directory: Path,
    graph: dict[str, str],
    exec_ids: list[str] | None = None,
    links: list[str] | None = None,
    *,
    mac: bool = False,
) -> ContainerInspect:
    """The inspect reply.

    `directory` holds its files, `graph` are the paths of its overlay, `links` its links as shown.
    `mac`: Config has the MAC address that was requested for the main network.
    """
    status = record.status
    running = status.state in (State.RUNNING, State.PAUSED, State.RESTARTING)
    log = record.host.log_config.type == "json-file"
    return ContainerInspect(
        id=record.id,
        created=rfc3339(record.created),
        path=record.path,
        args=list(record.args),
        state=ContainerState(
            status=str(status.state),
            running=running,
            paused=status.state == State.PAUSED,
            restarting=status.state == State.RESTARTING,
            oom_killed=status.oom_killed,
            dead=status.state == State.REMOVING,
            pid=status.pid,
            exit_code=status.exit_code,
            error=status.error,
            started_at=rfc3339(status.started_at),
            finished_at=rfc3339(status.finished_at),
            health=_health(status.health) if status.health is not None else msgspec.UNSET,
        ),
        image=record.image_id,
        resolv_conf_path=str(directory / "resolv.conf"),
        hostname_path=str(directory / "hostname"),
        hosts_path=str(directory / "hosts"),
        log_path=str(directory / f"{record.id}-json.log") if log else "",
        name="/" + record.name,
        restart_count=record.restart_count,
        app_armor_profile=_apparmor_profile(record.host),
        driver=DRIVER_NAME,
        exec_ids=exec_ids or None,
        host_config=msgspec.structs.replace(record.host, links=links) if record.host.links else record.host,
        graph_driver=GraphDriver(DRIVER_NAME, graph),
        mounts=_mounts(record),
        config=msgspec.structs.replace(
            record.config,
            cmd=strings(record.config.cmd),
            mac_address=(_requested_mac(record) if mac else "") or msgspec.UNSET,
        ),
        network_settings=_network_settings(record),
    )


def _mounts(record: ContainerRecord) -> list[MountPoint]:
    """Volumes, binds and images, and the tmpfs of HostConfig.Mounts; those of HostConfig.Tmpfs are
    not shown, as in Docker.
    """
    shown = [
        each if each.type else msgspec.structs.replace(each, type="volume" if isinstance(each.name, str) else "bind")
        for each in record.mounts
    ]
    shown += [
        MountPoint(type="image", name=mount.name, source=mount.image_id, destination=mount.destination, rw=False)
        for mount in record.image_mounts
    ]
    shown += [
        MountPoint(type="tmpfs", destination=mount.target, rw=not mount.read_only)
        for mount in record.host.mounts or ()
        if mount.type == "tmpfs"
    ]
    return shown


def _health(health: Health) -> HealthState:
    return HealthState(
        status=health.status,
        failing_streak=health.failing_streak,
        log=[
            HealthLogEntry(
                start=rfc3339(each.start), end=rfc3339(each.end), exit_code=each.exit_code, output=each.output
            )
            for each in health.log
        ],
    )


def _network_settings(record: ContainerRecord) -> NetworkSettings:
    status = record.status
    return NetworkSettings(
        sandbox_id=record.id if status.pid else "",
        sandbox_key=f"/proc/{status.pid}/ns/net" if status.pid else "",
        ports=ports.bound(_exposed(record), record.ports) if status.pid else {},
        networks=record.networks,
    )


def _requested_mac(record: ContainerRecord) -> str:
    main = BRIDGE if record.host.network_mode in DEFAULT_MODES else record.host.network_mode
    return record.requested_macs(main).get(main, "")

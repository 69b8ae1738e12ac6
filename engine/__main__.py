"""The program `engined`: arguments and a TOML file become a Config, and the Config a running daemon (design §8)."""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import select
import signal
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine import __version__
from engine.config import (
    DEFAULT_BRIDGE,
    DEFAULT_CERTIFICATES,
    DEFAULT_ROOT,
    DEFAULT_RUN,
    DEFAULT_SOCKET,
    MAX_RUN_PATH,
    Config,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit status of the program."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "check":
        from engine import check

        return check.main(arguments.containers)
    if arguments.command == "stop":
        return _stop(Path(arguments.run), arguments.time)
    try:
        config = _config(arguments)
    except (OSError, ValueError) as error:
        print(f"engined: {error}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("engined: it mounts, makes namespaces and cgroups: run it as root", file=sys.stderr)
        return 1
    from engine.daemon import run  # uvloop and the engine's parts: --version, stop and check need none of them

    return run(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engined", description="A container engine that speaks the Docker Engine API."
    )
    parser.add_argument("--version", action="version", version=f"engined {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve | stop | check")
    serve = commands.add_parser("serve", help="run the engine in the foreground")
    serve.add_argument("--config", metavar="FILE", help="TOML file with the same names (dashes as underscores)")
    serve.add_argument(
        "--socket", action="append", metavar="PATH", dest="sockets", help=f"Unix socket, repeatable [{DEFAULT_SOCKET}]"
    )
    serve.add_argument("--group", metavar="NAME", help="group that may use the sockets [docker]")
    serve.add_argument(
        "--tcp", action="append", metavar="HOST:PORT", help="TCP listener, repeatable; needs the --tls files"
    )
    serve.add_argument("--tls-ca", metavar="FILE", help="CA that signs the clients' certificates")
    serve.add_argument("--tls-cert", metavar="FILE", help="the server's certificate chain")
    serve.add_argument("--tls-key", metavar="FILE", help="the server's key")
    serve.add_argument("--insecure", action="store_true", default=None, help="plain TCP, on loopback addresses alone")
    serve.add_argument("--root", metavar="DIR", help=f"images and containers [{DEFAULT_ROOT}]")
    serve.add_argument("--run", metavar="DIR", help=f"what a reboot may take: sockets, journal [{DEFAULT_RUN}]")
    serve.add_argument("--runtime", metavar="crun|runc|PATH", help="the OCI runtime [crun where it works, else runc]")
    serve.add_argument("--bridge", metavar="NAME", help=f"bridge of the default network [{DEFAULT_BRIDGE}]")
    serve.add_argument("--bridge-subnet", metavar="CIDR", help="its subnet [the first free default pool]")
    serve.add_argument(
        "--attach-stall", type=int, metavar="SECONDS", help="disconnect a client that takes nothing [300]"
    )
    serve.add_argument(
        "--insecure-registry",
        action="append",
        metavar="HOST[:PORT]|CIDR",
        dest="insecure_registries",
        help="may be spoken to without TLS, repeatable [loopback]",
    )
    serve.add_argument(
        "--registry-mirror",
        action="append",
        metavar="URL",
        dest="registry_mirrors",
        help="asked before Docker Hub, repeatable",
    )
    serve.add_argument(
        "--registry-certificates", metavar="DIR", help=f"HOST:PORT/*.crt, *.cert, *.key [{DEFAULT_CERTIFICATES}]"
    )
    serve.add_argument(
        "--registry-timeout", type=int, metavar="SECONDS", help="give up a registry that sends nothing [30]"
    )
    serve.add_argument(
        "--plugin-socket-directory",
        action="append",
        metavar="DIR",
        dest="plugin_sockets",
        help="sockets of volume plugins, repeatable [/run/docker/plugins]",
    )
    serve.add_argument(
        "--plugin-spec-directory",
        action="append",
        metavar="DIR",
        dest="plugin_specs",
        help="their .spec and .json files, repeatable [/etc/docker/plugins, /usr/lib/docker/plugins]",
    )
    serve.add_argument(
        "--plugin-timeout", type=int, metavar="SECONDS", help="give up a plugin that does not answer [60]"
    )
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="[info]")
    stop = commands.add_parser("stop", help="stop containers, monitor and daemon, and leave nothing behind")
    stop.add_argument("--run", default=DEFAULT_RUN, metavar="DIR", help=f"the engine's run directory [{DEFAULT_RUN}]")
    stop.add_argument(
        "--time", type=int, default=10, metavar="S", help="seconds that containers get before SIGKILL [10]"
    )
    check = commands.add_parser("check", help="tell what of the host is missing or too small")
    check.add_argument("--containers", type=int, default=1000, metavar="N", help="how many are planned [1000]")
    return parser


_SINGULAR = {
    "socket": "sockets",
    "insecure_registry": "insecure_registries",
    "registry_mirror": "registry_mirrors",
    "plugin_socket_directory": "plugin_sockets",
    "plugin_spec_directory": "plugin_specs",
}
"""Options that may be given again, and the field that collects them; a file may use either name."""


def _config(arguments: argparse.Namespace) -> Config:
    """Arguments over the file over the defaults. Raises ValueError naming the option (and the file) that breaks a rule."""
    values: dict[str, Any] = {}
    if arguments.config:
        with open(arguments.config, "rb") as file:
            try:
                values = {_SINGULAR.get(name, name): value for name, value in tomllib.load(file).items()}
                _converted(values)
            except ValueError as error:
                raise ValueError(f"--config {arguments.config}: {error}") from error
    for field in Config.__struct_fields__:
        chosen = getattr(arguments, field, None)
        if chosen is not None:
            values[field] = chosen
    return _converted(values)


def _converted(values: dict[str, Any]) -> Config:
    config = msgspec.convert(values, Config, dec_hook=_from_text)
    config = msgspec.structs.replace(config, root=config.root.resolve(), run=config.run.resolve())
    if len(os.fsencode(config.run)) > MAX_RUN_PATH:
        raise ValueError(
            f"--run {config.run}: longer than {MAX_RUN_PATH} bytes, the sockets below it would not fit unix(7)"
        )
    if not 0 < len(config.bridge.encode()) <= 15:
        raise ValueError(f"--bridge {config.bridge!r}: an interface name has 1 to 15 bytes")
    if config.attach_stall < 1:
        raise ValueError(f"--attach-stall {config.attach_stall}: at least 1 second")
    for address in config.tcp:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"--tcp {address}: HOST:PORT is expected, with a port of 0 to 65535")
    files = {"--tls-ca": config.tls_ca, "--tls-cert": config.tls_cert, "--tls-key": config.tls_key}
    if config.tcp and not (config.insecure and not any(files.values())):
        for option, path in files.items():
            if not path:
                raise ValueError(f"--tcp needs {option} (or --insecure, on loopback)")
            if not os.access(path, os.R_OK):
                raise ValueError(f"{option} {path}: it cannot be read")
    for mirror in config.registry_mirrors:
        if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", mirror):
            raise ValueError(f"--registry-mirror {mirror!r}: an http or https URL is expected")
    for option, seconds in (
        ("--registry-timeout", config.registry_timeout),
        ("--plugin-timeout", config.plugin_timeout),
    ):
        if seconds < 1:
            raise ValueError(f"{option} {seconds}: at least 1 second")
    return config


def _stop(run: Path, seconds: int) -> int:
    """Stop everything of the engine on `run`: by asking its daemon, or in its place when only what it left is there."""
    if not (run / "engined.pid").exists():
        print(f"engined: no engine runs on {run}", file=sys.stderr)
        return 1
    with open(run / "engined.pid", encoding="ascii") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _ask_to_stop(int(claim.read()), run, seconds)
    try:
        config = msgspec.json.decode((run / "config.json").read_bytes(), type=Config, dec_hook=_from_text)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"engined: the daemon of {run} is dead and its configuration cannot be read: {error}", file=sys.stderr)
        return 1
    from engine.daemon import run as run_daemon

    return run_daemon(msgspec.structs.replace(config, sockets=(), tcp=()), stop_after=seconds)


def _ask_to_stop(pid: int, run: Path, seconds: int) -> int:
    """SIGUSR1 to the daemon that holds the claim, and wait for its end."""
    descriptor = os.pidfd_open(pid)
    try:
        (run / "stop-timeout").write_text(str(seconds))
        signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll((seconds + 60) * 1000):
            print(f"engined: process {pid} is still there after {seconds + 60} s", file=sys.stderr)
            return 1
    except ProcessLookupError:
        return 0
    finally:
        os.close(descriptor)
    return 0


def _from_text(kind: type[Any], value: object) -> object:
    return kind(value)


if __name__ == "__main__":
    sys.exit(main())

"""The program `engined`: serve, stop, check and others. See engined(1) in docs/."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from engine import __version__, config
from engine.config import DEFAULT_ROOT, DEFAULT_RUN
from engine.errors import InvalidParameter, ServerError, words

RELOAD_SECONDS = 60
"""Longest time that `engined reload` waits for the daemon."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run it. Returns the exit status of the program."""
    _open_standard()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command in ("install-service", "uninstall"):
        from engine.commands import service

        return service.main(arguments, parser)
    if arguments.command == "check":
        from engine.commands import check

        return check.configuration(arguments.config) if arguments.config else check.main(arguments.containers)
    if arguments.command in ("reload", "stop"):
        try:
            run_directory = _run(arguments.run)
        except ServerError as error:
            print(f"engined: {error.message}", file=sys.stderr)
            return 1
        return _reload(run_directory) if arguments.command == "reload" else _stop(run_directory, arguments.time)
    if arguments.command == "swarm":
        # The manager's packages, which only hosts of managers have.
        from engine.commands import recovery

        return recovery.main(arguments)
    try:
        source = _source(arguments)
        loaded = source.load()
        # Loads the log drivers, which --version, stop and check do not need.
        from engine.logs import drivers

        drivers.check_daemon(loaded.config)
    except ValueError as error:
        print(f"engined: {error}", file=sys.stderr)
        return 1 if isinstance(error, config.FileError) else 2
    except InvalidParameter as error:
        print(f"engined: {error}", file=sys.stderr)
        return 2 if {"log_driver", "log_opts"} & source.chosen.keys() else 1
    if os.geteuid() != 0:
        print("engined: must run as root: it makes mounts, namespaces and cgroups", file=sys.stderr)
        return 1
    # Nearly all objects made at start live as long as the daemon, which enables this again.
    gc.disable()
    # Loads uvloop and the engine's parts, which --version, stop and check do not need.
    from engine.daemon import run

    try:
        return run(loaded.config, source, loaded.meaningless)
    except KeyboardInterrupt:  # before the daemon handles the signal
        return 130


def _open_standard() -> None:
    """Open /dev/null for each of the standard streams that is closed. Another file would get its
    number otherwise, what is printed would go there, and libuv aborts when it closes it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of `serve` would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="engined", description="A container engine that serves the Docker Engine API.")
    parser.add_argument("--version", action="version", version=f"engined {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="serve | reload | stop | check | swarm | install-service | uninstall"
    )
    serve = commands.add_parser("serve", help="run the engine in the foreground")
    serve.add_argument(
        *("--config", "--config-file"),
        metavar="FILE",
        help="TOML file with the same options (underscores for dashes), or dockerd's daemon.json "
        f"[default: {config.DEFAULT_FILE}, if it exists]",
    )
    for option in config.options():
        text, default = option.text.replace("%", "%%"), option.shown_default.replace("%", "%%")
        flags = (option.flag, option.alias) if option.alias else (option.flag,)
        if not option.value:
            _add_switch(serve, flags, option.field, f"{text} [default: {str(option.default).lower()}]")
            continue
        notes = ["repeatable"] if option.repeatable else []
        if default:
            notes.append(f"default: {default}")
        serve.add_argument(
            *flags,
            dest=option.field,
            metavar=option.value,
            action="append" if option.repeatable else "store",
            type=_number if isinstance(option.default, int) else str,
            help=f"{text} [{'; '.join(notes)}]",
        )
    for flag in config.FLAGS:
        text = f"as dockerd's configuration key {flag.key}"
        if flag.value:
            action = "append" if flag.key in config.docker.LISTS else "store"
            kind = _number if flag.value == "NUMBER" else str
            serve.add_argument(
                *flag.names, dest=_DOCKER + flag.key, metavar=flag.value, action=action, type=kind, help=text
            )
        else:
            _add_switch(serve, flag.names, _DOCKER + flag.key, text)
    reload = commands.add_parser("reload", help="have the daemon read its configuration file again")
    _add_run(reload)
    stop = commands.add_parser(
        "stop", help="stop containers, monitor and daemon; leave no mount, link, cgroup or process"
    )
    _add_run(stop)
    stop.add_argument(
        "--time",
        type=int,
        metavar="SECONDS",
        help="time for containers to exit before SIGKILL [default: that of --shutdown-timeout]",
    )
    check = commands.add_parser("check", help="report what the host lacks for N containers")
    check.add_argument(
        "--containers", type=_count, default=1000, metavar="N", help="planned number of containers [default: 1000]"
    )
    check.add_argument(
        "--config", metavar="FILE", help="instead, say what becomes of each key of this configuration file"
    )
    _add_swarm(commands)
    _add_service(commands)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", metavar="DIR", help=f"the engine's run directory [default: {DEFAULT_RUN}, or that of the only engine]"
    )


def _run(given: str | None) -> Path:
    """The run directory that is meant. Another one than the default is found by the command lines
    of monitors of this installation: the daemon may have died. Raises ServerError if there are
    several.
    """
    if given is not None or (Path(DEFAULT_RUN) / "engined.pid").exists():
        return Path(given or DEFAULT_RUN)
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words_of_it = place.read_bytes().split(b"\0")
            ours = words_of_it[0] == os.fsencode(sys.executable) and b"engine.monitor" in words_of_it
            if ours and b"--run" in words_of_it[:-1]:
                found.add(os.fsdecode(words_of_it[words_of_it.index(b"--run") + 1]))
    if len(found) > 1:
        raise ServerError(f"several engines run: name one with --run: {', '.join(sorted(found))}")
    if found:
        print(f"engined: the engine of {(only := found.pop())}", file=sys.stderr)
        return Path(only)
    return Path(DEFAULT_RUN)


_DOCKER = "docker "
"""Begins the names of arguments that are keys of dockerd's file."""


def _add_switch(parser: argparse.ArgumentParser, flags: Sequence[str], field: str, text: str) -> None:
    """`--flag`, and as dockerd takes it, `--flag=false`."""
    parser.add_argument(*flags, dest=field, nargs="?", const=True, type=_boolean, metavar="true|false", help=text)


def _source(arguments: argparse.Namespace) -> config.Source:
    """Raises ValueError for a flag of dockerd with an invalid value."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    file = arguments.config or config.default_file()
    keys = {name.removeprefix(_DOCKER): value for name, value in given.items() if name.startswith(_DOCKER)}
    fields = {option.field: given[option.field] for option in config.options() if option.field in given}
    return config.Source(config.from_keys(keys) | fields, file)


def _add_swarm(commands: argparse._SubParsersAction[Any]) -> None:
    swarm = commands.add_parser("swarm", help="back up the swarm's state, or make a swarm of a backup")
    verbs = swarm.add_subparsers(dest="verb", required=True, metavar="backup | restore")
    backup = verbs.add_parser("backup", help="write the state of the swarm that this host manages to a file")
    restore = verbs.add_parser(
        "restore", help="make this host, whose engine is stopped, the only manager of the swarm in a backup"
    )
    for verb in (backup, restore):
        verb.add_argument("file", metavar="FILE")
        verb.add_argument(
            "--run", default=DEFAULT_RUN, metavar="DIR", help=f"the engine's run directory [default: {DEFAULT_RUN}]"
        )
    restore.add_argument(
        "--root", default=DEFAULT_ROOT, metavar="DIR", help=f"the engine's root directory [default: {DEFAULT_ROOT}]"
    )
    restore.add_argument(
        "--advertise-addr", metavar="IP[:PORT]", help="address for the other nodes [default: the one it had]"
    )
    restore.add_argument(
        "--listen-addr", metavar="IP[:PORT]", help="address to listen on [default: the one it had, or 0.0.0.0:2377]"
    )


def _boolean(text: str) -> bool:
    """As dockerd's flags take it."""
    if text.lower() not in ("true", "false", "1", "0", "t", "f"):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is neither true nor false")
    return text.lower() in ("true", "1", "t")


def _add_service(commands: argparse._SubParsersAction[Any]) -> None:
    install = commands.add_parser(
        "install-service", help="write systemd units, manual page, completions and a sample configuration"
    )
    uninstall = commands.add_parser("uninstall", help="remove what install-service has written")
    for verb in (install, uninstall):
        verb.add_argument(
            "--prefix", default="/usr/local", metavar="DIR", help="directory to install below [default: /usr/local]"
        )
    uninstall.add_argument(
        "--state",
        action="store_true",
        help="also remove the engine's root directory and an edited configuration; refused while the engine runs",
    )
    uninstall.add_argument(
        "--root", default=DEFAULT_ROOT, metavar="DIR", help=f"the engine's root directory [default: {DEFAULT_ROOT}]"
    )
    uninstall.add_argument(
        "--run", default=DEFAULT_RUN, metavar="DIR", help=f"the engine's run directory [default: {DEFAULT_RUN}]"
    )


def _number(text: str) -> int:
    """Decimal, or as 0x10."""
    try:
        return int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a number") from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _reload(run: Path) -> int:
    """Send SIGHUP to the daemon, and wait until it has taken over its configuration, or not."""
    answer = run / config.reloads.OUTCOME
    before = _identity(answer)
    try:
        descriptor = os.pidfd_open(_daemon(run))
    except (OSError, ValueError):
        print(f"engined: no engine is running in {run}", file=sys.stderr)
        return 1
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGHUP)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        for _ in range(RELOAD_SECONDS * 20):
            if _identity(answer) != before:
                text = answer.read_text()
                print(text, end="", file=sys.stderr)
                return int(text.startswith(f"engined: {config.reloads.FAILED}"))
            if ended.poll(50):
                print("engined: the daemon has ended", file=sys.stderr)
                return 1
    finally:
        os.close(descriptor)
    print(f"engined: the daemon has not answered for {RELOAD_SECONDS} s", file=sys.stderr)
    return 1


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _daemon(run: Path) -> int:
    """The process that holds the lock of RUN. Raises OSError, or ValueError if there is none."""
    with open(run / "engined.pid", encoding="ascii") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(claim.read())
    raise ValueError("no daemon holds the lock")


def _stop(run: Path, seconds: int | None) -> int:
    """Stop the engine of `run`: ask its daemon, or clean up in its place if the daemon has died.
    `seconds`: None for those of its configuration.
    """
    if not (run / "engined.pid").exists():
        print(f"engined: no engine is running in {run}", file=sys.stderr)
        return 1
    if seconds is None:
        seconds = _shutdown_timeout(run)
    with open(run / "engined.pid", encoding="ascii") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            status = _ask_to_stop(int(claim.read()), run, seconds)
            # The file is still there if the daemon could not clean up (`_end_whatever_hangs`).
            if status or not (run / "engined.pid").exists():
                return status
    try:
        left = config.decode((run / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        print(
            f"engined: the daemon of {run} has died, and its configuration cannot be read: {words(error)}",
            file=sys.stderr,
        )
        return 1
    from engine.daemon import run as run_daemon
    from engine.http.server import remove_stale

    # It serves nothing, so there is nothing to authorize.
    left_over = msgspec.structs.replace(left, sockets=(), tcp=(), authorization_plugins=())
    status = run_daemon(left_over, stop_after=seconds)
    for path in left.sockets:
        if path.startswith(config.INHERITED):
            continue
        with contextlib.suppress(ServerError):  # another engine listens there now
            remove_stale(path)
    return status


def _shutdown_timeout(run: Path) -> int:
    try:
        return config.decode((run / "config.json").read_bytes()).shutdown_timeout
    except (OSError, msgspec.MsgspecError):
        return config.Config().shutdown_timeout


def _ask_to_stop(pid: int, run: Path, seconds: int) -> int:
    """Send SIGUSR1 to the daemon that holds the lock, and wait until it has exited."""
    descriptor = os.pidfd_open(pid)
    try:
        (run / "stop-timeout").write_text(str(seconds))
        signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll((seconds + 60) * 1000):
            print(f"engined: the daemon (process {pid}) is still running after {seconds + 60} s", file=sys.stderr)
            return 1
    except ProcessLookupError:
        return 0
    finally:
        os.close(descriptor)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The program `engined`: serve, stop and check. See engined(1) in docs/."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine import __version__, config
from engine.config import DEFAULT_ROOT, DEFAULT_RUN
from engine.errors import InvalidParameter, ServerError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run it. Returns the exit status of the program."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "check":
        from engine import check

        return check.main(arguments.containers)
    if arguments.command == "stop":
        return _stop(Path(arguments.run), arguments.time)
    if arguments.command == "swarm":
        # The manager's packages, which only hosts of managers have.
        from engine import recovery

        return recovery.main(arguments)
    try:
        chosen = config.parse(
            {option.field: getattr(arguments, option.field) for option in config.options()}, arguments.config
        )
        # Loads the log drivers, which --version, stop and check do not need.
        from engine.logs import drivers

        drivers.check_daemon(chosen)
    except (ValueError, InvalidParameter) as error:
        print(f"engined: {error}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("engined: must run as root: it makes mounts, namespaces and cgroups", file=sys.stderr)
        return 1
    # Loads uvloop and the engine's parts, which --version, stop and check do not need.
    from engine.daemon import run

    return run(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engined", description="A container engine that serves the Docker Engine API."
    )
    parser.add_argument("--version", action="version", version=f"engined {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve | stop | check | swarm")
    serve = commands.add_parser("serve", help="run the engine in the foreground")
    serve.add_argument("--config", metavar="FILE", help="TOML file with the same options (underscores for dashes)")
    for option in config.options():
        text = option.text.replace("%", "%%")
        if not option.value:
            serve.add_argument(option.flag, dest=option.field, action="store_true", default=None, help=text)
            continue
        notes = ["repeatable"] if option.repeatable else []
        if option.shown_default:
            notes.append(f"default: {option.shown_default}")
        serve.add_argument(
            option.flag,
            dest=option.field,
            metavar=option.value,
            action="append" if option.repeatable else "store",
            type=int if isinstance(option.default, int) else str,
            help=f"{text} [{'; '.join(notes)}]",
        )
    stop = commands.add_parser(
        "stop", help="stop containers, monitor and daemon; leave no mount, link, cgroup or process"
    )
    stop.add_argument(
        "--run", default=DEFAULT_RUN, metavar="DIR", help=f"the engine's run directory [default: {DEFAULT_RUN}]"
    )
    stop.add_argument(
        "--time",
        type=int,
        default=10,
        metavar="SECONDS",
        help="time for containers to exit before SIGKILL [default: 10]",
    )
    check = commands.add_parser("check", help="report what the host lacks for N containers")
    check.add_argument(
        "--containers", type=_count, default=1000, metavar="N", help="planned number of containers [default: 1000]"
    )
    _add_swarm(commands)
    return parser


def _add_swarm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _stop(run: Path, seconds: int) -> int:
    """Stop the engine of `run`: ask its daemon, or clean up in its place if the daemon has died."""
    if not (run / "engined.pid").exists():
        print(f"engined: no engine is running in {run}", file=sys.stderr)
        return 1
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
        print(f"engined: the daemon of {run} has died, and its configuration cannot be read: {error}", file=sys.stderr)
        return 1
    from engine.daemon import run as run_daemon
    from engine.http.server import remove_stale

    # It serves nothing, so there is nothing to authorize.
    left_over = msgspec.structs.replace(left, sockets=(), tcp=(), authorization_plugins=())
    status = run_daemon(left_over, stop_after=seconds)
    for path in left.sockets:
        with contextlib.suppress(ServerError):  # another engine listens there now
            remove_stale(path)
    return status


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

"""`engined install-service` and `engined uninstall`: the files that make the program a service of
the host, and their removal.

They are systemd units, the manual page, completions of shells, a sample configuration, and a link
to the program, all below one prefix. A list of them with their digests is kept there, so that
`uninstall` removes the files of any earlier version. `install-service` overwrites no configuration
that was edited. Nothing is started or stopped here.

`.ci/deb.py` takes `unit`, `shared` and `completions`, so that package and prefix have the same
files.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import shtab

from engine.config import DEFAULT_FILE
from engine.errors import ServerError, WrongState, reason_with_file, words
from engine.system.files import remove_tree, write_atomically
from engine.system.mounts import mounts

LIST = "share/engined/installed.json"
"""Below the prefix: the `Installed` of the last `install`, as JSON."""

UNITS = ("engined.service", "engined.socket")
ENABLED = Path("/etc/systemd/system")

COMPLETIONS = {
    "bash": "share/bash-completion/completions/engined",
    "zsh": "share/zsh/site-functions/_engined",
    "fish": "share/fish/vendor_completions.d/engined.fish",
}
"""Shell -> the file below the prefix in which it looks for them."""

_EXAMPLE = "/opt/engined/bin/engined"
"""The program in docs/engined.service."""


def main(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run one of the two commands. Returns the exit status."""
    prefix = Path(arguments.prefix).absolute()
    try:
        if arguments.command == "install-service":
            for line in install(prefix, program(), parser):
                print(line)
        else:
            for line in uninstall(prefix, Path(arguments.root) if arguments.state else None, Path(arguments.run)):
                print(line)
    except ServerError as error:
        print(f"engined: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"engined: {reason_with_file(error)}", file=sys.stderr)
        return 1
    return 0


def program() -> Path:
    """The command `engined` of this installation."""
    started = Path(sys.argv[0]).absolute()
    return started if started.name == "engined" else Path(sys.executable).parent / "engined"


def shared(name: str) -> str:
    """A file that a wheel carries in engine/share, and a clone in docs/."""
    here = Path(__file__).resolve().parents[1]
    for path in (here / "share" / name, here.parent / "docs" / name):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise ServerError(f"{name} is missing from this installation of engined")


def unit(name: str, path_of_program: Path | str, configuration: Path | str) -> str:
    """A systemd unit, for the program and the configuration file at these paths."""
    text = shared(name).replace(DEFAULT_FILE, str(configuration))
    if str(configuration) != DEFAULT_FILE:
        text = text.replace(f"{_EXAMPLE} serve", f"{_EXAMPLE} serve --config {configuration}")
    return text.replace(_EXAMPLE, str(path_of_program))


def completions(parser: argparse.ArgumentParser) -> dict[str, str]:
    """By shell: the script that completes commands, options and paths."""
    parser = copy.deepcopy(parser)
    for action in _actions(parser):
        name = str(action.metavar)
        if name in ("FILE", "PATH"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif name == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", name):
            action.choices = name.split("|")
    return {shell: shtab.complete(parser, shell) for shell in COMPLETIONS}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def configuration(prefix: Path) -> Path:
    """The configuration file of an installation below `prefix`."""
    directory = Path("/etc") if prefix in (Path("/usr"), Path("/usr/local")) else prefix / "etc"
    return directory / "engined" / "engined.toml"


class Installed(msgspec.Struct):
    """What is installed below a prefix."""

    files: dict[str, str] = {}
    """Path -> its SHA-256, or what a link points to."""
    directories: list[str] = []
    """Those that were made, outermost first."""

    def write(self, path: Path, text: str) -> None:
        self.make_parents(path)
        write_atomically(path, text.encode())
        self.files[str(path)] = _digest(text.encode())

    def link(self, path: Path, target: Path) -> None:
        self.make_parents(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        self.files[str(path)] = f"-> {target}"

    def make_parents(self, path: Path) -> None:
        self.directories += [str(parent) for parent in reversed(path.parents) if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)

    def is_unchanged(self, path: Path) -> bool:
        """True if the file or link is as it was installed."""
        content = self.files.get(str(path))
        if path.is_symlink():
            return content == f"-> {path.readlink()}"
        return path.is_file() and content == _digest(path.read_bytes())


def install(prefix: Path, path_of_program: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Write the files. Yields a line for each."""
    before = _installed(prefix)
    after = Installed(directories=before.directories)
    settings = configuration(prefix)
    contents = {
        **{prefix / "lib/systemd/system" / name: unit(name, path_of_program, settings) for name in UNITS},
        prefix / "share/man/man1/engined.1": shared("engined.1"),
        **{prefix / COMPLETIONS[shell]: script for shell, script in completions(parser).items()},
    }
    for path, text in contents.items():
        after.write(path, text)
        yield str(path)
    link = prefix / "bin" / "engined"
    if link != path_of_program and (before.is_unchanged(link) or not os.path.lexists(link)):
        after.link(link, path_of_program)
        yield f"{link} -> {path_of_program}"
    if before.is_unchanged(settings) or not os.path.lexists(settings):
        after.write(settings, shared("engined.toml"))
        yield str(settings)
    else:
        if str(settings) in before.files:
            after.files[str(settings)] = before.files[str(settings)]
        yield f"{settings}: kept as it is"
    for name in before.files.keys() - after.files.keys():
        if before.is_unchanged(Path(name)):
            Path(name).unlink()
            yield f"{name}: removed, because this version has no such file"
    after.make_parents(prefix / LIST)
    write_atomically(prefix / LIST, msgspec.json.format(msgspec.json.encode(after)) + b"\n")
    yield "To start the engine now and at every boot: systemctl daemon-reload && systemctl enable --now engined"


def uninstall(prefix: Path, root: Path | None, run: Path) -> Iterator[str]:
    """Remove what `install` has written. With `root` also remove the engine's state there, and a
    configuration that was edited. Yields a line for each. Raises WrongState, before anything is
    removed, if the state is in use.
    """
    installed = _installed(prefix)
    if not installed.files and root is None:
        raise WrongState(f"nothing is installed below {prefix}: there is no {prefix / LIST}")
    if root is not None:
        _check_unused(root, run)
    for enabled in sorted(ENABLED.glob("*.wants/engined.*")):
        if enabled.is_symlink() and str(enabled.readlink()) in installed.files:
            enabled.unlink()
            yield f"{enabled}: removed"
    for path in map(Path, installed.files):
        if installed.is_unchanged(path) or (root is not None and os.path.lexists(path)):
            path.unlink()
            yield f"{path}: removed"
        elif os.path.lexists(path):
            yield f"{path}: kept, because it was edited"
    (prefix / LIST).unlink(missing_ok=True)
    for directory in reversed(installed.directories):
        with contextlib.suppress(OSError):  # not empty, or not there
            Path(directory).rmdir()
    if root is not None and root.exists():
        remove_tree(root)
        yield f"{root}: removed"


def _check_unused(root: Path, run: Path) -> None:
    """Raise WrongState unless `root` is an engine's directory, and no engine uses it."""
    if (run / "engined.pid").exists():
        raise WrongState(f"the engine of {run} runs, or has left containers: stop it first (engined stop --run {run})")
    if not root.exists():
        return
    if any(root.iterdir()) and not (root / "state.db").exists():
        raise WrongState(f"{root} has no state.db: it is not the directory of an engine")
    if mounted := mounts(root):
        raise WrongState(f"{mounted[0].target} is a mount: stop the engine that uses {root}")
    for process in _processes_with_files_below(root):
        raise WrongState(f"process {process} has files of {root} open: stop the engine that uses it")


def _processes_with_files_below(root: Path) -> Iterator[int]:
    below = os.path.realpath(root) + "/"
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(entry).startswith(below) for entry in os.scandir(descriptors)):
                yield int(descriptors.parent.name)
        except OSError:  # it has ended
            continue


def _installed(prefix: Path) -> Installed:
    try:
        return msgspec.json.decode((prefix / LIST).read_bytes(), type=Installed)
    except FileNotFoundError:
        return Installed()
    except msgspec.MsgspecError as error:
        raise ServerError(f"{prefix / LIST} cannot be read: {words(error)}") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

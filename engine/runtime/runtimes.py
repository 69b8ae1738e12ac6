"""The OCI runtimes of this engine by name: the one that was chosen at its start, those that the
operator has configured, and the other one of crun and runc if it is installed.

A container keeps the name of its runtime, also if the engine's choice changes later, because one
runtime does not read the state of another.

Not here: how one works and is tested (`oci.py`). Raises InvalidParameter for an unknown name.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import InvalidParameter
from engine.runtime.oci import CANDIDATES, SEARCH, Runtime, words_of_version

_log = logging.getLogger(__name__)

_DOCKERS_DEFAULT = ("", "runc", "io.containerd.runc.v2")
"""Names that mean the default runtime, unless a runtime is installed under that name."""


class Runtimes:
    """The runtimes by name. Nothing changes after the start."""

    def __init__(self, default: Runtime, others: Mapping[str, Runtime] | None = None) -> None:
        self.default = default
        self._by_name = {**(others or {}), default.name: default}

    @classmethod
    def find(cls, choice: str, configured: Sequence[str], run: Path) -> Runtimes:
        """Test the default runtime, and look for the others. Blocks on processes.

        `choice`: as for `Runtime.probe`, or one of the names of `configured`, whose entries are
        NAME=PATH. Raises ServerError if no default runtime works.
        """
        paths = dict(entry.split("=", 1) for entry in configured)
        default = Runtime.probe(paths.get(choice, choice), run)
        if choice in paths:
            default = msgspec.structs.replace(default, name=choice)
        others: dict[str, Runtime] = {}
        for name in CANDIDATES:
            path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SEARCH}")
            if path is not None and path != default.path:
                others[name] = _untested(name, path, name, "", default.root)
        for name, path in paths.items():
            family, version = words_of_version(path)
            if not os.access(path, os.X_OK):
                _log.warning("runtime %s: %s is not executable", name, path)
            others[name] = _untested(name, path, family, version, default.root)
        return cls(default, others)

    def paths(self) -> dict[str, str]:
        """Paths by name, sorted."""
        return {name: self._by_name[name].path for name in sorted(self._by_name)}

    def checked(self, name: str) -> str:
        """The name that a container keeps. Raises InvalidParameter for an unknown one."""
        if not name:
            return self.default.name
        if name not in self._by_name and name not in _DOCKERS_DEFAULT:
            raise InvalidParameter(f"Unknown runtime specified {name}: unknown or invalid runtime name: {name}")
        return name

    def check_configured(self, name: object) -> None:
        """Before a start. Raises InvalidParameter if the operator has removed the container's
        runtime from the configuration. One that the engine chose itself may be missing now.
        """
        if isinstance(name, str) and name not in CANDIDATES:
            self.checked(name)

    def of(self, name: object) -> Runtime:
        """The runtime of a container that has kept this name; the default one for a name that is no
        longer configured, and for records of earlier versions of this engine.
        """
        return self._by_name.get(name, self.default) if isinstance(name, str) else self.default


def _untested(name: str, path: str, family: str, version: str, root: str) -> Runtime:
    return Runtime(name=name, path=path, version=version, family=family, reason="configured", root=root)

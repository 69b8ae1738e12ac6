"""The dependencies between packages, checked in the sources: which package may import which, and
which attributes a handler may not use.

docs/ARCHITECTURE.md describes these rules. A new dependency is a decision: change the table here
and the rules there, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted(path for path in (ROOT / "engine").rglob("*.py") if "__pycache__" not in path.parts)
CYTHON = sorted((ROOT / "engine" / "_fast").glob("*.p[yx][xd]")) + sorted((ROOT / "engine" / "_fast").glob("*.pxd"))

SHARED = {
    "booleans",
    "wire",
    "errors",
    "events",
    "config",
    "facts",
    "labels",
    "names",
    "network_rules",
    "patterns",
    "pruning",
    "templates",
    "times",
}
"""Modules that every package except http and _fast may import."""

BELOW = {"storage", "runtime", "monitor", "system", "_fast"}
"""Modules below the resources; of `monitor` only its client."""

MAY_IMPORT: dict[str, set[str]] = {
    "wire": {"wire"},
    "errors": set(),
    "facts": set(),
    "times": set(),
    "booleans": set(),
    "labels": set(),
    "names": set(),
    "network_rules": {"booleans", "errors", "labels", "patterns", "wire"},
    "templates": {"errors"},
    "patterns": set(),
    "pruning": {"errors", "labels"},
    "config": {"errors"},
    "events": {"wire", "errors", "labels"},
    "_fast": {"_fast"},
    "system": {"_fast", *SHARED},
    "storage": {"system", "_fast", *SHARED},
    "runtime": {"system", "_fast", *SHARED},
    "logs": {"system", "_fast", *SHARED},
    "monitor": {"logs", "system", "_fast", *SHARED},
    "shipper": {"logs", "system", "_fast", *SHARED},
    # of images only `reference`, of logs only the drivers
    "manager": {"images", "logs", "system", *SHARED},
    "http": {"errors", "system"},  # of system only `tasks`
    "images": BELOW | SHARED,
    "plugins": BELOW | SHARED,
    "networks": {"plugins"} | BELOW | SHARED,
    "volumes": {"plugins"} | BELOW | SHARED,
    "containers": {"images", "networks", "plugins", "volumes", "logs"} | BELOW | SHARED,
    # installs plugins from registries and runs them as containers are run; the others see `plugins`
    # alone
    "plugins.managed": {"containers", "images", "logs", "plugins"} | BELOW | SHARED,
    "build": {"containers", "images", "networks", "volumes"} | BELOW | SHARED,
    "cluster": {"containers", "images", "networks", "volumes", "logs", "manager"}
    | BELOW
    | SHARED,  # of manager only its messages
    "usage": {"build", "containers", "images", "volumes"} | SHARED,
    "api": {
        *("http", "cluster", "build", "containers", "images", "networks", "volumes", "plugins", "plugins.managed"),
        *("monitor", "usage"),
        *SHARED,
    },
    "recovery": {"cluster", "manager", *SHARED},  # a command of its own process
    # of manager only the check of etcd's version
    "check": {"networks", "system", "runtime", "manager", *SHARED},
}
"""By package or top module: what it may import besides itself. `daemon` and `__main__` may import
everything.
"""

LATE_IMPORTS = {
    ("engine/__main__.py", "engine.daemon"): "--version, stop and check start without uvloop and the engine's parts",
    ("engine/__main__.py", "engine.http.server"): "the same",
    ("engine/__main__.py", "engine.logs"): "the same",
    ("engine/__main__.py", "engine.check"): "serve does not need it",
    ("engine/__main__.py", "engine.recovery"): "only hosts of managers have the packages of managers",
    ("engine/networks/networks.py", "engine.networks.overlays"): "an engine outside of a swarm does not load them",
    ("engine/networks/drivers.py", "engine.networks.overlay"): "the same",
    ("engine/networks/drivers.py", "engine.networks.encryption"): "the same",
    ("engine/cluster/cluster.py", "engine.cluster.agent"): "a daemon outside of a swarm loads nothing of it",
    ("engine/cluster/cluster.py", "engine.cluster.attaching"): "the same",
    ("engine/cluster/cluster.py", "engine.cluster.membership"): "the same",
    ("engine/cluster/cluster.py", "engine.cluster.views"): "the same",
    ("engine/api/swarm_mode.py", "engine.api"): "an engine outside of a swarm does not load the handlers",
    ("engine/api/swarm_mode.py", "engine.api.versions"): "and the version rows of a swarm's objects",
}
"""Imports inside a function that are allowed, and why."""


def part(module: str) -> str:
    """`engine.images.store` → `images`; the package itself (its version) is ""."""
    words = module.split(".")
    if words[1:3] == ["plugins", "managed"]:
        return "plugins.managed"
    return words[1] if len(words) > 1 else ""


def imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement with the absolute name that it imports from."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node, name.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "engine":  # from engine import errors
                for name in node.names:
                    yield node, f"engine.{name.name}"
            else:
                yield node, module


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_arrows(path: Path) -> None:
    here = part(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if here in ("daemon", "__main__", "__init__"):
        return
    assert here in MAY_IMPORT, f"engine/{here} has no row in the table"
    for node, module in imports(path):
        target = part(module) if module.split(".")[0] == "engine" else ""
        if target in ("", here, "__version__"):
            continue
        assert target in MAY_IMPORT[here], f"{named(path)}:{node.lineno}: {here} may not import {module}"
        if (here, target) == ("http", "system"):
            assert module == "engine.system.tasks", f"{named(path)}: {module}"
        if (here, target) == ("manager", "images"):
            assert module in ("engine.images", "engine.images.reference"), f"{named(path)}: {module}"
        if (here, target) == ("cluster", "manager"):
            pure = ("frames", "messages", "clock", "states")
            assert module in tuple(f"engine.manager.{each}" for each in pure), module
        if target == "monitor":
            allowed = module in ("engine.monitor.client", "engine.monitor.handles", "engine.monitor.messages")
            assert allowed, f"{named(path)}:{node.lineno}: of the monitor only its client may be imported, not {module}"


def test_the_monitor_process_is_small() -> None:
    """Modules loaded by the long-lived process: logs, system, _fast and its own messages; not the
    client, which is the daemon's side."""
    for path in sorted((ROOT / "engine" / "monitor").glob("*.py")):
        if path.name in ("client.py", "handles.py"):
            continue
        for node, module in imports(path):
            if module.split(".")[0] == "engine":
                assert part(module) in ("", "monitor", "logs", "system", "_fast"), (
                    f"{named(path)}:{node.lineno}: {module}"
                )
                assert module not in ("engine.monitor.client", "engine.monitor.handles"), (
                    f"{named(path)}:{node.lineno}: {module}"
                )


@pytest.mark.parametrize("path", CYTHON, ids=named)
def test_fast_modules_know_nothing_of_the_engine(path: Path) -> None:
    for line in path.read_text().splitlines():
        found = re.match(r"\s*(?:from|c?import)\s+(engine[\w.]*)", line)
        if found:
            assert part(found[1]) == "_fast", f"{named(path)}: {line.strip()}"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_no_star_and_no_late_imports(path: Path) -> None:
    """An import inside a function dodges a cycle, or has its reason in the table above."""
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert all(name.name != "*" for name in node.names), f"{named(path)}:{node.lineno}: star import"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    if isinstance(inner, ast.Import):
                        modules = [name.name for name in inner.names]
                    elif inner.module == "engine":
                        modules = [f"engine.{name.name}" for name in inner.names]
                    else:
                        modules = [inner.module or ""]
                    for module in modules:
                        ours = module.split(".")[0] == "engine"
                        assert not ours or (named(path), module) in LATE_IMPORTS, (
                            f"{named(path)}:{inner.lineno}: late import of {module}"
                        )


HANDLERS = [path for path in SOURCES if path.parent.name == "api" and path.name not in ("routes.py",)]


@pytest.mark.parametrize("path", HANDLERS, ids=named)
def test_handlers_compare_no_versions(path: Path) -> None:
    """Differences between versions are rows of api/versions/. No other code compares a version with
    a number or a string."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        asks = any("version" in ast.unparse(side).lower() for side in sides)
        literal = any(_is_version_literal(side) for side in sides)
        assert not (asks and literal), f"{named(path)}:{node.lineno}: {ast.unparse(node)}"


def _is_version_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(
            isinstance(item, ast.Constant) and isinstance(item.value, int) for item in node.elts
        )
    if not isinstance(node, ast.Constant):
        return False
    return isinstance(node.value, int | float) or (
        isinstance(node.value, str) and bool(re.fullmatch(r"1\.\d+", node.value))
    )


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), f"{named(path)}: no docstring"

"""The dependencies between packages of the engine: which may import which; and what a module of it
has and has not.

docs/ARCHITECTURE.md describes these rules. A new dependency is a decision: change the table here
and the rules there, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

SHARED = {"common", "config", "errors", "events", "metrics", "wire"}
"""Modules that every package except http and _fast may import."""

BELOW = {"storage", "runtime", "monitor", "system", "_fast"}
"""Modules below the resources; of `monitor` only its client."""

MAY_IMPORT: dict[str, set[str]] = {
    "wire": set(),
    "errors": set(),
    "metrics": set(),
    "common": {"errors", "wire"},
    "config": {"common", "errors"},
    "events": {"common", "errors", "metrics", "wire"},
    "_fast": {"_fast"},
    "system": {"_fast", *SHARED},
    "storage": {"system", "_fast", *SHARED},
    "runtime": {"system", "_fast", *SHARED},
    "logs": {"system", "_fast", *SHARED},
    "monitor": {"logs", "system", "_fast", *SHARED},
    "shipper": {"logs", "system", "_fast", *SHARED},
    "rpc": {"errors", "system", "_fast"},
    "swarm_session": {"system", *SHARED},
    # of images only `reference`, of logs only the drivers
    "manager": {"images", "logs", "rpc", "swarm_session", "system", *SHARED},
    "http": {"errors", "system"},  # of system only `tasks` and `tls`
    "images": BELOW | SHARED,
    "plugins": BELOW | SHARED,
    "networks": {"plugins"} | BELOW | SHARED,
    "volumes": {"plugins"} | BELOW | SHARED,
    "containers": {"images", "networks", "plugins", "volumes", "logs"} | BELOW | SHARED,
    # installs plugins from registries and runs them as containers are run; the others see `plugins`
    # alone
    "managed_plugins": {"containers", "images", "logs", "plugins"} | BELOW | SHARED,
    "builder": {"containers", "images", "networks", "rpc", "volumes"} | BELOW | SHARED,
    "cluster": {"containers", "images", "networks", "volumes", "logs", "swarm_session"} | BELOW | SHARED,
    "usage": {"builder", "containers", "images", "volumes", "system"} | SHARED,
    "api": {
        *("http", "cluster", "builder", "containers", "images", "networks", "volumes", "plugins", "managed_plugins"),
        *("monitor", "usage"),
        *SHARED,
    },
    # each in a process of its own
    "commands": {"cluster", "logs", "manager", "networks", "runtime", "system"} | SHARED,
}
"""By package or top module: what it may import besides itself. `daemon` and `__main__` may import
everything.
"""

LATE_IMPORTS = {
    ("engine/__main__.py", "engine.daemon"): "--version, stop and check start without uvloop and the engine's parts",
    ("engine/__main__.py", "engine.http.server"): "the same",
    ("engine/__main__.py", "engine.logs"): "the same",
    ("engine/__main__.py", "engine.commands"): "serve needs none of them, and each has packages of its own",
    (
        "engine/networks/networks.py",
        "engine.networks.overlay.overlays",
    ): "an engine outside of a swarm does not load them",
    ("engine/networks/drivers.py", "engine.networks.overlay.driver"): "the same",
    ("engine/networks/drivers.py", "engine.networks.overlay.encryption"): "the same",
    ("engine/cluster/cluster.py", "engine.cluster.agent"): "a daemon outside of a swarm loads nothing of it",
    ("engine/cluster/cluster.py", "engine.cluster.attaching"): "the same",
    ("engine/cluster/cluster.py", "engine.cluster.membership"): "the same",
    ("engine/cluster/cluster.py", "engine.cluster.views"): "the same",
    ("engine/api/swarm_mode.py", "engine.api"): "an engine outside of a swarm does not load the handlers",
    ("engine/api/swarm_mode.py", "engine.api.versions"): "and the version rows of a swarm's objects",
}
"""Imports inside a function that are allowed, and why."""


PARTS_OF = {
    ("http", "system"): {"engine.system.tasks", "engine.system.tls"},
    ("manager", "images"): {"engine.images", "engine.images.reference"},
    ("", "monitor"): {f"engine.monitor.{each}" for each in ("client", "handles", "messages")},
}
"""(who, of whom): the only modules that may be imported; "" stands for everybody."""


def part(module: str) -> str:
    """`engine.images.store` → `images`; the package itself (its version) is ""."""
    words = module.split(".")
    return words[1] if len(words) > 1 else ""


STARTS_THREADS = {
    "engine/system/threads.py",
    "engine/commands/check.py",  # a program of its own
    "engine/storage/records.py",  # the writer, before the engine serves
}


def check(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of a source of the engine."""
    name = str(path.relative_to(ROOT))
    if path.suffix in (".pyx", ".pxd"):
        yield from _fast(text)
        return
    tree = ast.parse(text, name)
    if text and not ast.get_docstring(tree):
        yield 1, "the module has no docstring"
    yield from _arrows(name, tree)
    yield from _late(name, tree)
    if name not in STARTS_THREADS:
        yield from _threads(tree)
    if path.parent.name == "api" and path.name != "routes.py":
        yield from _versions(tree)


def _threads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Starts of threads that may wait for ever where memory is short."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node).rpartition(".")[2]
            if name in ("Thread", "ThreadPoolExecutor", "start_new_thread"):
                yield node.lineno, f"{name}: threads are started by engine.system.threads alone, which does not wait"


def _fast(text: str) -> Iterator[tuple[int, str]]:
    """Modules of _fast know nothing of the engine."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*(?:from|c?import)\s+(engine[\w.]*)", line)
        if found and part(found[1]) != "_fast":
            yield number, f"_fast may not import {found[1]}"


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each import with its line and the absolute name that it imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module == "engine":  # from engine import errors
                yield from ((node.lineno, f"engine.{name.name}") for name in node.names)
            else:
                yield node.lineno, "." * node.level + (node.module or "")


def _arrows(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    here = part(name.removesuffix(".py").replace("/", "."))
    if here in ("daemon", "__main__", "__init__"):
        return
    if here not in MAY_IMPORT:
        yield 1, f"{here} has no row in MAY_IMPORT of tests/lint/imports.py"
        return
    for line, module in _imports(tree):
        if module.startswith("."):
            yield line, f"relative import of {module}"
        target = part(module) if module.split(".")[0] == "engine" else ""
        if target in ("", here, "__version__"):
            continue
        allowed = PARTS_OF.get((here, target)) or PARTS_OF.get(("", target))
        small = here == "monitor" and name not in ("engine/monitor/client.py", "engine/monitor/handles.py")
        if target not in MAY_IMPORT[here] or (allowed and module not in allowed):
            yield line, f"{here} may not import {module}: see MAY_IMPORT in tests/lint/imports.py"
        elif small and target not in ("monitor", "logs", "system", "_fast"):
            yield line, f"the process of the monitor stays small: it may not import {module}"
    if here == "monitor" and name not in ("engine/monitor/client.py", "engine/monitor/handles.py"):
        for line, module in _imports(tree):
            if module in ("engine.monitor.client", "engine.monitor.handles"):
                yield line, f"the process of the monitor may not import {module}, which is the daemon's side"


def _late(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """An import inside a function dodges a cycle, or has its reason in LATE_IMPORTS."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(each.name == "*" for each in node.names):
            yield node.lineno, "star import"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for line, module in _imports(node):
                if module.split(".")[0] == "engine" and (name, module) not in LATE_IMPORTS:
                    yield line, f"late import of {module} without a row in LATE_IMPORTS"


def _versions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Differences between versions are rows of api/versions/. No other code compares a version with
    a number or a string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any("version" in ast.unparse(side).lower() for side in sides)
            if asks and any(_is_version_literal(side) for side in sides):
                yield node.lineno, f"a handler compares no versions: {ast.unparse(node)}"


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

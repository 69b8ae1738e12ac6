"""What `tests.lint.imports` finds in a source."""

from __future__ import annotations

import pytest

from tests.lint import imports
from tests.support import ROOT

DOC = '"""A module."""\n'


def found(name: str, text: str) -> list[tuple[int, str]]:
    return sorted(imports.check(ROOT / name, text))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("engine/errors.py", "X = 1\n", "no docstring"),
        ("engine/errors.py", DOC + "import engine.images.store\n", "errors may not import engine.images.store"),
        ("engine/errors.py", DOC + "from engine import images\n", "errors may not import engine.images"),
        ("engine/images/x.py", DOC + "from . import store\n", "relative import"),
        ("engine/novel/x.py", DOC, "novel has no row"),
        ("engine/http/x.py", DOC + "from engine.system.files import remove_tree\n", "http may not import"),
        ("engine/images/x.py", DOC + "from engine.monitor.process import main\n", "images may not import"),
        ("engine/monitor/x.py", DOC + "from engine.errors import NotFound\n", "the monitor stays small"),
        ("engine/monitor/x.py", DOC + "from engine.monitor.client import Monitor\n", "the daemon's side"),
        ("engine/images/x.py", DOC + "from engine.errors import *\n", "star import"),
        ("engine/images/x.py", DOC + "def f():\n    import engine.errors\n", "late import of engine.errors"),
        ("engine/api/x.py", DOC + 'if version < "1.24":\n    pass\n', "compares no versions"),
        ("engine/api/x.py", DOC + "if request.version >= (1, 24):\n    pass\n", "compares no versions"),
        ("engine/images/x.py", DOC + "Thread(target=f).start()\n", "Thread: threads are started by"),
        (
            "engine/images/x.py",
            DOC + "p = futures.ThreadPoolExecutor()\n",
            "ThreadPoolExecutor: threads are started by",
        ),
        ("engine/_fast/x.pyx", "from engine.errors import NotFound\n", "_fast may not import engine.errors"),
        ("engine/_fast/x.pxd", "from engine.system cimport x\n", "_fast may not import engine.system"),
    ],
)
def test_what_is_wrong(name: str, text: str, words: str) -> None:
    ((_, what),) = found(name, text)
    assert words in what


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("engine/images/x.py", DOC + "from engine import errors\nfrom engine.monitor.client import Monitor\n"),
        ("engine/http/x.py", DOC + "from engine.system.tasks import cancelled\n"),
        ("engine/daemon.py", DOC + "import engine.images.store\n"),
        ("engine/monitor/client.py", DOC + "from engine.errors import NotFound\n"),
        ("engine/__main__.py", DOC + "def f():\n    from engine.daemon import Daemon\n"),
        ("engine/api/x.py", DOC + "if version < other:\n    pass\n"),
        ("engine/system/threads.py", DOC + "_thread.start_new_thread(f, ())\n"),
        ("engine/_fast/x.pyx", "from engine._fast.tar cimport Reader\n"),
        ("engine/images/__init__.py", ""),
    ],
)
def test_what_is_right(name: str, text: str) -> None:
    assert found(name, text) == []

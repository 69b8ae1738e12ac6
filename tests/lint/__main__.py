"""`python -m tests.lint`: what ruff and mypy do not know. Prints FILE:LINE: what is wrong, and ends
with status 1 if there was something.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.lint import bounds, imports, layout, messages, prose, words
from tests.support import ROOT


def findings() -> Iterator[str]:
    yield from layout.check()
    for path in prose.files():
        text, name = path.read_text(), path.relative_to(ROOT)
        checks = [prose.check]
        if path.suffix in (".py", ".pyx", ".pxd") and name.parts[0] == "engine":
            checks += [imports.check, messages.check]
        if path.suffix == ".py" and name.parts[0] == "engine":
            checks.append(words.check)
        if path.suffix == ".py" and name.parts[0] == "tests":
            checks.append(bounds.check)
        for check in checks:
            yield from (f"{name}:{line}: {what}" for line, what in check(path, text))


def main() -> int:
    found = 0
    for finding in findings():
        found += 1
        print(finding)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())

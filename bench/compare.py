"""`make compare A=one.json B=other.json`: two runs row by row, with `better` or `worse` where
the samples do not overlap.
"""

from __future__ import annotations

import sys

from bench import report


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m bench.compare A.json B.json", file=sys.stderr)
        return 2
    try:
        before, after = (report.load(path) for path in arguments)
    except (OSError, ValueError) as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 1
    print(report.comparison(before, after), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`ps_args` as procps parses it: POSIX, BSD and long options, its own output formats and `-o`.

Options that select by session or terminal have no effect, because the caller has selected the
processes. Rules: ps(1) of procps-ng 4. Pure, but for `-u`, which looks into /etc/passwd.
Raises: InvalidParameter with the word that is not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.errors import InvalidParameter
from engine.system.ps.columns import COLUMNS, WHOSE, WIDE, Column
from engine.system.ps.process import accounts

DEFAULT = "-ef"


class Wanted:
    """The parsed `ps_args`."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.sort: list[tuple[Column, bool]] = []
        self.threads = False
        self.forest = ""
        """`\\_` draws the tree, a space indents by it."""
        self.pids: set[int] = set()
        self.parents: set[int] = set()
        self.users: set[str] = set()
        self.everyone = False


def parse(ps_args: str) -> Wanted:
    """Parses `ps_args`. Raises InvalidParameter with the word that is not understood."""
    return _Reader(ps_args).wanted


def _refused(what: str) -> InvalidParameter:
    return InvalidParameter(f"invalid ps_args: {what}")


def _specifier(name: str) -> Column:
    base, colon, width = name.partition(":")
    column = COLUMNS.get(base)
    if column is None or base == "uid_hack":
        raise _refused(f"unknown format specifier {base!r}")
    if not colon:
        return column
    if not width.isdecimal() or not 0 < int(width) < 10_000:
        raise _refused(f"bad width in {name!r}")
    if base in WIDE:
        index = WHOSE.get(base[0], 1)
        return column._replace(render=WIDE[base](index, int(width)))
    return column


def format_list(text: str) -> Iterator[Column]:
    """The argument of -o: names by commas or spaces; `name=Header` takes the rest as its header,
    empty when nothing follows.
    """
    while text:
        match = re.match(r"[ ,]*([^ ,=]+)", text)
        if match is None:
            raise _refused(f"bad format list {text!r}")
        column, text = _specifier(match[1]), text[match.end() :]
        if text.startswith("="):
            column, text = column._replace(header=text[1:]), ""
        text = text.removeprefix(",") if text.startswith(",") else text.lstrip(" ")
        yield column


class _Reader:
    """Parses the words of one `ps_args`.

    Distinguishes POSIX, BSD and long options as procps does.
    """

    def __init__(self, ps_args: str) -> None:
        self.wanted = Wanted()
        self.words = ps_args.split() or [DEFAULT]
        self.chosen: list[Column] = []
        self.flags: set[str] = set()
        self.bsd = ""
        """The BSD output format: u, j, l, v or s."""
        bsd = False
        while self.words:
            word = self.words.pop(0)
            if word.startswith("--"):
                self._long(word)
            elif word.startswith("-") and len(word) > 1:
                bsd |= self._posix(word)
            elif word[:1].isdecimal() or word[:1] == ",":
                self.wanted.pids |= _numbers(word)
            else:
                bsd = True
                self._bsd(word)
        self.wanted.columns = self.chosen or [COLUMNS[name] for name in self._preset(bsd)]

    def _argument(self, option: str, rest: str) -> str:
        if rest:
            return rest
        if not self.words:
            raise _refused(f"{option} needs an argument")
        return self.words.pop(0)

    def _posix(self, word: str) -> bool:
        """True if it was read as BSD options after all, such as `-aux`: there is no user `x`."""
        flags: set[str] = set()
        for at, letter in enumerate(word[1:], 2):
            rest = word[at:]
            if letter in "oO":
                self.flags |= flags
                if letter == "O":
                    raise _refused("-O is not supported, use -o")
                self.chosen += format_list(self._argument("-o", rest))
                return False
            if letter in "pqgstuU":
                if letter in "uU":
                    users = set((rest or next(iter(self.words), "")).split(","))
                    known = set(accounts("/etc/passwd").values())
                    if not all(user in known or user.isdecimal() for user in users):
                        if rest or not self.words:
                            self._bsd(word[1:])
                            return True
                        raise _refused(f"no such user in {word}: {','.join(sorted(users))}")
                    self.wanted.users |= set(self._argument(word, rest).split(","))
                elif letter in "pq":
                    self.wanted.pids |= _numbers(self._argument(f"-{letter}", rest))
                else:
                    raise _refused(f"option -{letter} is not supported: the container chooses the processes")
                self.flags |= flags
                return False
            if letter not in "eAadxfFljyLTHwc":
                raise _refused(f"unsupported option -{letter}")
            flags.add(letter)
        self.flags |= flags
        self.wanted.everyone |= bool(flags & {"e", "A", "x"})
        self.wanted.threads |= bool(flags & {"L", "T"})
        if "H" in flags:
            self.wanted.forest = " "
        return False

    def _bsd(self, word: str) -> None:
        for at, letter in enumerate(word, 1):
            rest = word[at:]
            if letter == "o":
                self.chosen += format_list(self._argument("o", rest))
                return
            if letter == "k":
                self._sort(self._argument("k", rest))
                return
            if letter == "p":
                self.wanted.pids |= _numbers(self._argument("p", rest))
                return
            if letter == "U":
                self.wanted.users |= set(self._argument("U", rest).split(","))
                return
            if letter in "ujlvs":
                self.bsd = letter
            elif letter == "f":
                self.wanted.forest = "\\_"
            elif letter == "c":
                self.flags.add("BSD c")
            elif letter in "ax":
                self.wanted.everyone = True
            elif letter not in "gwSTn":
                raise _refused(f"unsupported option {letter!r} in {word!r}")

    def _long(self, word: str) -> None:
        name, equals, value = word[2:].partition("=")
        if name == "forest":
            self.wanted.forest = "\\_"
        elif name in ("cumulative", "headers"):
            pass
        elif name in ("cols", "columns", "width", "lines", "rows"):
            _numbers(value if equals else self._argument(word, ""))
        elif name in ("format", "sort", "pid", "ppid", "user", "quick-pid"):
            value = value if equals else self._argument(word, "")
            if name == "format":
                self.chosen += format_list(value)
            elif name == "sort":
                self._sort(value)
            elif name == "ppid":
                self.wanted.parents |= _numbers(value)
            elif name == "user":
                self.wanted.users |= set(value.split(","))
            else:
                self.wanted.pids |= _numbers(value)
        else:
            raise _refused(f"unsupported option --{name}")

    def _sort(self, text: str) -> None:
        for name in filter(None, text.split(",")):
            self.wanted.sort.append((_specifier(name.lstrip("+-")), name.startswith("-")))

    def _preset(self, bsd: bool) -> list[str]:
        """The names of the columns of an output format."""
        flags = self.flags
        if self.bsd or (bsd and not flags & set("fFlj")):
            names = {
                "u": "user pid pcpu pmem vsz rss tname stat bsdstart bsdtime args",
                "j": "ppid pid pgid sid tname tpgid stat uid bsdtime args",
                "l": "f uid pid ppid priority ni vsz rss wchan stat tname bsdtime args",
                "v": "pid tname stat bsdtime maj_flt trs drs rss pmem args",
                "s": "uid pid pending blocked ignored caught stat tname bsdtime args",
                "": "pid tname stat bsdtime args",
            }[self.bsd].split()
            return ["comm" if name == "args" and "BSD c" in flags else name for name in names]
        full = bool(flags & {"f", "F"})
        names = ["uid_hack" if full else "uid"] if full or "l" in flags else []
        names += ["pid"]
        if "l" in flags:
            names = ["s", *names, "ppid", "c", "opri", "ni", *(["rss"] if "y" in flags else ["addr"]), "sz", "wchan"]
            names = names if "y" in flags else ["f", *names]
        elif full:
            names += [
                "ppid",
                *(["pgid", "sid"] if "j" in flags else []),
                "c",
                *(["sz", "rss", "psr"] if "F" in flags else []),
            ]
        elif "j" in flags:
            names += ["pgid", "sid"]
        names += [*(["stime"] if full else []), "tname", "time", "cmd" if full else "ucmd"]
        if "T" in flags:
            names.insert(names.index("pid") + 1, "spid")
        if "L" in flags:
            names.insert(names.index("ppid" if "ppid" in names else "pid") + 1, "lwp")
            if full:
                names.insert(names.index("c") + 1, "nlwp")
        return names


def _numbers(text: str) -> set[int]:
    words = [word for word in re.split("[ ,]", text) if word]
    if not words or not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise _refused(f"{text!r} is not a list of numbers")
    return {int(word) for word in words}

"""Packet filters of other programs, which would drop what the engine's own table accepts.

The own table marks what it accepts (`filter.py`). A filter of another program gets one rule that
accepts the mark, whatever the number of networks:

- iptables, of nf_tables or legacy, if its table `filter` exists: FORWARD begins with a jump to
  DOCKER-USER, which is made if it is missing, and this rule. So what people put into DOCKER-USER
  comes first, as with Docker. Other programs' rules, and their policies, come after.
- Chains of nftables that others made are not touched. `troubles` names those that drop what they do
  not know, with the rule to add.

firewalld is asked by D-Bus instead (`firewalld.py`).

Everything blocks and is called in threads, one at a time. Owns nothing but its rules in FORWARD,
which are removed with the engine's table; DOCKER-USER and the jump to it stay, as with Docker.
Raises: nothing; failures are `troubles`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine.errors import words
from engine.networks.filter import Filter
from engine.system import netfilter
from engine.system.netfilter import NetfilterError
from engine.system.netlink.nft import IPV4, IPV6, NftSocket

_log = logging.getLogger(__name__)

USER = "DOCKER-USER"
_JUMP = f"-j {USER}"
_SEARCHED = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_LIMIT = 30
"""Seconds for one call of iptables, which may wait for the end of another one."""
_WAIT = ("--wait", "10")
_FAMILIES = {"iptables": IPV4, "ip6tables": IPV6}
_FAMILY_NAMES = {"iptables": "ip", "ip6tables": "ip6"}
_LEGACY_TABLES = {"iptables": "ip_tables_names", "ip6tables": "ip6_tables_names"}
_FIREWALLD = (
    "firewalld rejects what containers send: the engine cannot put its links into the zone docker by D-Bus, or was "
    "told to leave other firewalls alone"
)
_LAST_DROPS = re.compile(r"^\s*(counter (packets \d+ bytes \d+ )?)?(drop|reject[^\n]*)\s*\}\s*\}\s*\Z", re.MULTILINE)
"""In `nft list chain`: the last rule drops or refuses everything."""


class Program(NamedTuple):
    """One of iptables' programs on this host."""

    name: str
    """iptables or ip6tables."""
    legacy: bool
    path: str


def programs() -> list[Program]:
    """Those that are installed: each kind once. Raises OSError."""
    found: dict[tuple[str, bool], Program] = {}
    for name in _FAMILIES:
        for legacy, program in ((False, f"{name}-nft"), (True, f"{name}-legacy")):
            if (path := shutil.which(program, path=_SEARCHED)) is not None:
                found[name, legacy] = Program(name, legacy, path)
        if (name, False) not in found and (path := shutil.which(name, path=_SEARCHED)) is not None:
            legacy = "nf_tables" not in _run(path, "--version")
            found.setdefault((name, legacy), Program(name, legacy, path))
    return [*found.values()]


def accepting(mark: int) -> str:
    """The rule of nftables that accepts what the engine has accepted, as nft lists it."""
    return f"meta mark & {mark:#x} == {mark:#x} accept"


class Firewall:
    """Keeps the engine's rules in the chains of others."""

    def __init__(self, table: Filter, mark: int, *, own: bool = False) -> None:
        """`table`: the engine's own, which marks packets. With `own` no rule is put anywhere, and
        `troubles` names the chains of iptables, too.
        """
        self._filter = table
        self._rule = f"-m mark --mark {mark:#x}/{mark:#x} -j ACCEPT"
        self._accept = accepting(mark)
        self._own = own
        self._programs: list[Program] = []
        self._kernel: NftSocket | None = None
        self._seen: dict[Program, tuple[bytes, ...]] = {}
        """FORWARD of nf_tables when it was right."""
        self._failures: dict[Program, str] = {}
        self._dropping: list[str] = []
        self.given_to_firewalld = False
        """True if firewalld lets the engine's packets pass."""
        self.on_firewalld: Callable[[], object] = lambda: None
        """Called in a thread when firewalld's table was seen."""

    def told_of_firewalld(self, given: bool) -> None:
        """Whether firewalld lets the engine's packets pass. On the event loop."""
        self.given_to_firewalld = given
        if given:
            self._dropping = [each for each in self._dropping if each != _FIREWALLD]

    @property
    def troubles(self) -> list[str]:
        """What may keep containers from other hosts, in sentences for the operator. Does not
        block.
        """
        return [*self._failures.values(), *self._dropping]

    def open(self) -> None:
        """Put the rules in, in the network namespace of the calling thread."""
        self._kernel = NftSocket()
        self.mend(True)
        self._filter.companions.append(self.mend)

    def _find_programs(self) -> None:
        try:
            self._programs = [] if self._own else programs()
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("iptables: %s", words(error))

    def clear(self) -> None:
        """Take out the rules that an earlier daemon has left, and put none in."""
        try:
            self._programs = programs()
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("iptables: %s", words(error))
        if self._programs:
            self._kernel = NftSocket()
            self._filter.companions.append(self.mend)
            self.close(remove=True)
            self._programs = []

    @property
    def polled(self) -> bool:
        """True if there can be rules whose changes the kernel does not report, so that `poll` is
        due every few seconds. Does not block.
        """
        return any(each.legacy for each in self._programs)

    def poll(self) -> None:
        """Mend legacy iptables if it is in use."""
        if any(each.legacy and _in_use_as_legacy(each) for each in self._programs):
            self.mend(True)

    def mend(self, whole: bool) -> bool:
        """Put back what others removed. Returns True if anything was missing.

        With `whole` also rules that others now stand before, and those of legacy iptables.
        """
        changed = False
        if whole and not self._programs:
            self._find_programs()  # installed meanwhile
        for program in self._programs:
            try:
                changed |= self._mend(program, whole)
                self._failures.pop(program, None)
            except (OSError, subprocess.SubprocessError) as error:
                self._failed(program, words(error))
        if whole:
            try:
                self._dropping = [*self._look_at_chains()]
            except NetfilterError as error:
                _log.warning("chains of other programs: %s", error)
        return changed

    def close(self, remove: bool) -> None:
        """With `remove` take the rules out."""
        if self._kernel is None:
            return
        for program in self._programs if remove else ():
            try:
                if self._there(program) is not None and self._rule in (rules := _forward(program)):
                    _restore(program, [f"-D FORWARD {self._rule}"] * rules.count(self._rule))
            except (OSError, subprocess.SubprocessError) as error:
                _log.warning("%s: %s", program.path, words(error))
        self._filter.companions.remove(self.mend)
        self._kernel.close()
        self._kernel = None

    # --- iptables ---------------------------------------------------------------------------------

    def _mend(self, program: Program, whole: bool) -> bool:
        if program.legacy and not whole:
            return False
        there = self._there(program)
        if there is None or (there and there == self._seen.get(program)):
            return False
        rules = _forward(program)
        missing = self._rule not in rules
        right = not missing and _is_first(rules, self._rule)
        if missing or (whole and not right):
            lines = [] if _has_user_chain(program) else [f"-N {USER}"]
            lines += [f"-D FORWARD {each}" for each in rules if each in (self._rule, _JUMP)]
            _restore(program, [*lines, f"-I FORWARD 1 {_JUMP}", f"-I FORWARD 2 {self._rule}"])
            right = True
        if right:
            self._seen[program] = self._there(program) or ()
        return missing

    def _there(self, program: Program) -> tuple[bytes, ...] | None:
        """Identifies the rules of FORWARD; None if this iptables is not in use, empty if it is and
        nothing identifies them.
        """
        assert self._kernel is not None
        if program.legacy:
            return () if _in_use_as_legacy(program) else None
        return self._kernel.chain("filter", "FORWARD", _FAMILIES[program.name])

    def _failed(self, program: Program, why: str) -> None:
        text = f"{program.path}: {why}: FORWARD may drop what containers send and receive"
        if self._failures.get(program) != text:
            _log.warning("%s", text)
        self._failures[program] = text

    # --- nftables ---------------------------------------------------------------------------------

    def _look_at_chains(self) -> Iterator[str]:
        for chain in dropping(self._accept, self._programs):
            if chain.table != "firewalld":
                yield chain.advice(self._accept)
                continue
            self.on_firewalld()
            if not self.given_to_firewalld:
                yield _FIREWALLD


class Chain(NamedTuple):
    """A base chain of nftables for forwarded packets."""

    family: str
    table: str
    name: str
    drops: bool
    """True if its policy is to drop."""

    def advice(self, accept: str) -> str:
        where = f"{self.family} {self.table}"
        return (
            f"chain {self.name} of table {where} drops what it does not know, also what containers send and receive; "
            f"add: nft 'insert rule {where} {self.name} {accept}'"
        )


def dropping(accept: str, handled: Iterable[Program]) -> Iterator[Chain]:
    """Chains that drop what they do not know, without the rule `accept`, and not of these kinds of
    iptables; those of firewalld too. Raises NetfilterError.
    """
    ours = {(_FAMILY_NAMES[each.name], "filter") for each in handled if not each.legacy}
    for chain in forward_chains(netfilter.run("list chains")):
        if (chain.family, chain.table) in ours:
            continue
        with contextlib.suppress(NetfilterError):  # it has gone meanwhile
            listed = netfilter.run(f"list chain {chain.family} {chain.table} {chain.name}")
            if accept not in listed and (chain.drops or _LAST_DROPS.search(listed)):
                yield chain


def forward_chains(listed: str) -> Iterator[Chain]:
    """Those of `nft list chains`."""
    family = table = chain = ""
    for line in listed.splitlines():
        kind, *names = line.split() or [""]
        if kind == "table":
            family, table = names[:2]
        elif kind == "chain":
            chain = names[0]
        elif "hook forward" in line and family in ("ip", "ip6", "inet"):
            yield Chain(family, table, chain, "policy drop" in line)


# --- calls of iptables ----------------------------------------------------------------------------


def _forward(program: Program) -> list[str]:
    """The rules of FORWARD as iptables shows them."""
    lines = _run(program.path, *_WAIT, "-S", "FORWARD").splitlines()
    return [line.removeprefix("-A FORWARD ") for line in lines if line.startswith("-A FORWARD ")]


def _is_first(rules: Iterable[str], rule: str) -> bool:
    """True if only Docker's jumps stand before the rule, that to DOCKER-USER among them."""
    before = [*itertools.takewhile(lambda each: each != rule, rules)]
    return _JUMP in before and all(each.startswith("-j DOCKER-") for each in before)


def _has_user_chain(program: Program) -> bool:
    try:
        _run(program.path, *_WAIT, "-S", USER)
    except OSError:
        return False
    return True


def _restore(program: Program, lines: Iterable[str]) -> None:
    """Change the table `filter` in one transaction."""
    _run(f"{program.path}-restore", "--noflush", *_WAIT, given="\n".join(["*filter", *lines, "COMMIT", ""]))


def _run(*command: str, given: str = "") -> str:
    """What it prints. Raises OSError with what it says when it fails."""
    run = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_LIMIT, check=False)
    if run.returncode:
        said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        raise OSError(errno.EINVAL, said[0])
    return run.stdout


def _in_use_as_legacy(program: Program) -> bool:
    try:
        return "filter" in Path("/proc/thread-self/net", _LEGACY_TABLES[program.name]).read_text().split()
    except OSError:  # a kernel without it
        return False

"""What is read of iptables and nftables, with programs that stand in for iptables where failures
are meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.networks import firewall
from engine.networks.filter import Filter
from engine.networks.firewall import Chain, Firewall, Program, dropping, forward_chains
from engine.system import netfilter

MARK = 0x10000000
RULE = "-m mark --mark 0x10000000/0x10000000 -j ACCEPT"
USER = "-j DOCKER-USER"

LISTED = """table ip filter {
	chain INPUT {
		type filter hook input priority filter; policy drop;
	}

	chain FORWARD {
		type filter hook forward priority filter; policy drop;
	}

	chain DOCKER-USER {
	}
}
table inet own {
	chain late {
		type filter hook forward priority 10; policy accept;
	}
}
table bridge apart {
	chain frames {
		type filter hook forward priority filter; policy drop;
	}
}
"""


def test_forward_chains() -> None:
    assert [*forward_chains(LISTED)] == [
        Chain("ip", "filter", "FORWARD", True),
        Chain("inet", "own", "late", False),
    ]
    assert [*forward_chains("")] == []


def chain(*rules: str) -> str:
    lines = "".join(f"\t\t{each}\n" for each in ("type filter hook forward priority 10; policy accept;", *rules))
    return f"table inet own {{\n\tchain late {{\n{lines}\t}}\n}}\n"


@pytest.mark.parametrize(
    ("rules", "drops"),
    [
        ((), False),
        (("drop",), True),
        (("counter packets 5 bytes 400 drop",), True),
        (("ct state established accept", "reject with icmpx admin-prohibited"), True),
        (("tcp dport 25 drop",), False),
        (("drop", "accept"), False),
        (("meta mark & 0x10000000 == 0x10000000 accept", "drop"), False),
        (("meta mark & 0x20000000 == 0x20000000 accept", "drop"), True),
    ],
)
def test_chains_that_drop_what_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch, rules: Iterable[str], drops: bool
) -> None:
    monkeypatch.setattr(netfilter, "run", lambda text: LISTED if text == "list chains" else chain(*rules))
    found = [*dropping(firewall.accepting(MARK), [Program("iptables", False, "/iptables")])]
    assert found == ([Chain("inet", "own", "late", False)] if drops else [])


@pytest.mark.parametrize(
    ("rules", "first"),
    [
        ([USER, RULE], True),
        ([USER, "-j DOCKER-FORWARD", RULE, "-j REJECT"], True),
        ([RULE, USER], False),
        ([USER, "-j ufw-before-forward", RULE], False),
        (["-j DOCKER-FORWARD", RULE], False),
    ],
)
def test_which_rules_may_come_before(rules: list[str], first: bool) -> None:
    assert firewall._is_first(rules, RULE) == first


def program(directory: Path, script: str) -> Program:
    path = directory / "iptables"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Program("iptables", False, str(path))


class Kernel:
    """Has the chain FORWARD, whose rules change each time."""

    def __init__(self) -> None:
        self.rules = 0

    def chain(self, *_: Any) -> tuple[bytes, ...]:
        self.rules += 1
        return (bytes([self.rules]),)


def test_iptables_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and in /info until it works."""
    monkeypatch.setattr(netfilter, "run", lambda _: "")
    said = "iptables: the kernel has no such table"
    failing = Firewall(Filter("t"), MARK)
    failing._kernel = Kernel()  # type: ignore[assignment]
    failing._programs = [program(tmp_path, f"echo '{said}' >&2; echo more >&2; exit 3")]
    for _ in range(2):
        assert not failing.mend(True)
    why = f"{tmp_path}/iptables: {said}: FORWARD may drop what containers send and receive"
    assert failing.troubles == [why] and [record.getMessage() for record in caplog.records] == [why]
    program(tmp_path, "exit 4")
    failing.mend(True)
    assert "exit status 4" in failing.troubles[0]
    program(tmp_path, f"printf -- '-P FORWARD DROP\\n-A FORWARD {USER}\\n-A FORWARD {RULE}\\n'")
    assert not failing.mend(True)
    assert failing.troubles == []


def test_iptables_that_is_installed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netfilter, "run", lambda _: "")
    monkeypatch.setattr(firewall, "_SEARCHED", str(tmp_path))
    found = Firewall(Filter("t"), MARK)
    found._kernel = Kernel()  # type: ignore[assignment]
    assert not found.mend(True)
    program(tmp_path, 'case "$*" in *--version*) echo nf_tables;; *) exit 3;; esac')
    found.mend(False)
    assert found.troubles == []  # looked for now and then only
    found.mend(True)
    assert "exit status 3" in found.troubles[0]


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "_SEARCHED", str(tmp_path))
    assert firewall.programs() == []
    program(tmp_path, "echo 'iptables v1.8.9 (nf_tables)'")
    assert firewall.programs() == [Program("iptables", False, str(tmp_path / "iptables"))]
    program(tmp_path, "echo 'iptables v1.6.1'")
    assert firewall.programs() == [Program("iptables", True, str(tmp_path / "iptables"))]
    for name in ("iptables-nft", "iptables-legacy"):
        (tmp_path / name).symlink_to(tmp_path / "iptables")
    assert [(each.legacy, Path(each.path).name) for each in firewall.programs()] == [
        (False, "iptables-nft"),
        (True, "iptables-legacy"),
    ]

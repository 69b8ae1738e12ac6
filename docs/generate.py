"""`make docs`: writes the options in docs/ from `engine.config.Config`, and the figure of a
container's lifecycle.

`tests/unit/test_docs.py` fails if a file differs from the output of this program.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from engine import __version__
from engine.config import Option, docker, options
from engine.containers.lifecycle import TABLE, Refusal, State, Verb

ROOT = Path(__file__).resolve().parent.parent


def toml() -> str:
    """docs/engined.toml: every option, commented out, with its default or an example."""
    lines = [
        "# Configuration of engined, /etc/engined/engined.toml. docs/CONFIGURATION.md explains it.",
        "# Every option is listed with its default, or with an example where it has none.",
        "# Options of the command line override this file. Repeatable options are lists.",
    ]
    for option in options():
        note = "" if _literal(option) else f" Default: {option.shown_default}."
        lines += ["", *textwrap.wrap(option.text + note, 96, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{option.name} = {_literal(option) or _EXAMPLES[option.name]}")
    return "\n".join(lines) + "\n"


_EXAMPLES = {
    "userns_remap": '"default"',
    "exec_opt": '["native.cgroupdriver=cgroupfs"]',
    "pidfile": '"/run/engined.pid"',
    "metrics_addr": '"127.0.0.1:9323"',
    "cgroup_parent": '"/containers"',
    "default_cgroupns_mode": '"private"',
    "default_ulimit": '["nofile=1024:4096"]',
    "dns": '["192.0.2.53"]',
    "dns_opt": '["timeout:1"]',
    "dns_search": '["example.com"]',
    "resolv_conf": '"/etc/resolv.conf"',
    "host_gateway_ip": '["192.0.2.1"]',
    "bip6": '"fd00:1::1/64"',
    "fixed_cidr": '"172.30.1.0/24"',
    "fixed_cidr_v6": '"fd00:1::/80"',
    "default_gateway": '"172.30.0.254"',
    "default_gateway_v6": '"fd00:1::fe"',
    "ip": '"127.0.0.1"',
    "bridge_accept_fwmark": '"0x1/0x3"',
    "default_network_opt": '["bridge=com.docker.network.driver.mtu=1400"]',
    "http_proxy": '"http://proxy.example:3128"',
    "https_proxy": '"http://proxy.example:3128"',
    "no_proxy": '"localhost,.example.com"',
    "feature": '["buildkit=true"]',
    "build_cache_reserved": '"20g"',
    "build_cache_max_used": '"100g"',
    "build_cache_min_free": '"10g"',
    "build_cache_policy": '["unused-for=48h,type=exec.cachemount", "max-used=50g,all=true"]',
    "swarm_default_advertise_addr": '"eth0"',
    "tcp": '["0.0.0.0:2376"]',
    "tls_ca": '"/etc/engined/ca.pem"',
    "tls_cert": '"/etc/engined/server.pem"',
    "tls_key": '"/etc/engined/server.key"',
    "runtime": '"/usr/bin/crun"',
    "add_runtime": '["kata=/opt/kata/bin/kata-runtime"]',
    "init_path": '"/usr/bin/tini-static"',
    "bridge_subnet": '"172.30.0.0/16"',
    "default_address_pool": '["base=10.200.0.0/16,size=24"]',
    "insecure_registry": '["registry.example:5000", "10.0.0.0/8"]',
    "registry_mirror": '["https://mirror.example"]',
    "authorization_plugin": '["opa", "audit"]',
    "log_opt": '["max-size=10m", "max-file=3"]',
    "label": '["zone=a", "disk=ssd"]',
    "node_generic_resource": '["SSD=3", "GPU=UUID1"]',
}
"""Values of options whose default is not a value of their own."""


def _literal(option: Option) -> str:
    """The default in TOML; empty when the option has none."""
    default = option.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int):
        return option.shown_default
    if option.repeatable:
        return "[" + ", ".join(f'"{each}"' for each in default) + "]" if default else ""
    return f'"{default}"' if str(default) else ""


def configuration() -> str:
    """docs/CONFIGURATION.md: the options, and what becomes of dockerd's keys."""
    template = (ROOT / "docs" / "CONFIGURATION.md.in").read_text()
    return template.replace("@OPTIONS@", "\n".join(_option_rows())).replace("@KEYS@", "\n".join(_key_rows()))


def _option_rows() -> Iterator[str]:
    for option in options():
        flag = f"{option.flag} {option.value}".strip().replace("|", "\\|")
        default = option.shown_default or str(option.default).lower()
        notes = [
            option.text,
            *(["Repeatable."] if option.repeatable else []),
            *(["A reload changes it."] if option.reload else []),
        ]
        yield f"| `{flag}` | {default.replace('|', chr(92) + '|')} | {' '.join(notes)} |"


def _key_rows() -> Iterator[str]:
    for key, known in sorted(docker.KEYS.items()):
        if isinstance(known, docker.NoMeaning):
            text = f"no meaning{_other_than(known.as_it_is)}: {known.why}"
        elif isinstance(known, docker.Refused):
            text = f"refused, unless {' or '.join(map(_value, known.accepted))}: {known.why}"
        else:
            text = f"in force: {', '.join(f'`{flag}`' for flag in docker.flags(key))}"
        yield f"| `{key}` | {text} |"


def _other_than(value: object) -> str:
    return "" if value is None else f", unless {_value(value)}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "empty" if value in ("", []) else str(value)


def manual_page() -> str:
    """docs/engined.1, in man(7) macros."""
    template = (ROOT / "docs" / "engined.1.in").read_text()
    entries = []
    for option in options():
        entries.append(
            ".TP\n" + f".BR {_roff(option.flag)}" + (f' " " "\\fI{_roff(option.value)}\\fP"' if option.value else "")
        )
        notes = ["May be repeated."] if option.repeatable else []
        if option.default is True:
            notes.append(f"Default: true; {option.flag}=false switches it off.")
        elif option.shown_default:
            notes.append(f"Default: {option.shown_default}.")
        if option.reload:
            notes.append("A reload changes it.")
        entries.append(_roff(" ".join([option.text, *notes])))
    return template.replace("@VERSION@", __version__).replace("@OPTIONS@", "\n".join(entries))


def _roff(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def lifecycle() -> str:
    """docs/lifecycle.md: the moves of `engine.containers.lifecycle.TABLE` as a figure, and its
    refusals as a table.
    """
    moves: dict[tuple[State, State], list[str]] = {}
    for (state, verb), entry in TABLE.items():
        if isinstance(entry, State) and (entry != state or verb in _KEEPS):
            moves.setdefault((state, entry), []).append(str(verb))
    figure = [f"    {state} --> {to}: {', '.join(verbs)}" for (state, to), verbs in moves.items()]
    refusals: dict[str, list[str]] = {}
    for (state, verb), entry in TABLE.items():
        if isinstance(entry, Refusal):
            refusals.setdefault(f"{entry.kind.__name__}: {entry.text}", []).append(f"{verb} when {state}")
    rows = [f"| {text.replace('|', '')} | {'; '.join(cases)} |" for text, cases in refusals.items()]
    return "\n".join(
        [
            "# A container's lifecycle",
            "",
            "Written by `make docs` from `engine/containers/lifecycle.py`. `exit`: its process has ended.",
            "`fail`: a start has failed. `thaw`: a signal has ended a paused container.",
            "`found` and `boot` occur when the engine starts.",
            "",
            "```mermaid",
            "stateDiagram-v2",
            "    [*] --> created",
            *figure,
            "    dead --> [*]",
            "```",
            "",
            "| refused with | verb and state |",
            "|---|---|",
            *rows,
            "",
        ]
    )


_KEEPS = {Verb.FAIL}
"""Verbs that are drawn though the state stays the same."""


def files() -> dict[Path, str]:
    """The generated files and their content."""
    return {
        ROOT / "docs" / "engined.toml": toml(),
        ROOT / "docs" / "engined.1": manual_page(),
        ROOT / "docs" / "CONFIGURATION.md": configuration(),
        ROOT / "docs" / "lifecycle.md": lifecycle(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)

"""`make docs`: writes the options in docs/ and README from `engine.config.Config`, and the figure
of a container's lifecycle.

`tests/unit/test_docs.py` fails if a file differs from the output of this program.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from engine import __version__
from engine.config import Option, options
from engine.containers.lifecycle import TABLE, Refusal, State, Verb

ROOT = Path(__file__).resolve().parent.parent

README_BEGIN = "<!-- options: written by `make docs` -->\n"
README_END = "<!-- end of options -->\n"


def toml() -> str:
    """docs/engined.toml: every option, commented out, with its default or an example."""
    lines = [
        "# Configuration of engined: engined serve --config /etc/engined.toml",
        "# Every option is listed with its default, or with an example where it has none.",
        "# Options of the command line override this file. Repeatable options are lists.",
    ]
    for option in options():
        note = "" if _literal(option) else f" Default: {option.shown_default}."
        lines += ["", *textwrap.wrap(option.text + note, 96, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{option.name} = {_literal(option) or _EXAMPLES[option.name]}")
    return "\n".join(lines) + "\n"


_EXAMPLES = {
    "tcp": '["0.0.0.0:2376"]',
    "tls_ca": '"/etc/engined/ca.pem"',
    "tls_cert": '"/etc/engined/server.pem"',
    "tls_key": '"/etc/engined/server.key"',
    "runtime": '"/usr/bin/crun"',
    "add_runtime": '["kata=/opt/kata/bin/kata-runtime"]',
    "init_path": '"/usr/bin/tini-static"',
    "bridge_subnet": '"172.30.0.0/16"',
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
        return str(default)
    if option.repeatable:
        return "[" + ", ".join(f'"{each}"' for each in default) + "]" if default else ""
    return f'"{default}"' if str(default) else ""


def readme_table() -> Iterator[str]:
    """README's table of options, with its markers."""
    yield README_BEGIN
    yield "| option | default | |\n|---|---|---|\n"
    for option in options():
        flag = f"{option.flag} {option.value}".strip().replace("|", "\\|")
        default = option.shown_default.replace("|", "\\|") or "off"
        again = " Repeatable." if option.repeatable else ""
        yield f"| `{flag}` | {default} | {option.text}{again} |\n"
    yield README_END


def readme(text: str) -> str:
    """README with the current table of options."""
    before, rest = text.split(README_BEGIN)
    _, after = rest.split(README_END)
    return before + "".join(readme_table()) + after


def manual_page() -> str:
    """docs/engined.1, in man(7) macros."""
    template = (ROOT / "docs" / "engined.1.in").read_text()
    entries = []
    for option in options():
        entries.append(
            ".TP\n" + f".BR {_roff(option.flag)}" + (f' " " \\fI{_roff(option.value)}\\fP' if option.value else "")
        )
        notes = ["May be repeated."] if option.repeatable else []
        if option.shown_default:
            notes.append(f"Default: {option.shown_default}.")
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
    name = ROOT / "README.md"
    return {
        ROOT / "docs" / "engined.toml": toml(),
        ROOT / "docs" / "engined.1": manual_page(),
        name: readme(name.read_text()),
        ROOT / "docs" / "lifecycle.md": lifecycle(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)

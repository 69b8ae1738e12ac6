"""The default seccomp profile beside another profile in Docker's format, such as a newer
`default.json` of github.com/moby/profiles.

    python -m tests.support.engine.seccomp FILE          lists the differences
    python -m tests.support.engine.seccomp --take FILE   writes FILE over the engine's

Two profiles are equal when they decide alike: the order of rules and names, and how names are
grouped, do not matter. The form of what is written: rules by what they depend on, names sorted,
wrapped at 100 columns.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.runtime import seccomp

Profile = dict[str, Any]
Rules = dict[str, set[str]]
"""A rule without its names, as JSON → its names."""

_WRITTEN = ("names", "comment")


def _key(rule: Profile) -> str:
    """What two rules have in common that differ in their names alone."""
    kept: Profile = {name: value for name, value in rule.items() if value and name not in _WRITTEN}
    for condition in ("includes", "excludes"):
        if condition in kept:
            kept[condition] = {
                name: sorted(value) if isinstance(value, list) else value
                for name, value in sorted(kept[condition].items())
                if value
            }
    if "args" in kept:
        kept["args"] = [
            {name: value for name, value in arg.items() if name != "valueTwo" or value} for arg in kept["args"]
        ]
    return json.dumps(kept, sort_keys=True)


def rules(profile: Profile) -> Rules:
    found: Rules = {}
    for rule in profile["syscalls"]:
        found.setdefault(_key(rule), set()).update(rule["names"])
    return found


def _architectures(profile: Profile) -> dict[str, list[str]]:
    return {each["architecture"]: sorted(each.get("subArchitectures") or ()) for each in profile["archMap"]}


def differences(ours: Profile, theirs: Profile) -> Iterator[str]:
    for name in ("defaultAction", "defaultErrnoRet"):
        if ours.get(name) != theirs.get(name):
            yield f"{name}: {ours.get(name)}, theirs {theirs.get(name)}"
    mine, other = _architectures(ours), _architectures(theirs)
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            yield f"{name}: {mine.get(name)}, theirs {other.get(name)}"
    have, want = rules(ours), rules(theirs)
    for key in sorted(have.keys() | want.keys()):
        for sign, names in (
            ("+", want.get(key, set()) - have.get(key, set())),
            ("-", have.get(key, set()) - want.get(key, set())),
        ):
            if names:
                yield f"{sign} {' '.join(sorted(names))}: {key}"


def written(profile: Profile) -> str:
    """The profile in the engine's form."""

    def order(entry: tuple[str, set[str]]) -> tuple[Any, ...]:
        rule = json.loads(entry[0])
        includes = rule.get("includes", {})
        values = [(arg["index"], arg["op"] != "SCMP_CMP_LT", arg["value"]) for arg in rule.get("args", ())]
        return (
            includes.get("caps", []),
            includes.get("arches", []),
            includes.get("minKernel", ""),
            "args" in rule or "excludes" in rule,
            sorted(entry[1]) if values else [],
            values,
            entry[0],
        )

    lines = []
    for key, names in sorted(rules(profile).items(), key=order):
        head = key[1:-1]
        one = f'    {{{head}, "names": {json.dumps(sorted(names))}}}'
        if len(names) == 1 or len(one) <= 99:
            lines.append(one)
        else:
            listed = textwrap.fill(
                ", ".join(json.dumps(name) for name in sorted(names)),
                99,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
            )
            lines.append(f'    {{{head}, "names": [\n{listed}\n    ]}}')
    maps = [
        f'    {{"architecture": {json.dumps(name)}, "subArchitectures": {json.dumps(others)}}}'
        for name, others in _architectures(profile).items()
    ]
    return (
        "{\n"
        f'  "defaultAction": {json.dumps(profile["defaultAction"])},\n'
        f'  "defaultErrnoRet": {profile["defaultErrnoRet"]},\n'
        '  "archMap": [\n' + ",\n".join(maps) + '\n  ],\n  "syscalls": [\n' + ",\n".join(lines) + "\n  ]\n}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the default seccomp profile with another.")
    parser.add_argument("--take", action="store_true", help="write it over the engine's")
    parser.add_argument("file", type=Path, help="a profile in Docker's format")
    asked = parser.parse_args()
    theirs = json.loads(asked.file.read_text())
    found = list(differences(json.loads(seccomp.DEFAULT.read_text()), theirs)) if seccomp.DEFAULT.exists() else []
    print("\n".join(found) or "no difference")
    if asked.take:
        seccomp.DEFAULT.write_text(written(theirs))
    return bool(found) and not asked.take


if __name__ == "__main__":
    sys.exit(main())

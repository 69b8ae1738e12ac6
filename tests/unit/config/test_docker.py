"""Keys of dockerd's file: the options that they set, and refusals that name the key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, FileError, docker, parse, verdicts
from engine.config.declaration import options
from engine.config.files import IN_FORCE, NO_MEANING, REFUSED

WORDS = (
    *("", " ", "0", "-1", "x", "a=b", "=", "runc", "/", "/x y", "../x", "x'", "10.0.0.0/8", "::1", "NaN", "\0", "\n"),
    *("64m", "9" * 400, "é" * 300, "\ud800", "Name", "Soft", "Hard", "path", "options", "runtimeArgs", "base", "size"),
    *("nofile", "host", "private", "true", "json", "unix:///x", "tcp://127.0.0.1:1", "native.cgroupdriver=cgroupfs"),
)
NUMBERS = (0, 1, -1, 64, 1 << 31, 1 << 63, 1 << 64, -(1 << 70), 10**400, 0.5, -0.0, 1e308)


def value(chance: random.Random, depth: int = 0) -> Any:
    """A random JSON value, made of what the readers look for."""
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind < 2:
        return chance.choice(WORDS)
    if kind == 2:
        return chance.choice(NUMBERS)
    if kind == 3:
        return chance.choice((True, False, None))
    size = chance.randrange(4)
    if kind == 4:
        return [value(chance, depth + 1) for _ in range(size)]
    return {chance.choice(WORDS): value(chance, depth + 1) for _ in range(size)}


@pytest.mark.parametrize("key", sorted(docker.KEYS))
def test_any_value_gives_a_configuration_or_one_line_that_begins_with_the_key(tmp_path: Path, key: str) -> None:
    chance, file = random.Random(key), tmp_path / "daemon.json"
    for _ in range(20):
        given = value(chance)
        file.write_text(json.dumps({key: given}))
        (verdict,) = verdicts(str(file))
        try:
            found = parse({}, str(file))
        except FileError as error:
            text = str(error)
            assert text.startswith((f"--config {file}: {key}: ", f"--config {file}: {key} ")), given
            assert len(text.splitlines()) == 1, given
            assert verdict.kind == REFUSED and len(verdict.why.splitlines()) == 1, given
        except ValueError as error:  # another option that the key needs, such as --tls-ca
            assert key in ("hosts", "tlsverify") and str(error).startswith("--tls-"), given
        else:
            assert isinstance(found, Config) and verdict.kind in (IN_FORCE, NO_MEANING), given


@pytest.mark.parametrize("key", sorted(docker.KEYS))
def test_empty_values_count_as_not_set(tmp_path: Path, key: str) -> None:
    """So dockerd's example file, which has all keys and few values, can be given."""
    for empty in (None, "", 0, [], {}):
        (tmp_path / "daemon.json").write_text(json.dumps({key: empty}))
        assert parse({}, str(tmp_path / "daemon.json")) == Config()
    (tmp_path / "daemon.json").write_text(json.dumps(dict.fromkeys(docker.KEYS)))
    assert parse({}, str(tmp_path / "daemon.json")) == Config()


def test_every_key_is_an_option_has_no_meaning_or_is_refused() -> None:
    named = {option.docker for option in options()} - {""}
    assert named <= docker.KEYS.keys()
    for key in docker.KEYS:
        if not isinstance(docker.KEYS[key], docker.NoMeaning | docker.Refused):
            assert docker.flags(key) or key == "builder"


@pytest.mark.parametrize(
    ("key", "given", "field", "expected"),
    [
        ("default-shm-size", "32M", "shm_size", "32M"),
        ("default-shm-size", 1000, "shm_size", "1000"),
        (
            *(
                "default-ulimits",
                {"nofile": {"Name": "nofile", "Soft": 1, "Hard": 2}, "core": {"Soft": -1, "Hard": -1}},
            ),
            *("ulimits", ("nofile=1:2", "core=-1:-1")),
        ),
        ("runtimes", {"a": {"path": "x", "runtimeArgs": ["-y", "a b"]}}, "runtimes", ("a=x -y 'a b'",)),
        ("runtimes", {"nvidia": {"path": "nvidia-container-runtime", "args": []}}, "runtimes", None),
        (
            *("runtimes", {"a": {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "/x"}}}),
            *("runtimes", ("a=/x",)),
        ),
        (
            "runtimes",
            {"a": {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "/x", "NoPivotRoot": True}}},
            "runtimes",
            ("a=/x --no-pivot",),
        ),
        ("cdi-spec-dirs", ["/a", "/b"], "cdi_specs", (Path("/a"), Path("/b"))),
        ("cdi-spec-dirs", [""], "cdi_specs", ()),
        ("default-runtime", "io.containerd.runc.v2", "runtime", "runc"),
        ("log-opts", {"max-size": "1m"}, "log_opts", ("max-size=1m",)),
        ("seccomp-profile", "unconfined", "seccomp_profile", "unconfined"),
        ("swarm-default-advertise-addr", "eth0", "swarm_advertise", "eth0"),
        ("cgroup-parent", "/a/b", "cgroup_parent", "/a/b"),
    ],
)
def test_values(tmp_path: Path, key: str, given: Any, field: str, expected: Any) -> None:
    (tmp_path / "daemon.json").write_text(json.dumps({key: given}))
    found = getattr(parse({}, str(tmp_path / "daemon.json")), field)
    assert found == (("nvidia=nvidia-container-runtime",) if expected is None else expected)


@pytest.mark.parametrize(
    ("key", "given", "words"),
    [
        ("default-shm-size", "0.0m", "'0.0m': must be a size such as 64m, above 0"),
        ("default-shm-size", -1, "'-1': must be a size"),
        ("default-shm-size", True, ": expected a string"),
        ("default-ulimits", {"nofile": {"Soft": 1}}, "nofile: must have Name, Soft and Hard"),
        (
            "default-ulimits",
            {"x": {"Soft": 1, "Hard": 1}},
            "'x=1:1': must be NAME=SOFT[:HARD], with a name of as, core",
        ),
        ("default-ulimits", {"core": {"Soft": 1, "Hard": 1 << 63}}, f"'core=1:{1 << 63}': limits must be -1"),
        ("default-ulimits", {"core": {"Soft": -1, "Hard": 5}}, "'core=-1:5': the soft limit must not be above"),
        ("runtimes", {"a": {}}, "a: has neither path nor BinaryName"),
        ("runtimes", {"a": {"path": "b/c"}}, "'a=b/c': must be NAME=PATH [ARGUMENTS], with an absolute path"),
        ("runtimes", {"a": {"path": "/b", "runtimeType": "io.containerd.runc.v2"}}, "a: has runtimeType, so path"),
        ("runtimes", {"a": {"runtimeType": "io.containerd.kata.v2"}}, "a: runtimeType io.containerd.kata.v2: only"),
        ("runtimes", {"a": {"path": "/b", "options": {"Root": "/x"}}}, "a: the option Root is not supported"),
        ("exec-opts", ["native.cgroupdriver=other"], "'native.cgroupdriver=other': must be native.cgroupdriver="),
        ("cgroup-parent", "a\nb", "'a\\nb': must not contain a NUL character or a line break"),
        ("cgroup-parent", "x" * 3901, f"'{'x' * 100}' has 3901 bytes of at most 3900"),
        ("default-ipc-mode", "host", "'host': must be one of private, shareable"),
        ("seccomp-profile", "/dev/null/x", "/dev/null/x: not a directory"),
        ("swarm-default-advertise-addr", "::", "'::': must be an IP address or a network interface"),
        ("no such key", 1, "is not known"),
    ],
)
def test_refused_values(tmp_path: Path, key: str, given: Any, words: str) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({key: given}))
    with pytest.raises(FileError) as caught:
        parse({}, str(file))
    assert str(caught.value).startswith(f"--config {file}: {key}{words if words.startswith(':') else f' {words}'}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Decoding seccomp profile failed: "),
        ("", "Decoding seccomp profile failed: "),
        ("[]", "Decoding seccomp profile failed: "),
        ('{"syscalls": []}', "Decoding seccomp profile failed: "),
        ("[" * 5000, "Decoding seccomp profile failed: "),
        ('{"defaultAction": "SCMP_ACT_NONE"}', "invalid seccomp profile: unknown or unsupported action"),
        ('{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["X"]}', "invalid seccomp profile: unknown flag 'X'"),
        (
            '{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"action": "SCMP_ACT_LOG"}]}',
            "invalid seccomp profile: a rule",
        ),
    ],
)
def test_a_seccomp_profile_is_checked_with_the_configuration(tmp_path: Path, text: str, words: str) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "daemon.json"
    profile.write_text(text)
    file.write_text(json.dumps({"seccomp-profile": str(profile)}))
    with pytest.raises(FileError) as caught:
        parse({}, str(file))
    said = str(caught.value)
    assert said.startswith(f"--config {file}: seccomp-profile {profile}: {words}") and "\n" not in said
    profile.write_bytes(b'{"defaultAction": "SCMP_ACT_ALLOW\xff"}')
    with pytest.raises(FileError, match=r"seccomp-profile .*: Decoding seccomp profile failed: it is not UTF-8"):
        parse({}, str(file))

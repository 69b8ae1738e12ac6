"""Patterns of `.dockerignore` and of COPY: a table, and comparisons with other implementations."""

from __future__ import annotations

import fnmatch
import itertools

import pytest
from docker.utils.build import PatternMatcher
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.builder import ignore
from engine.builder.ignore import Patterns, glob, has_wildcards
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    ("patterns", "excluded", "included"),
    [
        # from the tests of moby/patternmatcher
        (["**"], ["file", "file/", "dir/file"], [""]),
        (["**/"], ["file", "dir/file"], []),
        (["**", "!**"], [], ["dir/file"]),
        (["**/**"], ["dir/file", "dir/file2", "file"], []),
        (["dir/**"], ["dir/file", "dir/dir2/file"], ["dir", "di", "dirs/file"]),
        (["**/dir"], ["dir", "dir/file", "a/dir", "a/dir/x"], ["dirs", "a/xdir"]),
        (["**/dir2/*"], ["dir/dir2/file", "dir/dir2/dir2/file"], ["dir/dir2"]),
        (["**/file"], ["dir/file", "dir/dir/file", "file"], ["dir/xfile"]),
        (["**/file*"], ["dir/file", "dir/dir/file", "dir/dir/file.txt"], ["dir/xfile"]),
        (["**/file*txt"], ["dir/dir/file.txt"], ["dir/dir/file.tx"]),
        (["**/file*.txt*"], ["dir/dir/file.txt", "dir/dir/file.txtx"], []),
        (["**/**/*.txt"], ["dir/dir/file.txt", "file.txt"], ["file.md"]),
        (["**/**/*.txt2"], [], ["dir/dir/file.txt"]),
        (["**/*.txt"], ["file.txt", "a/file.txt"], ["txt"]),
        (["**/.foo"], ["a/b/.foo", ".foo"], ["a.foo", "b.foo/x"]),
        (["a**/*.txt"], ["a/file.txt", "a/dir/file.txt"], ["b/file.txt"]),
        (["a/*.txt"], ["a/file.txt"], ["a/dir/file.txt"]),
        (["a/*/b"], ["a/x/b", "a/x/b/c"], ["a/b", "a/x/y/b"]),
        (["a[b-d]e"], ["ace"], ["aae", "axe"]),
        (["a[^b-d]e"], ["aze"], ["ace"]),
        (["a\\*b"], ["a*b"], ["axb"]),
        (["abc.def"], ["abc.def"], ["abcXdef"]),
        (["abc?def"], ["abcZdef"], ["abc/def"]),
        (["a+b", "(x)", "{y}", "$z", "|"], ["a+b", "(x)", "{y}", "$z", "|"], ["aab"]),
        (["*"], ["a", "a/b"], []),
        (["*.go", "!main.go"], ["a.go"], ["main.go", "a.py"]),
        (["!main.go", "*.go"], ["main.go"], []),
        (["docs", "!docs/README.md"], ["docs", "docs/a"], ["docs/README.md"]),
        (["docs/*", "!docs/keep", "docs/keep/tmp"], ["docs/a", "docs/keep/tmp/x"], ["docs", "docs/keep/b"]),
        (["/a/./b/", " c ", "d//e", "x/../y"], ["a/b", "c", "d/e", "y"], ["a", "d", "x"]),
        (["."], [], ["a", ""]),
        (["a\nb"], ["a\nb"], ["a"]),
        (["**x"], ["x", "foox", "a/foox"], ["xa"]),
    ],
)
def test_patterns(patterns: list[str], excluded: list[str], included: list[str]) -> None:
    matcher = Patterns(patterns)
    assert [path for path in excluded if not matcher.excluded(path)] == []
    assert [path for path in included if matcher.excluded(path)] == []


def test_file() -> None:
    matcher = Patterns.parse(b"\xef\xbb\xbf# comment\r\n\n  *.o \r\n #odd\n!keep.o\n/top\n\xff*\n")
    for path in ("a.o", "#odd", "top", "top/x", "\udcffy"):
        assert matcher.excluded(path), path
    for path in ("keep.o", "comment", "# comment", "a/top"):
        assert not matcher.excluded(path), path
    assert not Patterns.parse(b"\n# nothing\n")


@pytest.mark.parametrize("pattern", ["[", "a[", "[]", "[]a]", "[-x]", "[x-]", "a\\", "[a\\", "[^", "[a-"])
def test_malformed(pattern: str) -> None:
    with pytest.raises(InvalidParameter, match="syntax error in pattern"):
        glob(pattern)
    with pytest.raises(InvalidParameter, match="syntax error in pattern"):
        Patterns([pattern])


def test_exclusion_of_nothing() -> None:
    with pytest.raises(InvalidParameter, match="Illegal exclusion pattern: !"):
        Patterns(["a", "! "])


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        # from the tests of Go's path/filepath
        ("abc", "abc", True),
        ("*", "abc", True),
        ("*c", "abc", True),
        ("a*", "a", True),
        ("a*", "ab/c", False),
        ("a*b*c*d*e*", "axbxcxdxe", True),
        ("a*b*c*d*e*/f", "axbxcxdxe/f", True),
        ("a*b*c*d*e*/f", "axbxcxdxexxx/fff", False),
        ("a*b?c*x", "abxbbxdbxebxczzx", True),
        ("a*b?c*x", "abxbbxdbxebxczzy", False),
        ("ab[c]", "abc", True),
        ("ab[b-d]", "abc", True),
        ("ab[e-g]", "abc", False),
        ("ab[^c]", "abc", False),
        ("ab[^b-d]", "abc", False),
        ("a\\*b", "a*b", True),
        ("a\\*b", "ab", False),
        ("a?b", "a☺b", True),
        ("a[^a]b", "a☺b", True),
        ("a???b", "a☺b", False),
        ("[a-ζ]*", "α", True),
        ("*[a-ζ]", "A", False),
        ("a?b", "a/b", False),
        ("a*b", "a/b", False),
        ("[\\]a]", "]", True),
        ("[\\-]", "-", True),
        ("[x\\-]", "-", True),
        ("[\\-x]", "a", False),
        ("*x", "xxx", True),
        ("[!a]", "!", True),
        ("**", "a/b", False),
        ("", "", True),
        ("[z-a]", "m", False),
        ("[^z-a]", "m", True),
    ],
)
def test_glob(pattern: str, name: str, matches: bool) -> None:
    assert glob(pattern)(name) is matches


@pytest.mark.parametrize(
    ("source", "wild"),
    [
        ("a*", True),
        ("?", True),
        ("a[b]", True),
        ("a\\*", False),
        ("a\\\\*", True),
        ("a\\[", False),
        ("a]b", False),
        ("", False),
        ("\\", False),
        ("x\\a*", True),
        ("\\?\\*b", False),
    ],
)
def test_has_wildcards(source: str, wild: bool) -> None:
    assert has_wildcards(source) is wild


NAMES = ["".join(name) for size in (1, 2) for name in itertools.product("ab", repeat=size)]
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
PIECES = st.lists(st.sampled_from(["a", "b", "?", "*", "[ab]", "**/", "/", "**"]), min_size=1, max_size=7).map("".join)


@settings(max_examples=600, deadline=None)
@given(PIECES, PATHS)
def test_states_match_as_expressions(pattern: str, path: str) -> None:
    tokens = ignore._tokens(pattern, deep=True)
    assert ignore._by_states(tokens)(path) == ignore._by_expression(tokens)(path)


@settings(max_examples=300, deadline=None)
@given(st.text("ab*?", max_size=6), st.text("ab", max_size=6))
def test_glob_is_fnmatch_in_one_name(pattern: str, name: str) -> None:
    assert glob(pattern)(name) == fnmatch.fnmatchcase(name, pattern)


SIMPLE = st.lists(st.sampled_from(["a", "b", "ab", "*", "a*", "?", "**"]), min_size=1, max_size=3).map("/".join)


def reference(patterns: list[str], path: str) -> bool:
    """`docker.utils.build.PatternMatcher`, asked as its `walk` does it: for the path, and for the
    directories above, which it does not enter unless a later pattern includes something again.
    """
    return bool(PatternMatcher(patterns).matches(path))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIMPLE), min_size=1, max_size=4), PATHS)
def test_patterns_as_docker_py(patterns: list[tuple[bool, str]], path: str) -> None:
    """docker-py looks at one directory above, that with as many parts as the pattern has. So the
    two agree where `**`, which has no fixed number of parts, is left out.
    """
    lines = [("!" if again else "") + text for again, text in patterns if "**" not in text]
    assert Patterns(lines).excluded(path) == reference(lines, path)


@settings(max_examples=500, deadline=None)
@given(st.lists(SIMPLE, min_size=1, max_size=3), PATHS)
def test_double_star_excludes_as_docker_py(patterns: list[str], path: str) -> None:
    """Whatever docker-py excludes by itself or with a directory above it."""
    parts = path.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    assert Patterns(patterns).excluded(path) == any(reference(patterns, each) for each in above)


def test_a_hostile_pattern_ends() -> None:
    """`re` would need years: it would try every combination of the wildcards."""
    assert not glob("**/".join("a*" for _ in range(20)) + "b", deep=True)("a/" * 400 + "a" * 200)
    assert not glob("*a" * 30 + "b")("a" * 250)


def test_many_directories_are_not_kept() -> None:
    matcher = Patterns(["x*"])
    for number in range(10_000):
        assert not matcher.excluded(f"d{number}/e/f")
    assert len(matcher._directories) <= ignore._KEPT
    assert matcher.excluded("d/x") is False and matcher.excluded("x1/y")

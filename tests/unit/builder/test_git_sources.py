"""Which addresses name a Git repository, for `remote=` and for ADD, and what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.git import Source, check_commit, source_of_add, source_of_context, without_password
from engine.builder.remote import is_url
from engine.errors import InvalidParameter

HUB = "https://github.com/moby/buildkit.git"
SHA = "8d7bd2b3f8d3d5c9b1a7b0a0a1b2c3d4e5f60718"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the table of Docker's documentation, "Git repositories"
        ("https://github.com/u/r.git", Source("https://github.com/u/r.git")),
        ("https://github.com/u/r.git#main", Source("https://github.com/u/r.git", "main")),
        ("https://github.com/u/r.git#main:dir", Source("https://github.com/u/r.git", "main", "dir")),
        ("https://github.com/u/r.git#:dir/x", Source("https://github.com/u/r.git", "", "dir/x")),
        ("https://github.com/u/r.git#pull/42/head", Source("https://github.com/u/r.git", "pull/42/head")),
        ("https://github.com/u/r.git#a:b:c", Source("https://github.com/u/r.git", "a", "b:c")),
        ("https://github.com/u/r.git#", Source("https://github.com/u/r.git")),
        ("http://h:8080/r.git#v1.0", Source("http://h:8080/r.git", "v1.0")),
        ("git://h/r", Source("git://h/r")),
        ("git://h/r.git#t:d", Source("git://h/r.git", "t", "d")),
        ("ssh://git@h:22/r.git#t", Source("ssh://git@h:22/r.git", "t")),
        ("git@github.com:u/r.git#main:docker", Source("git@github.com:u/r.git", "main", "docker")),
        ("git@github.com:u/r#%41", Source("git@github.com:u/r", "%41")),
        ("github.com/u/r", Source("https://github.com/u/r")),
        ("github.com/u/r.git#x", Source("https://github.com/u/r.git", "x")),
        # fragments of URLs are escaped
        ("https://h/r.git#a%2Fb:c%20d", Source("https://h/r.git", "a/b", "c d")),
        ("https://u:p%40@h/r.git#x", Source("https://u:p%40@h/r.git", "x")),
        # options in a query
        ("https://h/r.git?ref=v1&subdir=d", Source("https://h/r.git", "v1", "d")),
        ("https://h/r.git?branch=main", Source("https://h/r.git", "refs/heads/main")),
        ("https://h/r.git?tag=v1#:d", Source("https://h/r.git", "refs/tags/v1", "d")),
        (f"https://h/r.git?commit={SHA}", Source("https://h/r.git", SHA, "", SHA)),
        (f"https://h/r.git?tag=v1&checksum={SHA[:8]}", Source("https://h/r.git", "refs/tags/v1", "", SHA[:8])),
        ("https://h/r.git?keep-git-dir=true", Source("https://h/r.git", keep_git_dir=True)),
        # no repositories
        ("https://h/r.git?h=main", None),
        ("https://h/r.git?", None),
        ("https://h/r.git?ref=a&token=b", None),
        ("https://h/rXgit", None),
        ("https://h/r.git/", None),
        ("https://h/r.git.tar.gz", None),
        ("https://h/a.tar#x.gitx", None),
        ("http://h/Dockerfile", None),
        ("ftp://h/r.git", None),
        ("file:///r.git", None),
        ("ext::sh -c x", None),
        ("/r.git", None),
        ("r.git", None),
        ("", None),
        ("-", None),
        ("client-session", None),
    ],
)
def test_contexts(text: str, expected: Source | None) -> None:
    assert source_of_context(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HUB}#v0.10.1", Source(HUB, "v0.10.1")),
        ("git@git.example.com:foo/bar.git", Source("git@git.example.com:foo/bar.git")),
        ("me@h:r", Source("me@h:r")),
        ("me@h:/r#x", Source("me@h:/r", "x")),
        ("-me@h:r", None),
        ("me@-h:r", None),
        ("ssh://h/r", Source("ssh://h/r")),
        ("git://h/r", Source("git://h/r")),
        ("github.com/u/r", None),  # a path of the context
        ("https://github.com/u/r", None),
        ("a@b", None),
        ("a@b://c", None),
        ("file.git", None),
        ("h:r.git", None),
    ],
)
def test_sources_of_add(text: str, expected: Source | None) -> None:
    assert source_of_add(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("https://h/r.git#--upload-pack=x", "invalid refspec: --upload-pack=x"),
        ("git@h:r.git#-x:d", "invalid refspec: -x"),
        ("https://h/r.git#%2Dx", "invalid refspec: -x"),
        ("https://h/r.git?ref=-x", "invalid refspec: -x"),
        ("https://h/r.git#a%0Ab", "invalid refspec"),
        ("https://h/r.git#a:%00", "invalid refspec"),
        ("git@h:r x.git", "invalid address"),
        ("git://h/r\n", "invalid address"),
        ("git@-oProxyCommand=x:r", "invalid address"),
        ("git@h", "invalid address"),
        ("git:///r", "invalid address"),
        ("git://h:x/r", "invalid address"),
        ("git://[::1/r", "invalid address"),
        ("https:///r.git", "invalid address"),
        ("https://h/r.git?ref=a&ref=b", "conflicting values of ref"),
        ("https://h/r.git?ref=a&tag=b", "conflicting refs"),
        ("https://h/r.git?ref=a#b", "conflicting refs"),
        ("https://h/r.git?subdir=a#:b", "conflicting values of subdir"),
        ("https://h/r.git?commit=xyz", "invalid checksum"),
        ("https://h/r.git?keep-git-dir=x", "invalid keep-git-dir"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        source_of_context(text)
    assert words in caught.value.message


def test_no_password_is_shown() -> None:
    shown = without_password("fatal: 'https://me:secret@h/r' and http://token@h/x?a=b@c, not a@b")
    assert shown == "fatal: 'https://xxxxx@h/r' and http://xxxxx@h/x?a=b@c, not a@b"
    with pytest.raises(InvalidParameter) as caught:
        source_of_context("https://me:secret@:0/r.git")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("text", ["abcdef", "g" * 40, SHA.upper(), "", f"sha256:{SHA}", "a" * 65, SHA + "\n"])
def test_bad_commits(text: str) -> None:
    with pytest.raises(InvalidParameter, match="invalid checksum"):
        check_commit(text)


# Texts that look like addresses, more often than random ones.
PARTS = st.sampled_from(
    [
        *("http://", "https://", "git://", "ssh://", "git@", "github.com/", "file://", "ext::", "me@", "h", ":", "/"),
        *("r", ".git", "#", "?", "ref=", "tag=", "commit=", "subdir=", "&", "-", "--", "..", "%", "%2D", "%00", "@"),
        *("[", "]", "::1", ":0", ":99999", " ", "\n", "\0", "\x7f", "ü", "\udc80", "\\", "+", "*"),
    ]
)
ADDRESSES = st.one_of(st.text(), st.lists(PARTS, max_size=12).map("".join))


@given(ADDRESSES, st.sampled_from([source_of_context, source_of_add]))
def test_any_text(text: str, source_of: Callable[[str], Source | None]) -> None:
    """Whatever is accepted cannot be taken for an option or another protocol by git."""
    try:
        found = source_of(text)
    except InvalidParameter as error:
        assert len(error.message) <= 300
        return
    if found is None:
        return
    assert not found.ref.startswith("-")
    assert not any(ord(letter) <= 32 or ord(letter) == 127 for letter in found.url + found.ref)
    assert "\0" not in found.subdirectory
    assert "#" not in found.url
    host = found.url.partition("://")[2] or found.url.partition("@")[2]
    assert host
    assert found.url.startswith(("http://", "https://", "git://", "ssh://")) or "@" in found.url
    assert "::" not in found.url.partition("//")[0].partition("@")[0]  # `ext::` is another program


@given(ADDRESSES)
def test_every_source_of_add_is_a_context(text: str) -> None:
    """A context may be named in one more form."""
    try:
        found = source_of_add(text)
    except InvalidParameter:
        with pytest.raises(InvalidParameter):
            source_of_context(text)
        return
    if found is not None:
        assert source_of_context(text) == found


@given(ADDRESSES)
def test_any_url(text: str) -> None:
    if is_url(text):
        assert text.startswith(("http://", "https://"))
        assert not any(letter.isspace() for letter in text)

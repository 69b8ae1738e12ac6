"""Checkouts of Git repositories: build contexts, and sources of ADD.

git(1) runs for this, sealed off (system/sealed.py), with an empty home and an environment of its
own. A repository may be hostile: no hook or filter runs, only the protocols http, https, git and
ssh are allowed, also for submodules, and a checkout is limited in time and size. The user name and
password of a URL are passed by a credential file. So they are in no argument list, message or
`.git` directory.

Owns:    the directory of a checkout, until the end of `checkout`.
Threads: the loop's; git runs in a thread, which lives as long as git does.
Raises:  InvalidParameter for a bad source, ServerError with git's words.
Not here: contexts that are no repositories (remote.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import re
import secrets
import shutil
import stat
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from engine._fast import tree
from engine.builder.buildkit.session import Sessions
from engine.errors import (
    EngineError,
    InvalidParameter,
    NotFound,
    ServerError,
    Unimplemented,
    reason,
    reason_with_file,
)
from engine.system import files, sealed
from engine.system.tasks import shield
from engine.system.threads import in_own_thread, uninterrupted

# --- sources --------------------------------------------------------------------------------------

_SCHEMES = ("git://", "ssh://")
_WEB = ("http://", "https://")
_HUB = "github.com/"
_SUFFIX = re.compile(r"\.git(?:\?(?P<query>[^#]*))?(?:#.*)?\Z")
"""The end of an http URL that names a repository."""
_USER_AND_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9.-]*:(?!//)\S")
"""The address that scp(1) and git use for ssh."""
_OPTIONS = frozenset(("ref", "branch", "tag", "commit", "checksum", "subdir", "keep-git-dir"))
"""Query parameters of a repository's URL (docs.docker.com, "Git repositories", URL queries)."""
_COMMIT = re.compile(r"[0-9a-f]{7,64}\Z")
_CONTROL = re.compile(r"[\x00-\x20\x7f]")


class Source(NamedTuple):
    """A place in a repository."""

    url: str
    ref: str = ""
    """A branch, tag, other ref or commit. Empty: the default branch."""
    subdirectory: str = ""
    commit: str = ""
    """The id, or its beginning, that the commit must have. Empty: any."""
    keep_git_dir: bool = False


def source_of_context(text: str) -> Source | None:
    """The repository that `remote=` names, in any of Docker's forms. None if it names none.

    Raises InvalidParameter for a ref or option that is not allowed.
    """
    if text.startswith(_HUB):
        return _source(f"https://{text}")
    if text.startswith("git@"):  # whatever follows
        return _source(text)
    return source_of_add(text)


def source_of_add(text: str) -> Source | None:
    """The repository that a source of ADD names. None if it names none: `github.com/x` may be a
    path there.

    Raises as `source_of_context`.
    """
    if text.startswith(_SCHEMES) or _USER_AND_HOST.match(text) or (text.startswith(_WEB) and _is_repository(text)):
        return _source(text)
    return None


def _is_repository(url: str) -> bool:
    """True for an http URL whose path ends with `.git`, and whose query, if any, has the options of
    a repository.
    """
    found = _SUFFIX.search(url)
    if found is None:
        return False
    names = {name for name, _ in urllib.parse.parse_qsl(found["query"] or "", keep_blank_values=True)}
    return bool(names) <= bool(found["query"]) and names <= _OPTIONS and (found["query"] is None or bool(names))


def _source(text: str) -> Source:
    """The parts of a repository's address."""
    if _CONTROL.search(text):
        raise InvalidParameter(f"invalid address of a Git repository: {text!r}"[:300])
    address, _, fragment = text.partition("#")
    web = not _USER_AND_HOST.match(address)
    if web:
        fragment = urllib.parse.unquote(fragment, errors="surrogateescape")
    ref, _, subdirectory = fragment.partition(":")
    source = Source(address, ref, subdirectory)
    if web:
        address, mark, query = address.partition("?")
        if mark and text.startswith(_WEB):
            source = _with_options(source._replace(url=address), query)
        try:
            parts = urllib.parse.urlsplit(source.url)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port, or the brackets of an IPv6 address
            valid = False
        if not valid:
            raise InvalidParameter(f"invalid address of a Git repository: {without_password(text)}"[:300])
    if source.ref.startswith("-"):
        raise InvalidParameter(f"invalid refspec: {source.ref}"[:300])
    if "\0" in source.ref + source.subdirectory or _CONTROL.search(source.ref):
        raise InvalidParameter(f"invalid refspec: {source.ref!r}"[:300])
    return source


def _with_options(source: Source, query: str) -> Source:
    """`source` with the options of a URL's query."""
    options: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if options.setdefault(name, value) != value:
            raise InvalidParameter(f"{without_password(source.url)}: conflicting values of {name}"[:300])
    refs = [source.ref] if source.ref else []
    refs += [options["ref"]] if options.get("ref") else []
    refs += [f"refs/heads/{options['branch']}"] if options.get("branch") else []
    refs += [f"refs/tags/{options['tag']}"] if options.get("tag") else []
    commit = options.get("checksum") or options.get("commit") or ""
    subdirectory = options.get("subdir") or ""
    if len(set(refs)) > 1:
        raise InvalidParameter(f"{without_password(source.url)}: conflicting refs: {', '.join(refs)}"[:300])
    if source.subdirectory and subdirectory not in ("", source.subdirectory):
        raise InvalidParameter(f"{without_password(source.url)}: conflicting values of subdir"[:300])
    keep = options.get("keep-git-dir", "0").lower()
    if keep not in ("", "0", "1", "true", "false"):
        raise InvalidParameter(f"{without_password(source.url)}: invalid keep-git-dir value: {keep}"[:300])
    return source._replace(
        ref=refs[0] if refs else commit,
        subdirectory=source.subdirectory or subdirectory,
        commit=check_commit(commit) if commit else "",
        keep_git_dir=keep in ("", "1", "true"),
    )


def check_commit(checksum: str) -> str:
    """The `--checksum` of a repository: a commit's id, or at least seven digits of its beginning.

    Raises InvalidParameter.
    """
    if not _COMMIT.match(checksum):
        raise InvalidParameter(f"invalid checksum {checksum[:200]} for Git URL, expected hex commit hash")
    return checksum


def without_password(text: str) -> str:
    """An address, or text with addresses, without user names and passwords."""
    return re.sub(r"(?<=://)[^/@\s]*@", "xxxxx@", text)


# --- checkouts ------------------------------------------------------------------------------------


class Checkout(NamedTuple):
    """The files of a commit."""

    root: int
    """A descriptor of the directory with the files; open until the end of `checkout`."""
    commit: str


class Limits(NamedTuple):
    """Limits of one checkout."""

    seconds: float = 1800
    size: int = 16 << 30
    """Bytes on disk, with those in git's own directory."""
    entries: int = 4_000_000


LIMITS = Limits()


@contextlib.asynccontextmanager
async def checkout(
    source: Source, directory: Path, *, agent: Path | None = None, limits: Limits = LIMITS
) -> AsyncIterator[Checkout]:
    """Fetch a repository into a new directory below `directory`, which exists for the time of the
    context.

    `agent`: socket of an ssh-agent that `sealed.USER` may open, on the same file system. A
    cancellation ends git at once.
    """
    if source.commit:
        check_commit(source.commit)
    place = directory / f"git-{secrets.token_hex(8)}"
    stop = sealed.Stop()
    try:
        work = _Work(source, place, stop, agent, limits)
        fetching = in_own_thread(work.run)
        try:
            fetched = await shield(fetching)
        except asyncio.CancelledError:
            stop.set()
            with contextlib.suppress(EngineError):
                await uninterrupted(_discarded(fetching))
            raise
        try:
            yield fetched
        finally:
            os.close(fetched.root)
    finally:
        stop.close()
        await uninterrupted(asyncio.to_thread(files.remove_tree, place))


async def agent_of(
    source: Source, sessions: Sessions, session_id: str, directory: Path, borrowed: contextlib.AsyncExitStack
) -> Path | None:
    """The `agent` of `checkout` for a repository that is reached by ssh: the one that the client of
    a session forwards. None if there is none.

    The socket is in a new directory below `directory`, and goes with `borrowed`. Raises NotFound
    for an unknown session.
    """
    if not session_id or source.url.startswith(("git://", *_WEB)):
        return None
    session = await sessions.find(session_id)
    agent = session.ssh("", str(directory), uid=sealed.USER, gid=sealed.GROUP)
    try:
        return Path(await borrowed.enter_async_context(agent))
    except (NotFound, Unimplemented):
        return None


async def _discarded(fetching: asyncio.Future[Checkout]) -> None:
    """Wait for the end of a checkout that is not wanted any more."""
    os.close((await fetching).root)


_CONFIG = f"""\
[protocol]
    allow = never
[protocol "http"]
    allow = always
[protocol "https"]
    allow = always
[protocol "git"]
    allow = always
[protocol "ssh"]
    allow = always
[core]
    hooksPath = /dev/null
    attributesFile = /dev/null
    excludesFile = /dev/null
    fsmonitor = false
    packedGitLimit = 512m
[credential]
    helper = store --file={sealed.PLACE}/home/credentials
[http]
    lowSpeedLimit = 1
    lowSpeedTime = 60
[init]
    defaultBranch = master
[fetch]
    recurseSubmodules = false
[gc]
    auto = 0
[maintenance]
    auto = false
[advice]
    detachedHead = false
[checkout]
    workers = 1
"""
"""The configuration of git, which its processes cannot change. GIT_ALLOW_PROTOCOL, in the
environment, has the protocols too.
"""
_NO_PROXY = "localhost,127.0.0.1,::1"
"""As for Go programs, this host itself is reached without a proxy."""
_SSH = (
    "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=30"
    f" -o UserKnownHostsFile={sealed.PLACE}/temporary/known_hosts"
)
"""Host keys of /etc/ssh/ssh_known_hosts must match; others are accepted, as BuildKit does."""

_NAME = re.compile(r"[^\s~^:?*\[\\+@-][^\s~^:?*\[\\]*\Z")
"""What may be the name of a ref. Other revisions (`main~2`) are resolved in a complete clone."""
_SHORT = re.compile(r"[0-9a-f]{4,64}\Z")
_OBJECT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_SHOWN = 1000
"""Most characters of git's words in an error."""
_MISSING = ("couldn't find remote ref", "not our ref", "unadvertised object", "no such remote ref")
"""git's words when a server does not give a commit by its id: the id is short, or the server gives
only what refs name.
"""
_OTHER_HASH = "mismatched algorithms"
_NOT_SHALLOW = "does not support shallow"
"""git's words about a dumb http server."""
_FETCHED = re.compile(r"(?P<id>[0-9a-f]{40,64})\t[^\t]*\t(?:(?P<kind>branch|tag) '(?P<name>[^']+)')?")
"""A line of .git/FETCH_HEAD."""


class _Work:
    """The work of the thread.

    The directory belongs to root. git may write to two directories in it: `repository`, and
    `temporary`.
    """

    def __init__(self, source: Source, place: Path, stop: sealed.Stop, agent: Path | None, limits: Limits) -> None:
        self._source = source
        self._place = place
        self._stop = stop
        self._agent = agent
        self._limits = limits
        self._until = time.monotonic() + limits.seconds
        self._git = ""
        self._address = ""
        self._environment: dict[str, str] = {}
        self._complete = False
        """True when histories were fetched too."""
        self._found = False
        """True when `_find` was needed: FETCH_HEAD has all branches."""

    def run(self) -> Checkout:
        try:
            root = self._prepare()
            try:
                self._begin()
                try:
                    commit = self._fetch()
                except _Failed as failure:
                    if _OTHER_HASH not in failure.words:
                        raise
                    files.remove_tree(self._place / "repository" / ".git")
                    self._complete = self._found = False
                    self._begin("--object-format=sha256")
                    commit = self._fetch()
                self._run("checkout", "--quiet", *self._branch(root, commit))
                if _is_file(root, ".gitmodules"):
                    self._submodules(root)
                self._watch()
                self._tidy(root)
                return Checkout(self._inner(root), commit)
            finally:
                os.close(root)
        except sealed.Stopped:
            raise ServerError("Error trying to use git: the build was cancelled") from None
        except TimeoutError:
            raise ServerError(f"Error trying to use git: no end within {self._limits.seconds:g} s") from None
        except OSError as error:
            raise ServerError(f"Error trying to use git: {reason_with_file(error)}") from error

    def _prepare(self) -> int:
        """Make the directory. Returns a descriptor of `repository`, which the caller closes."""
        git = shutil.which("git", path=sealed.PATH)
        if git is None:
            raise ServerError('Error trying to use git: exec: "git": executable file not found in $PATH')
        self._git = git
        home = self._place / "home"
        for directory in (self._place, home):
            directory.mkdir(mode=0o700)
            directory.chmod(0o755)
        for name in ("repository", "temporary"):
            directory = self._place / name
            directory.mkdir(mode=0o700)
            directory.chmod(0o755)
            os.chown(directory, sealed.USER, sealed.GROUP)
        (home / "config").write_text(_CONFIG)
        (home / "credentials").touch(mode=0o600)
        self._address, credentials = _split(self._source.url)
        (home / "credentials").write_text(credentials)
        for name, mode in (("config", 0o444), ("credentials", 0o440)):
            os.chown(home / name, 0, sealed.GROUP)
            (home / name).chmod(mode)
        self._environment = {
            "PATH": sealed.PATH,
            "HOME": f"{sealed.PLACE}/home",
            "TMPDIR": f"{sealed.PLACE}/temporary",
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": f"{sealed.PLACE}/home/config",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "http:https:git:ssh",
            "GIT_SSH_COMMAND": _SSH,
        }
        proxies = urllib.request.getproxies()
        self._environment |= {f"{kind}_proxy": proxies[kind] for kind in ("http", "https", "all") if kind in proxies}
        self._environment["no_proxy"] = ",".join(filter(None, (_NO_PROXY, proxies.get("no"))))
        if self._agent is not None:
            os.link(self._agent, home / "agent")
            self._environment["SSH_AUTH_SOCK"] = f"{sealed.PLACE}/home/agent"
        return files.open_directory(self._place / "repository")

    # --- git --------------------------------------------------------------------------------------

    def _run(self, *words: str) -> str:
        """The output of a git command. Raises ServerError when it fails."""
        ended = sealed.run(
            (self._git, "-C", "repository", *words),
            self._environment,
            self._place,
            self._stop,
            until=self._until,
            largest=self._limits.size,
            watch=self._watch,
        )
        if ended.status:
            raise _Failed(ended)
        return ended.stdout.decode(errors="replace")

    def _watch(self) -> None:
        """Raises ServerError when the checkout is larger than it may be."""
        descriptor = files.open_directory(self._place)
        try:
            size, entries = tree.usage(descriptor)
        finally:
            os.close(descriptor)
        if size > self._limits.size:
            raise ServerError(f"Error trying to use git: the repository takes more than {self._limits.size} bytes")
        if entries > self._limits.entries:
            raise ServerError(f"Error trying to use git: the repository has more than {self._limits.entries} files")

    def _begin(self, *how: str) -> None:
        """Make an empty repository."""
        self._run("init", "--quiet", *how, "--template=", ".")
        self._run("remote", "add", "--", "origin", self._address)

    def _fetch(self) -> str:
        """Fetch the wanted commit; returns its id."""
        ref = "HEAD" if self._source.ref in ("", "@") else self._source.ref
        commit = self._resolved("FETCH_HEAD") if self._fetch_one(ref) else self._find(ref)
        wanted = self._source.commit
        if wanted and not commit.startswith(wanted):
            # The id of an annotated tag, which is an object of its own, will do too.
            found = "" if self._found else self._run("rev-parse", "--verify", "--quiet", "FETCH_HEAD")
            if not found.startswith(wanted):
                raise InvalidParameter(f"expected checksum to match {wanted}, got {commit}")
        return commit

    def _fetch_one(self, ref: str) -> bool:
        """Fetch one ref or commit, without its history if the server can do that. Returns False if
        only a complete clone can show what `ref` is.
        """
        if not _NAME.match(ref):
            return False
        fetch = ("fetch", "--quiet", "--no-tags")
        try:
            try:
                self._run(*fetch, "--depth=1", "--", "origin", ref)
            except _Failed as failure:
                if _NOT_SHALLOW not in failure.words:
                    raise
                self._complete = True
                self._run(*fetch, "--", "origin", ref)
        except _Failed as failure:
            if _SHORT.match(ref) and any(words in failure.words for words in _MISSING):
                return False
            raise
        return True

    def _find(self, revision: str) -> str:
        """The commit of a revision, after fetching all branches and tags."""
        self._complete = self._found = True
        self._run("fetch", "--quiet", "--tags", "--", "origin")
        with contextlib.suppress(_Failed):  # for revisions that begin at the default branch
            self._run("remote", "set-head", "--auto", "--", "origin")
        for name in (f"refs/remotes/origin/{revision}", f"refs/tags/{revision}", revision):
            with contextlib.suppress(_Failed):
                return self._resolved(name)
        raise ServerError(f"Error trying to use git: couldn't find remote ref {self._source.ref}"[:_SHOWN])

    def _resolved(self, name: str) -> str:
        """The id of the commit that a revision names."""
        commit = self._run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
        if not _OBJECT.match(commit):
            raise ServerError(f"Error trying to use git: {name} is not a commit"[:_SHOWN])
        return commit

    def _branch(self, root: int, commit: str) -> tuple[str, ...]:
        """Arguments of `git checkout`.

        If `.git` is kept, HEAD is the branch, or a tag has its ref.
        """
        if self._source.keep_git_dir and not self._found:
            found = _FETCHED.match(_text(root, ".git/FETCH_HEAD"))
            if found is not None and found["name"] and self._source.ref in (found["name"], *_names(found)):
                if found["kind"] == "branch":
                    return ("-B", found["name"], commit)
                self._run("update-ref", f"refs/tags/{found['name']}", found["id"])
        return ("--detach", commit)

    def _submodules(self, root: int) -> None:
        """Check out the submodules, and theirs."""
        update = ("submodule", "--quiet", "update", "--init", "--recursive")
        if not self._complete:
            try:
                self._run(*update, "--depth=1")
                return
            except _Failed:  # a dumb server, or a commit that no ref names
                self._run("submodule", "--quiet", "deinit", "--force", "--all")
                _remove(root, ".git", "modules")
        self._run(*update)

    # --- the result -------------------------------------------------------------------------------

    def _tidy(self, root: int) -> None:
        """Remove the `.git` directories, or of the kept one what depends on the time."""
        if self._source.keep_git_dir:
            for name in ("FETCH_HEAD", "ORIG_HEAD", "logs"):
                _remove(root, ".git", name)
            return
        _remove(root, "", ".git")
        if _is_file(root, ".gitmodules"):
            waiting = [""]
            while waiting:
                waiting += _without_git(root, waiting.pop())

    def _inner(self, root: int) -> int:
        """A descriptor of the wanted directory."""
        named = self._source.subdirectory
        path = posixpath.normpath(named.lstrip("/")) if named.strip("/") else "."
        if path.split("/")[0] == "..":
            raise InvalidParameter(f'Error setting git context, "{named}" not within git root')
        try:
            return files.open_in_root(root, path, os.O_RDONLY | os.O_DIRECTORY)
        except NotADirectoryError:
            raise InvalidParameter(f"Error setting git context, not a directory: {named}") from None
        except OSError as error:
            raise InvalidParameter(f"Error setting git context, {named}: {reason(error)}") from error


class _Failed(ServerError):
    """git ended with an error."""

    def __init__(self, ended: sealed.Ended) -> None:
        lines = without_password(ended.stderr.decode(errors="replace")).splitlines()
        text = "; ".join(line.strip() for line in lines if line.strip() and not line.startswith("hint:"))
        self.words = "".join(letter if letter.isprintable() else "?" for letter in text)
        how = f"exit status {ended.status}" if ended.status > 0 else f"signal {-ended.status}"
        super().__init__(f"Error trying to use git: {how} ({self.words[-_SHOWN:]})")


def _split(url: str) -> tuple[str, str]:
    """An http URL without its user name and password, and the line that `git credential-store`
    reads them from.
    """
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    if not at or scheme not in ("http", "https"):
        return url, ""
    user, _, password = user.partition(":")
    return f"{scheme}{mark}{host}{slash}{path}", f"{scheme}{mark}{user}:{password}@{host}\n"


def _names(found: re.Match[str]) -> tuple[str, ...]:
    """The other names of a branch or tag."""
    kind = "heads" if found["kind"] == "branch" else "tags"
    return (f"refs/{kind}/{found['name']}", f"{kind}/{found['name']}")


def _is_file(root: int, path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, dir_fd=root, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _text(root: int, path: str) -> str:
    descriptor = files.open_without_links(root, path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


def _remove(root: int, directory: str, name: str) -> None:
    """Remove a file or tree in a directory below `root`, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        parent = files.open_without_links(root, directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            tree.remove_tree(parent, os.fsencode(name))
        finally:
            os.close(parent)


def _without_git(root: int, path: str) -> list[str]:
    """Remove `.git` in one directory; returns the directories in it."""
    descriptor = files.open_without_links(root, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found: list[str] = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if entry.name == ".git":
                    tree.remove_tree(descriptor, b".git")
                elif entry.is_dir(follow_symlinks=False):
                    found.append(posixpath.join(path, entry.name))
        return found
    finally:
        os.close(descriptor)


__all__ = [
    "LIMITS",
    "Checkout",
    "Limits",
    "Source",
    "agent_of",
    "check_commit",
    "checkout",
    "source_of_add",
    "source_of_context",
    "without_password",
]

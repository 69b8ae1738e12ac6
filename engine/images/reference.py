"""Names of images: Docker's grammar, its short forms, and back.

A reference is a repository in a registry and a tag, a digest, or both. The engine uses the
canonical form (`docker.io/library/busybox:latest`), clients see the familiar one
(`busybox:latest`). Grammar and messages: github.com/distribution/reference, `reference.go` and
`normalize.go`. Pure. Not here: which image a reference stands for (store.py).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.errors import InvalidParameter

DEFAULT_DOMAIN = "docker.io"
DEFAULT_TAG = "latest"

_LONGEST_NAME = 255

_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_DOMAIN_COMPONENT = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = rf"(?:{_DOMAIN_COMPONENT}(?:\.{_DOMAIN_COMPONENT})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}"

_WHOLE = re.compile(rf"(?:({_DOMAIN})/)?({_COMPONENT}(?:/{_COMPONENT})*)(?::({_TAG}))?(?:@({_DIGEST}))?")
_TAG_ALONE = re.compile(_TAG)
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_IDENTIFIER = re.compile(r"[0-9a-f]{64}")

MALFORMED = "invalid reference format"


class Reference(NamedTuple):
    """A parsed name; `tag` and `digest` are empty when not given."""

    domain: str
    path: str
    tag: str = ""
    digest: str = ""

    @property
    def repository(self) -> str:
        """The canonical name without tag and digest."""
        return f"{self.domain}/{self.path}"

    @property
    def familiar_repository(self) -> str:
        """`repository` in its familiar form."""
        if self.domain != DEFAULT_DOMAIN:
            return self.repository
        first, _, rest = self.path.partition("/")
        # 64 hexadecimal digits alone would be taken for an image's id.
        if first == "library" and "/" not in rest and not _IDENTIFIER.fullmatch(rest):
            return rest
        # A name such as `localhost/x`, `a.b/x` or `docker.io/x` would be parsed as a registry's.
        return self.path if split(self.path) == (DEFAULT_DOMAIN, self.path) else self.repository

    def _with(self, repository: str) -> str:
        return repository + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def canonical(self) -> str:
        return self._with(self.repository)

    @property
    def familiar(self) -> str:
        return self._with(self.familiar_repository)

    def tagged(self) -> Reference:
        """With the default tag, when it has neither tag nor digest. A digest makes the tag
        meaningless: it may have moved to another image since.
        """
        if self.digest:
            return self._replace(tag="")
        return self if self.tag else self._replace(tag=DEFAULT_TAG)


def split(text: str) -> tuple[str, str]:
    """Domain and rest, by Docker's rule: the first part is a domain when it looks like a host."""
    first, slash, rest = text.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost" or first.lower() != first):
        domain, rest = DEFAULT_DOMAIN, text
    else:
        domain = DEFAULT_DOMAIN if first == "index.docker.io" else first
    if domain == DEFAULT_DOMAIN and "/" not in rest:
        rest = f"library/{rest}"
    return domain, rest


def parse(text: str) -> Reference:
    """Parses `text`, with short forms expanded. Raises InvalidParameter with Docker's words."""
    if _IDENTIFIER.fullmatch(text):
        raise InvalidParameter(f"invalid repository name ({text}), cannot specify 64-byte hexadecimal strings")
    domain, rest = split(text)
    name = rest.partition("@")[0].partition(":")[0]
    if name.lower() != name:
        raise InvalidParameter(f"{MALFORMED}: repository name must be lowercase: {text[:300]!r}")
    match = _WHOLE.fullmatch(f"{domain}/{rest}")
    if match is None or match[1] != domain:
        raise InvalidParameter(f"{MALFORMED}: {text[:300]!r}")
    _, path, tag, digest = match.groups("")
    if len(domain) + 1 + len(path) > _LONGEST_NAME:
        raise InvalidParameter(f"repository name must not be more than {_LONGEST_NAME} characters: {text[:300]!r}")
    if digest and not _SHA256.fullmatch(digest):
        known = digest.startswith("sha256:")
        reason = "invalid checksum digest length" if known else "unsupported digest algorithm"
        raise InvalidParameter(f"{reason}: {digest[:300]}")
    return Reference(domain, path, tag, digest)


def with_tag(repository: str, tag: str) -> Reference:
    """The reference for a tag operation.

    An empty `tag` means that of `repository`, or the default. Raises InvalidParameter.
    """
    found = parse(repository)
    if found.familiar_repository == "sha256":
        raise InvalidParameter(f"refusing to create an ambiguous tag using digest algorithm as name: {repository}")
    if found.digest:
        raise InvalidParameter(f"refusing to create a tag with a digest reference: {repository}")
    if tag:
        if not _TAG_ALONE.fullmatch(tag):
            raise InvalidParameter(f"invalid tag format: {tag[:300]!r}")
        found = found._replace(tag=tag)
    return found.tagged()


def read(canonical: str) -> Reference:
    """Parses the result of `canonical`, as stored in the engine's records."""
    match = _WHOLE.fullmatch(canonical)
    if match is None or not match[1]:
        raise InvalidParameter(f"{MALFORMED}: {canonical}")
    return Reference(*match.groups(""))

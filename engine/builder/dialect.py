"""The two dialects of Dockerfiles. The same file means other things to Docker's classic builder
(`POST /build`) than to BuildKit (`POST /grpc`), and images of both are in use.

The protocol by which a client asks decides, in `Options.dialect`. What differs is named here, and
each difference is asked for where it matters. Pure.
"""

from __future__ import annotations

import msgspec


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What an instruction means, where the builders differ."""

    empty_wildcards: bool
    """COPY and ADD of wildcards that match nothing copy nothing. Otherwise that is an error, and a
    malformed pattern is one that matches nothing.
    """
    rooted_sources: bool
    """A source that leads above its tree begins at the tree's root. Otherwise it is refused."""
    keeps_kinds: bool
    """COPY refuses to replace a directory by a file or a link, and to replace those by a
    directory.
    """
    keeps_times: bool
    """A directory into which COPY puts the files of another one gets the time of that one."""
    owns_members: bool
    """--chown of ADD holds for the members of archives."""
    merges_sources: bool
    """Several sources need no slash after the destination, as if each had a line of its own: they
    go into a directory if it exists or the first source is one, and else the last one stays.
    """
    users_workdir: bool
    """Directories that WORKDIR makes belong to USER, not to root. Its path is cleaned. A file in
    its way is named with the system call that meets it.
    """
    lenient_owners: bool
    """Names in --chown that the image does not list mean root. Otherwise they are refused."""
    keeps_volumes: bool
    """What RUN writes below a VOLUME is a part of the image."""
    ordered_variables: bool
    """ARG and ENV set the same variables, one name after the other. So an ARG overrides an ENV
    before it, sees the names before it in its own line, and keeps the value of a name that it gives
    none; a stage that begins with another one has its variables. A default is not read where the
    client gives a value. Otherwise ENV overrides every ARG, and names before `=` have variables.
    """
    owns_cache: bool
    """What a step made stays in the build cache when its image is deleted. Otherwise the images are
    the cache.
    """
    own_defaults: bool
    """Of the operator's defaults for containers, RUN's have the parent of their cgroups alone.
    Otherwise they have all.
    """
    keeps_author: bool
    """An image has the author of the one that it begins with."""
    own_history: bool
    """The history of images is BuildKit's, so their steps are not those of the classic builder."""
    earlier_stages: bool
    """`--from` of COPY and `from` of mounts mean the last stage of that name in the file, which
    must stand before. A number is an image for mounts. FROM knows a stage by the lower case of its
    name alone. Otherwise the nearest stage before is meant, or else the first one after, which is
    built first; mounts take numbers, and case means nothing.
    """
    frontends: bool
    """`# syntax` names the frontend, and one that this engine does not have is refused. Otherwise
    the line is ignored.
    """
    side_by_side: bool
    """The reports of stages that are built at one time are mixed. Otherwise a stage is shown when
    those before it have ended, as if they were built in turn.
    """
    checks: bool
    """The file is checked by the rules of `lint.py`, `# check=` and BUILDKIT_DOCKERFILE_CHECK.
    Otherwise empty continuation lines alone are warned of.
    """
    all_systems: bool
    """Images of other operating systems than Linux can be made, of files alone."""
    names_images: bool
    """FROM and `--from` take the names of images. Otherwise they take a part of an id as well."""
    empty_images: bool
    """`FROM scratch` is an image, even without a step. Its working directory is `/`."""
    whole_arrays: bool
    """What follows a JSON array in its line makes the line a command for the shell."""
    bare_run: bool
    """RUN without a command is one without words for the shell, and an empty array is refused.
    Otherwise the first is refused, and the second does nothing.
    """
    sandboxes: bool
    """RUN sees of the engine's own files what BuildKit shows (`extra_mounts.Sandbox`), and no mark
    of a container. Otherwise its containers are like any other.
    """
    all_proxies: bool
    """RUN gets a proxy under the upper and the lower spelling of its name, and it overrides ENV. A
    blank one is none.
    """


CLASSIC = Dialect(**dict.fromkeys(Dialect.__struct_fields__, False))
BUILDKIT = Dialect(**dict.fromkeys(Dialect.__struct_fields__, True))

__all__ = ["BUILDKIT", "CLASSIC", "Dialect"]

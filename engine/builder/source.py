"""What a build is made of: a Dockerfile, and the context that is opened for it. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeAlias

from engine.builder.dockerfile.stages import Dockerfile
from engine.builder.output import Log
from engine.builder.trees import Tree


class Source(NamedTuple):
    """`raw`: the Dockerfile. When it is known to be valid, `named` makes the images of the named
    contexts that it uses, for `Options.contexts`, and `context` opens the context. Both raise
    EngineError.
    """

    raw: bytes
    context: Callable[[Dockerfile], AbstractAsyncContextManager[Tree]]
    named: Callable[[Dockerfile], Awaitable[Mapping[str, str]]] | None = None


Opened: TypeAlias = Callable[[Log], AbstractAsyncContextManager[Source]]
"""Finds what a build is made of; progress goes to the log. Raises EngineError."""

__all__ = ["Opened", "Source"]

"""What a build is made of: a Dockerfile, and the context that is opened for it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeAlias

from engine.build.dockerfile.stages import Dockerfile
from engine.build.output import Log
from engine.build.trees import Tree


class Source(NamedTuple):
    """`raw`: the Dockerfile. `context`: opens the context when the Dockerfile is known to be valid;
    it raises EngineError.
    """

    raw: bytes
    context: Callable[[Dockerfile], AbstractAsyncContextManager[Tree]]


Opened: TypeAlias = Callable[[Log], AbstractAsyncContextManager[Source]]
"""Finds what a build is made of; progress goes to the log. Raises EngineError."""

__all__ = ["Opened", "Source"]

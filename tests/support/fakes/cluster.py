"""The daemon's part of a swarm, without a manager: it records requests, and answers as a test
says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from engine.errors import NoSwarm
from engine.networks.network import NetworkRecord
from engine.swarm_session.messages import Done, LogLine
from engine.wire.swarm import InitRequest, JoinRequest


class FakeCluster:
    """Outside of a swarm, until `state` says otherwise."""

    def __init__(self, state: str = "inactive", *, manager: bool = True) -> None:
        self.state = state
        self.is_manager = state == "active" and manager
        self.asked: list[tuple[str, str, dict[str, Any], bytes]] = []
        """Verb, name, query and body of each call; init, join, leave and follow likewise."""
        self.answers: dict[str, bytes | Exception] = {}
        """By verb."""
        self.warning = ""
        self.shown: dict[str, Any] = {}
        """Fields of `info`."""
        self.lines: list[tuple[LogLine, ...] | Exception] = []

    @property
    def header(self) -> str:
        if self.state != "active":
            return self.state
        return "active/manager" if self.is_manager else "active/worker"

    def networks(self) -> list[NetworkRecord]:
        """None of the swarm was sent to this node."""
        return []

    async def call(self, verb: str, name: str = "", query: dict[str, Any] | None = None, body: bytes = b"") -> Done:
        if not self.is_manager:
            raise NoSwarm("This node is not a swarm manager.")
        self.asked.append((verb, name, query or {}, body))
        return Done(body=self._answer(verb), warning=self.warning)

    def _answer(self, verb: str) -> bytes:
        answer = self.answers.get(verb, b"")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def follow(self, of: str, name: str, query: dict[str, Any]) -> AsyncIterator[tuple[LogLine, ...]]:
        self.asked.append(("follow", name, query | {"of": of}, b""))
        for lines in self.lines:
            if isinstance(lines, Exception):
                raise lines
            yield lines

    async def init(self, request: InitRequest) -> str:
        self.asked.append(("init", "", {"request": request}, b""))
        return self._answer("init").decode()

    async def join(self, request: JoinRequest) -> None:
        self.asked.append(("join", "", {"request": request}, b""))
        self._answer("join")

    async def leave(self, force: bool) -> None:
        self.asked.append(("leave", "", {"force": force}, b""))
        self._answer("leave")

    async def info(self) -> dict[str, Any]:
        return self.shown

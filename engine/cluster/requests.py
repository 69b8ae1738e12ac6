"""Requests to the manager's process of this node, on the daemon's connection.

Not here: the connection (`process.py`), what the verbs do (`engine/manager/control`).

Threads: the event loop's.
Raises:  what the manager refuses with; ServerError when it does not answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine.errors import EngineError, ServerError, words
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Call, Change, Done, Follow, LogLine, LogLines, Watch

CALL_LIMIT = 30.0
"""Seconds that a manager may take to answer a request; it gives up a write after 20 s itself."""
INFO_LIMIT = 1.0


async def call(connection: Connection, verb: str, name: str = "", query: Any = None, body: bytes = b"") -> Done:
    """The answer to a verb of the API."""
    try:
        answer = await connection.ask(Call(verb=verb, name=name, query=query or {}, body=body), timeout=CALL_LIMIT)
    except TimeoutError as error:
        raise ServerError(f"context deadline exceeded: the manager did not answer within {CALL_LIMIT:.0f} s") from error
    except ConnectionError as error:
        raise ServerError("the manager's process has ended before it answered; try again") from error
    assert isinstance(answer, Done)
    return answer


async def follow(
    connection: Connection, of: str, name: str, query: dict[str, Any]
) -> AsyncGenerator[tuple[LogLine, ...], None]:
    """Logs of a service or task, until they end or the manager does."""
    try:
        async with contextlib.aclosing(connection.ask_for_many(Follow(of=of, name=name, query=query))) as answers:
            async for answer in answers:
                if isinstance(answer, LogLines):
                    yield answer.lines
    except ConnectionError as error:
        raise ServerError("the manager's process has ended; try again") from error


async def watch(connection: Connection) -> AsyncGenerator[Change, None]:
    """Changes of the swarm's objects, until the manager ends."""
    async with contextlib.aclosing(connection.ask_for_many(Watch())) as answers:
        async for answer in answers:
            if isinstance(answer, Change):
                yield answer


async def info(connection: Connection, trouble: str) -> dict[str, Any]:
    """What the manager adds to Swarm of /info. `trouble`: the daemon's own Error."""
    try:
        answer = await connection.ask(Call(verb="info"), timeout=INFO_LIMIT)
        told: dict[str, Any] = msgspec.json.decode(answer.body)
    except (EngineError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        return {"Error": words(error) or "the manager does not answer"}
    found = {name: value for name, value in told.items() if value}
    if "Error" in found:
        return found | {"ControlAvailable": False}
    return found | {"Error": answer.warning or trouble}


async def warning(connection: Connection | None) -> str:
    """Why a manager does not leave without force. Clients know these words."""
    text = "You are attempting to leave the swarm on a node that is participating as a manager. "
    states = []
    if connection is not None:
        with contextlib.suppress(EngineError):
            answer = await call(connection, "nodes.list", query={"filters": {"role": ["manager"]}})
            states = [node.get("ManagerStatus") or {} for node in msgspec.json.decode(answer.body)]
    total = len(states)
    reachable = sum(state.get("Reachability") == "reachable" for state in states)
    if total == 1:
        return (
            text + "Removing the last manager erases all current state of the swarm. "
            "Use `--force` to ignore this message."
        )
    if total and reachable - 1 < (total - 1) // 2 + 1:
        text += (
            f"Removing this node leaves {max(0, reachable - 1)} managers out of {total}. "
            "Without a quorum your swarm will be inaccessible. "
        )
    elif total:
        return (
            text + f"Removing this node leaves {reachable - 1} managers out of {total}. "
            "Demote it first, or use `--force` to ignore this message."
        )
    else:
        text += "Doing so may lead to the loss of your quorum. "
    return text + (
        "The only way to restore a swarm that has lost consensus is to reinitialize it with "
        "`--force-new-cluster`. Use `--force` to suppress this message."
    )

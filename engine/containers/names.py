"""Names and ids of containers: the random `adjective_surname`, the pattern, and the resolution of a
client's reference to an id.

Owns: the index of taken names and known ids. Not here: the containers themselves (`store.py`).
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, insort

from engine.common.names import random_name
from engine.errors import Conflict, InvalidParameter, NotFound

PATTERN = re.compile(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]*")
"""Docker Engine API, ContainerCreate, `name`; one letter is enough here."""


class Names:
    """Every container's id and name.

    Resolves references: a name with or without `/`, an id, a unique prefix of an id.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._owner: dict[str, str] = {}

    def add(self, container_id: str, name: str) -> None:
        """Take `name` for the id.

        Raises Conflict with Docker's words, naming the holder, when it is taken.
        """
        self.reserve(container_id, name)
        insort(self._ids, container_id)

    def reserve(self, container_id: str, name: str) -> None:
        """Take `name` alone, such as the new one of a rename."""
        holder = self._owner.setdefault(name, container_id)
        if holder != container_id:
            raise Conflict(
                f'Conflict. The container name "/{name}" is already in use by container "{holder}". '
                "You have to remove (or rename) that container to be able to reuse that name."
            )

    def release(self, name: str) -> None:
        """Free `name`."""
        self._owner.pop(name, None)

    def discard(self, container_id: str, name: str) -> None:
        """Forget the id and its name."""
        self.release(name)
        at = bisect_left(self._ids, container_id)
        if at < len(self._ids) and self._ids[at] == container_id:
            del self._ids[at]

    def find(self, name: str) -> str | None:
        """The id of the container with that name; None when no container has it."""
        return self._owner.get(name)

    def resolve(self, text: str) -> str:
        """Resolves `text`: a whole id, otherwise a name, otherwise an id's unique prefix.

        Raises NotFound, or InvalidParameter when ambiguous.
        """
        at = bisect_left(self._ids, text)
        if at < len(self._ids) and self._ids[at] == text:
            return text
        owner = self._owner.get(text.removeprefix("/"))
        if owner is not None:
            return owner
        if text and at < len(self._ids) and self._ids[at].startswith(text):
            if at + 1 < len(self._ids) and self._ids[at + 1].startswith(text):
                raise InvalidParameter(f"multiple IDs found with provided prefix: {text}")
            return self._ids[at]
        raise NotFound(f"No such container: {text}")

    def random(self) -> str:
        """A free `adjective_surname`, followed by a number after too many collisions."""
        for attempt in range(100):
            name = random_name(attempt)
            if name not in self._owner:
                return name
        return secrets.token_hex(16)


def checked_name(name: str) -> str:
    """`name` without its leading slash. Raises InvalidParameter when it breaks the pattern."""
    if not PATTERN.fullmatch(name):
        raise InvalidParameter(f"Invalid container name ({name}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
    return name.removeprefix("/")

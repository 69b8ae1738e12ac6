"""Secrets and configs of this node's tasks: their content, and the files that containers get.

The content is in memory alone, from the manager's message until no task refers to it. In a
container each is a file on a tmpfs of that container's own, read-only (`extra_mounts.File`): it is
never on a disk, in a record, in inspect or in a log, and ends with the container's run. A daemon
that restarts gets the content again with its next session; containers that run keep their files.

Owns:    the content, by id.
Threads: the event loop's.
Raises:  InvalidParameter for a reference or a template that cannot be served.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping

from engine.cluster.bodies import Node, container_spec, template_values
from engine.common.templates import Value, expand
from engine.containers.extra_mounts import File
from engine.errors import InvalidParameter
from engine.swarm_session.messages import Assigned, Delivery
from engine.wire.services import ServiceSpec
from engine.wire.tasks import ConfigReference, ContainerSpec, FileTarget, SecretReference

SECRETS = "/run/secrets"
DEFAULT_MODE = 0o444


class Deliveries:
    """The content of all secrets and configs that this node was sent."""

    def __init__(self) -> None:
        self._secrets: dict[str, Delivery] = {}
        self._configs: dict[str, Delivery] = {}

    def __repr__(self) -> str:
        """Without the content."""
        return f"Deliveries({len(self._secrets)} secrets, {len(self._configs)} configs)"

    def put(self, secrets: Iterable[Delivery], configs: Iterable[Delivery]) -> None:
        self._secrets.update((each.id, each) for each in secrets)
        self._configs.update((each.id, each) for each in configs)

    def keep(self, tasks: Iterable[Assigned]) -> None:
        """Forget what none of these tasks refers to."""
        secrets: set[str] = set()
        configs: set[str] = set()
        for task in tasks:
            secrets.update(task.secrets)
            configs.update(task.configs)
        self._secrets = {id: each for id, each in self._secrets.items() if id in secrets}
        self._configs = {id: each for id, each in self._configs.items() if id in configs}

    def missing(self, task: Assigned, spec: ServiceSpec) -> list[str]:
        """What the task needs and this node does not have yet: `secret x`, `config y`."""
        container = container_spec(spec)
        return [
            *(f"secret {each.secret_name}" for each in container.secrets if each.secret_id not in self._secrets),
            *(f"config {each.config_name}" for each in container.configs if each.config_id not in self._configs),
        ]

    def files(self, task: Assigned, spec: ServiceSpec, node: Node) -> tuple[File, ...]:
        """The files of the task's container; nothing is `missing`."""
        container = container_spec(spec)
        found = {}
        for secret in container.secrets:
            if secret.file is not None:
                data = self._content(self._secrets[secret.secret_id], task, spec, node)
                found[_path(secret.file, SECRETS)] = _file(secret.file, SECRETS, data)
        for config in container.configs:
            if config.file is not None:
                data = self._content(self._configs[config.config_id], task, spec, node)
                found[_path(config.file, "/")] = _file(config.file, "/", data)
        return tuple(found.values())

    def _content(self, delivery: Delivery, task: Assigned, spec: ServiceSpec, node: Node) -> bytes:
        if not delivery.template:
            return delivery.data
        container = container_spec(spec)
        values = template_values(task, spec, node)
        try:
            text = delivery.data.decode()
        except UnicodeDecodeError as error:
            raise InvalidParameter(f"{delivery.name}: the template is not UTF-8") from error
        functions = {
            "secret": lambda name: self._named(container.secrets, name, "secret"),
            "config": lambda name: self._named(container.configs, name, "config"),
            "env": lambda name: _variables(container, values).get(name, ""),
        }
        try:
            return expand(text, values, functions).encode()
        except InvalidParameter as error:
            raise InvalidParameter(f"{delivery.name}: {error.message}") from error

    def _named(self, references: Iterable[SecretReference | ConfigReference], name: Value, kind: str) -> str:
        """The content of the secret or config whose file has this name in the container."""
        for each in references:
            if each.file is not None and each.file.name == name:
                if isinstance(each, ConfigReference):
                    return self._configs[each.config_id].data.decode(errors="replace")
                return self._secrets[each.secret_id].data.decode(errors="replace")
        raise InvalidParameter(f"template: {kind} target {name} not found")


def _variables(container: ContainerSpec, values: Mapping[str, Value]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for entry in container.env:
        name, _, value = expand(entry, values).partition("=")
        found[name] = value
    return found


def _path(file: FileTarget, directory: str) -> str:
    return posixpath.normpath(posixpath.join(directory, file.name))


def _file(file: FileTarget, directory: str, content: bytes) -> File:
    return File(
        destination=_path(file, directory),
        content=content,
        mode=file.mode & 0o777 or DEFAULT_MODE,
        uid=_number(file.uid, file, "UID"),
        gid=_number(file.gid, file, "GID"),
    )


def _number(text: str, file: FileTarget, field: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise InvalidParameter(f"File {file.name}: {field} {text[:20]!r} is not a number")
    return int(text)


__all__ = ["DEFAULT_MODE", "SECRETS", "Deliveries"]

"""Puts the membership of a node together. Imported when there is a swarm to be a part of."""

from __future__ import annotations

import importlib
from typing import Any

from engine.cluster.membership import Membership
from engine.cluster.parts import Parts


def membership(parts: Parts) -> Membership:
    agent: Any = importlib.import_module("engine.cluster.agent")
    return Membership(parts, agent.Agent)

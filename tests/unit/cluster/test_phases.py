"""The table of phases: which verbs of clients each phase permits, and with which words others
end.
"""

from __future__ import annotations

import pytest

from engine.cluster.phases import LOCAL_STATES, TABLE, Phase, Refusal, Verb, following
from engine.errors import NoSwarm

OF_CLIENTS = (Verb.INIT, Verb.FORCE, Verb.JOIN, Verb.LEAVE, Verb.BOOT)
PART, NOT_PART = "This node is already part of a swarm", "This node is not part of a swarm"


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_knows_every_verb_of_clients(phase: Phase) -> None:
    for verb in OF_CLIENTS:
        assert (phase, verb) in TABLE
    assert phase in LOCAL_STATES


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.NONE])
def test_part_of_a_swarm(phase: Phase) -> None:
    for verb in (Verb.INIT, Verb.JOIN):
        with pytest.raises(NoSwarm, match=PART):
            following(phase, verb)
    assert following(phase, Verb.LEAVE) is Phase.LEAVING


def test_outside_of_a_swarm() -> None:
    assert following(Phase.NONE, Verb.INIT) is Phase.FOUNDING
    assert following(Phase.NONE, Verb.FORCE) is Phase.FOUNDING
    assert following(Phase.NONE, Verb.JOIN) is Phase.JOINING
    with pytest.raises(NoSwarm, match=NOT_PART):
        following(Phase.NONE, Verb.LEAVE)


def test_only_managers_force() -> None:
    """In the phase `error`, `membership.py` looks for the data of a manager."""
    permitted = {phase for phase in Phase if TABLE[phase, Verb.FORCE] is Phase.FORCING}
    assert permitted == {Phase.MANAGER, Phase.FORCING, Phase.ERROR}
    assert following(Phase.FORCING, Verb.STRAND) is Phase.ERROR


def test_a_refusal_is_no_swarm() -> None:
    assert {entry.kind for entry in TABLE.values() if isinstance(entry, Refusal)} == {NoSwarm}


def test_every_phase_is_left_again() -> None:
    """From each phase a node comes out of the swarm, by leaving and by what follows."""
    for phase in Phase:
        if phase is not Phase.NONE:
            assert following(following(phase, Verb.LEAVE), Verb.SUCCEED) is Phase.NONE

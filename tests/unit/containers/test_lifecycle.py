"""The lifecycle table: complete, and each refusal with the kind and the message that clients
parse."""

import pytest

from engine.containers import listing
from engine.containers.lifecycle import TABLE, Refusal, State, Verb, following
from engine.errors import Conflict, EngineError, NotModified, WrongState

OF_CLIENTS = (
    *(Verb.START, Verb.STOP, Verb.KILL, Verb.PAUSE, Verb.UNPAUSE, Verb.ATTACH, Verb.RESIZE, Verb.UPDATE),
    *(Verb.REMOVE, Verb.REMOVE_BY_FORCE),
)
"""The verbs that a client may call at any time."""


def test_every_state_answers_every_verb_of_clients() -> None:
    assert {(state, verb) for state in State for verb in OF_CLIENTS} <= set(TABLE)


def test_what_cannot_happen_is_not_in_the_table() -> None:
    with pytest.raises(KeyError):
        following(State.CREATED, Verb.EXIT, "abc")


@pytest.mark.parametrize(("state", "verb"), sorted(TABLE))
def test_following_gives_a_state_or_raises_the_tables_kind(state: State, verb: Verb) -> None:
    entry = TABLE[state, verb]
    if isinstance(entry, Refusal):
        with pytest.raises(EngineError) as raised:
            following(state, verb, "abc")
        assert type(raised.value) is entry.kind
        assert "{" not in raised.value.message
    else:
        assert following(state, verb, "abc") is entry


@pytest.mark.parametrize(
    ("state", "verb", "kind", "words"),
    [
        (State.RUNNING, Verb.START, NotModified, "already started"),
        (State.EXITED, Verb.STOP, NotModified, "already stopped"),
        (State.CREATED, Verb.STOP, NotModified, "already stopped"),
        (State.PAUSED, Verb.ATTACH, Conflict, "is paused"),
        (
            *(State.RUNNING, Verb.REMOVE, Conflict),
            'cannot remove container "abc": container is running: stop the container before removing or force remove',
        ),
        (
            *(State.PAUSED, Verb.REMOVE, Conflict),
            'cannot remove container "abc": container is paused and must be unpaused first',
        ),
        (State.EXITED, Verb.KILL, WrongState, "Container abc is not running"),
        (State.EXITED, Verb.RESIZE, WrongState, "Container abc is not running"),
        (State.RUNNING, Verb.UNPAUSE, WrongState, "Container abc is not paused"),
    ],
)
def test_refusals_say_what_the_specification_says(
    state: State, verb: Verb, kind: type[EngineError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        following(state, verb, "abc")


def test_the_states_are_the_list_filters_values() -> None:
    assert {str(state) for state in State} == {"created", "restarting", "running", "paused", "exited", "removing"}
    assert set(listing.STATUSES) == {*State, "dead"}

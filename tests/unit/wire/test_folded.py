"""Documents that are read as Go reads them."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire import folded
from engine.wire.authz import AuthzAnswer
from engine.wire.network_plugins import EndpointJoined
from engine.wire.plugins import PluginAnswer


@pytest.mark.parametrize("name", ["Err", "err", "ERR", "eRR"])
def test_a_field_in_any_case(name: str) -> None:
    assert folded.decode(json.dumps({name: "no"}).encode(), PluginAnswer).err == "no"


def test_structs_in_lists_and_options() -> None:
    answer = folded.decode(
        b'{"interfacename":{"SRCNAME":"v","dstPrefix":null},"staticroutes":[{"destination":"10.0.0.0/8"}],"more":1}',
        EndpointJoined,
    )
    assert answer.interface_name is not None and answer.interface_name.src_name == "v"
    assert [each.destination for each in answer.static_routes or ()] == ["10.0.0.0/8"]


@pytest.mark.parametrize(
    "raw", [b'{"Allow":false,"allow":true}', b'{"err":null,"Err":"x"}', b"[]", b'"x"', b"{", b"\xff"]
)
def test_what_is_refused(raw: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        folded.decode(raw, AuthzAnswer)


@given(
    st.dictionaries(
        st.sampled_from(["Allow", "ALLOW", "Msg", "msg", "Err", "x"]), st.none() | st.booleans() | st.text()
    )
)
def test_one_spelling_of_each_field_or_an_error(document: dict[str, object]) -> None:
    try:
        answer = folded.decode(json.dumps(document).encode(), AuthzAnswer)
    except msgspec.MsgspecError:
        return
    spelled = [name.lower() for name in document]
    assert all(spelled.count(name) <= 1 for name in ("allow", "msg", "err"))
    assert answer.allow == next((bool(value) for name, value in document.items() if name.lower() == "allow"), False)

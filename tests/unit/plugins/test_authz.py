"""The chain of authorization plugins: start, messages, faults, limits."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ServerError
from engine.plugins import authz
from engine.plugins.authz import Chain, Denied, Exchange, Failed
from engine.plugins.discovery import Discovery, Endpoint
from engine.plugins.registry import Plugins
from engine.wire.authz import AuthzRequest, AuthzResponse
from tests.support.plugins.protocol import AuthzPlugin, Plugin, Raw

ASKED = AuthzRequest(request_method="GET", request_uri="/info", request_headers={"A": "b"})
REPLIED = AuthzResponse(response_status_code=200, response_headers={"C": "d"})


class Managed:
    """A plugin that the engine runs."""

    id = "0" * 64
    name = "gate:latest"
    kinds = frozenset(("authz",))

    def __init__(self, endpoint: Endpoint, *, enabled: bool = True) -> None:
        self.endpoint = endpoint
        self.enabled = enabled

    async def tree(self, path: str) -> int:
        raise AssertionError(path)


def run(scenario: Callable[[Plugins], Awaitable[None]], directory: Path) -> None:
    async def main() -> None:
        plugins = Plugins(Discovery((directory,), ()), 5)
        try:
            await scenario(plugins)
        finally:
            await plugins.close()

    uvloop.run(main())


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    plugin = AuthzPlugin()
    plugin.listen(tmp_path / "gate.sock")
    yield plugin
    plugin.close()


def test_a_request_and_its_reply(gate: AuthzPlugin, tmp_path: Path) -> None:
    async def scenario(plugins: Plugins) -> None:
        chain = await Chain.open(("gate", "gate"), plugins)
        assert chain.names == ["gate"], "once"
        assert plugins.in_use("gate") == ["the option --authorization-plugin"] and plugins.in_use("other") == []
        exchange = await chain.begin(ASKED, b"body")
        await exchange.end(REPLIED, b"reply")
        await (await chain.begin(ASKED, b"")).end(REPLIED)
        await chain.close()

    run(scenario, tmp_path)
    asked = {"RequestMethod": "GET", "RequestUri": "/info", "RequestHeaders": {"A": "b"}}
    replied = asked | {"ResponseStatusCode": 200, "ResponseHeaders": {"C": "d"}}
    assert gate.asked() == [asked | {"RequestBody": b"body"}, asked]
    assert gate.asked("AuthZRes") == [replied | {"RequestBody": b"body", "ResponseBody": b"reply"}, replied]


@given(st.integers(0, 5 * authz._PIECE))
def test_base64_in_pieces(size: int) -> None:
    data = b"0123456" * (size // 7 + 1)
    assert b"".join(asyncio.run(authz._base64(data[:size]))) == base64.b64encode(data[:size])


def test_a_long_body_lets_others_run() -> None:
    async def scenario() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        await authz._base64(bytes(4 << 20))
        counting.cancel()
        return turns

    assert asyncio.run(scenario()) >= (4 << 20) // authz._PIECE


def test_start(gate: AuthzPlugin, tmp_path: Path) -> None:
    other = Plugin("VolumeDriver")
    other.listen(tmp_path / "other.sock")
    broken = AuthzPlugin()
    broken.answers["Plugin.Activate"] = Raw(b"")
    broken.listen(tmp_path / "broken.sock")

    async def scenario(plugins: Plugins) -> None:
        for name, words in (
            ("absent", 'plugin "absent" not found'),
            ("../gate", 'plugin "../gate" not found'),
            ("other", "plugin other does not implement the requested interface: authz"),
            ("broken", 'Plugin.Activate: plugin "broken": the plugin closed the connection without an answer'),
        ):
            with pytest.raises(ServerError) as caught:
                await Chain.open(("gate", name), plugins)
            assert caught.value.message == f"--authorization-plugin {name}: {words}"
            assert plugins.users == []

    run(scenario, tmp_path)
    other.close()
    broken.close()


def test_a_managed_plugin(gate: AuthzPlugin, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.sock"
    mine = AuthzPlugin()
    mine.listen(path)

    async def scenario(plugins: Plugins) -> None:
        found = Managed(Endpoint(socket=str(path)))
        plugins.find_managed = lambda name: found if name in ("gate", found.name) else None
        chain = await Chain.open(("gate", "gate:latest"), plugins)
        assert chain.names == ["gate:latest"], "once"
        assert plugins.in_use("gate:latest") == ["the option --authorization-plugin"], "it cannot be disabled"
        await chain.begin(ASKED, b"")
        await chain.close()
        found.enabled = False
        with pytest.raises(ServerError, match='--authorization-plugin gate: plugin "gate:latest" found but disabled'):
            await Chain.open(("gate",), plugins)

    run(scenario, tmp_path)
    assert len(mine.asked()) == 1 and gate.calls == []
    mine.close()


def test_no_plugin_takes_the_place_of_one(gate: AuthzPlugin, tmp_path: Path) -> None:
    """A managed plugin of the same name that is installed later; and the use as another kind."""

    async def scenario(plugins: Plugins) -> None:
        chain = await Chain.open(("gate",), plugins)
        plugins.find_managed = lambda name: Managed(Endpoint(socket="/nowhere"))
        await chain.begin(ASKED, b"")
        plugins.find_managed = lambda name: None
        gate.implements.append("VolumeDriver")
        await plugins.get("gate", "VolumeDriver")
        await plugins.forget("gate")
        gate.deny = lambda method, body: "no"
        with pytest.raises(Denied, match="authorization denied by plugin gate: no"):
            await chain.begin(ASKED, b"")
        await chain.close()

    run(scenario, tmp_path)


def test_the_first_denial_ends_it(gate: AuthzPlugin, tmp_path: Path) -> None:
    second = AuthzPlugin()
    second.listen(tmp_path / "second.sock")

    async def scenario(plugins: Plugins) -> None:
        chain = await Chain.open(("second", "gate"), plugins)
        exchange = await chain.begin(ASKED, b"")
        assert (len(second.asked()), len(gate.asked())) == (1, 1)
        second.deny = lambda method, body: "secret"
        with pytest.raises(Denied, match="authorization denied by plugin second: secret"):
            await exchange.end(REPLIED)
        assert gate.asked("AuthZRes") == []
        second.answers["AuthZPlugin.AuthZReq"] = {"Allow": False, "Msg": None}
        with pytest.raises(Denied) as caught:
            await chain.begin(ASKED, b"")
        assert caught.value.message == "authorization denied by plugin second: "
        await chain.close()

    run(scenario, tmp_path)
    second.close()


def test_a_fault_names_plugin_and_call(gate: AuthzPlugin, tmp_path: Path) -> None:
    async def scenario(plugins: Plugins) -> None:
        chain = await Chain.open(("gate",), plugins, seconds=0.2)
        for answer, words in (
            ({"Err": "no database", "Allow": True}, "no database"),
            ((500, {"Err": "broken"}), "broken"),
            (Raw(b"x"), 'plugin "gate": the plugin'),
        ):
            gate.answers["AuthZPlugin.AuthZReq"] = answer
            with pytest.raises(Failed) as caught:
                await chain.begin(ASKED, b"")
            assert caught.value.message.startswith(f"plugin gate failed with error: AuthZPlugin.AuthZReq: {words}")
        gate.answers.clear()
        gate.delays["AuthZPlugin.AuthZReq"] = 30
        with pytest.raises(Failed, match=r'AuthZReq: plugin "gate" did not answer within 0\.2 seconds'):
            await chain.begin(ASKED, b"")
        await chain.close()

    run(scenario, tmp_path)


def test_calls_at_a_time(gate: AuthzPlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authz, "CALLS", 2)
    monkeypatch.setattr(authz, "SECONDS", 0.2)
    gate.delays["AuthZPlugin.AuthZReq"] = 30

    async def scenario(plugins: Plugins) -> None:
        chain = await Chain.open(("gate",), plugins, seconds=2)
        asking = [asyncio.ensure_future(chain.begin(ASKED, b"")) for _ in range(5)]
        done, waiting = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert len(waiting) >= 2
        for each in done:
            assert isinstance(each.exception(), Failed) and "2 other requests wait" in str(each.exception())
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        gate.delays.clear()
        assert isinstance(await chain.begin(ASKED, b""), Exchange), "the turns were given back"
        await chain.close()

    run(scenario, tmp_path)


def test_structs_have_docker_s_names() -> None:
    asked = AuthzRequest(
        user="alice",
        user_auth_n_method="TLS",
        request_method="GET",
        request_uri="/",
        request_headers={},
        request_peer_certificates=[b"PEM"],
    )
    assert msgspec.json.decode(msgspec.json.encode(asked)) == {
        "User": "alice",
        "UserAuthNMethod": "TLS",
        "RequestMethod": "GET",
        "RequestUri": "/",
        "RequestHeaders": {},
        "RequestPeerCertificates": [base64.b64encode(b"PEM").decode()],
    }


def test_a_retired_chain_leaves_the_plugins_of_its_successor_needed() -> None:
    members: Any = {name: SimpleNamespace(name=name) for name in "abc"}
    before, after = Chain([members["a"], members["b"]]), Chain([members["b"], members["c"]])
    plugins: Any = SimpleNamespace(users=[before.users, after.users], needed={"a", "b", "c"})
    before.retire(plugins, after)
    assert plugins.needed == {"b", "c"} and plugins.users == [after.users]
    after.retire(plugins, None)
    assert plugins.needed == set() and plugins.users == []

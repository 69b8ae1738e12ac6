"""Which requests of browsers are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Forbidden
from engine.http import origins
from engine.http.messages import Headers, Request

LOCAL = "127.0.0.1:2375"


def asked(method: str = "POST", /, **fields: str) -> Request:
    """A request with these header fields; `_` in a name stands for `-`."""
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return Request(method, "/containers/create", headers=Headers(headers))


def accepted(request: Request, *, plain: bool = False) -> bool:
    try:
        (origins.check_plain if plain else origins.check)(request)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "fields",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:8080"},
        {"Origin": "http://localhost:2375"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1:2375.evil.example"},
        {"Origin": "http://127.0.0.1:2375@evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "file://"},
        {"Origin": "chrome-extension://127.0.0.1:2375"},
        {"Origin": "http://[::1"},
        {"Origin": "http://127.0.0.1:99999"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "Cross-Site"},
        {"Sec_Fetch_Site": ""},
        {"Origin": f"http://{LOCAL}", "Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-origin", "sec_fetch_site": "cross-site"},
        {"Origin": f"http://{LOCAL}", "origin": "http://evil.example"},
    ],
)
def test_pages_of_other_sites(fields: dict[str, str]) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert not accepted(asked(method, Host=LOCAL, **fields))
        assert not accepted(asked(method, Host=LOCAL, **fields), plain=True)
    with pytest.raises(Forbidden, match="pages of other web sites"):
        origins.check_site(asked("GET", Host=LOCAL, **fields).headers)
    for method in ("GET", "HEAD", "OPTIONS"):
        assert accepted(asked(method, Host=LOCAL, **fields)), "a page cannot read the answer"


@pytest.mark.parametrize(
    ("host", "fields"),
    [
        (LOCAL, {}),
        (LOCAL, {"User_Agent": "Docker-Client/28.2.2 (linux)", "Content_Type": "application/json"}),
        (LOCAL, {"Origin": f"http://{LOCAL}"}),
        (LOCAL, {"Origin": f"https://{LOCAL}"}),
        (LOCAL, {"Origin": f"http://{LOCAL}", "Sec_Fetch_Site": "same-origin"}),
        ("LocalHost", {"Origin": "http://localhost"}),
        ("localhost", {"Origin": "http://localhost:80"}),
        ("localhost:443", {"Origin": "https://localhost"}),
        ("[::1]:2375", {"Origin": "http://[::1]:2375"}),
        (LOCAL, {"Sec_Fetch_Site": "none"}),
        ("", {"Origin": "http://localhost"}),
    ],
)
def test_programs_and_own_pages(host: str, fields: dict[str, str]) -> None:
    assert accepted(asked(Host=host, **fields))
    assert accepted(asked(Host=host, **fields), plain=True)


@pytest.mark.parametrize(
    "signs",
    [
        {"Origin": "http://evil.example:2375"},
        {"Referer": "http://evil.example:2375/x"},
        {"Accept_Language": "en"},
        {"Sec_Fetch_Mode": "cors"},
        {"User_Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
)
def test_a_name_that_leads_here(signs: dict[str, str]) -> None:
    """DNS rebinding: the page and the server have the same name, so every method is refused."""
    for method in ("GET", "POST"):
        request = asked(method, Host="evil.example:2375", **signs)
        assert not accepted(request, plain=True)
        assert accepted(request), "a certificate of the server has other names"
        assert accepted(asked(method, Host="docker:2375"), plain=True), "a program may use any name"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "x.localhost:2375", "localhost.", "10.0.0.1", "[::1]:5"])
def test_names_that_browsers_may_use(host: str) -> None:
    assert accepted(asked("GET", Host=host, Accept_Language="en"), plain=True)


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "1.2.3.4.nip.io",
        "xlocalhost",
        "[::1",
        "a:99999",
        "@",
        "[::1].evil",
        "localhost@evil",
        "a@localhost",
    ],
)
def test_names_that_browsers_may_not_use(host: str) -> None:
    assert not accepted(asked("GET", Host=host, Accept_Language="en"), plain=True)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=12))
def test_any_text_is_accepted_or_refused(origin: str, host: str, site: str) -> None:
    """The only error is Forbidden."""
    fields = {"Origin": origin, "Host": host, **({"Sec_Fetch_Site": site} if site else {})}
    headers = [
        (name.replace("_", "-").encode(), value.encode("latin-1", errors="replace")) for name, value in fields.items()
    ]
    request = Request("POST", "/", headers=Headers(headers))
    for check in (origins.check, origins.check_plain):
        try:
            check(request)
        except Forbidden as error:
            assert len(error.message) < 300

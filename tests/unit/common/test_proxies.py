"""Proxies and the hosts that need none, as Go's httpproxy reads the variables (its own test's
table, and more).
"""

from __future__ import annotations

import os

import pytest

from engine.common import proxies

NO = "foobar.com, .barbaz.net, *.wild.example, 192.168.1.1, 192.168.1.2:81, 192.168.1.3:80, 10.0.0.0/30"
NO += ", 2001:db8::52:0:1, [2001:db8::52:0:2]:443, [2001:db8::52:0:3]:80, 2002:db8:a::45/64, with.port:8080"


@pytest.mark.parametrize(
    ("host", "port", "is_used"),
    [
        ("localhost", None, False),
        ("127.0.0.1", None, False),
        ("127.0.0.2", None, False),
        ("::1", None, False),
        ("[::1]", None, False),
        ("localhost.net", None, True),
        ("[::2]", None, True),
        ("foobar.com", None, False),
        ("FooBar.com", 5000, False),
        ("www.foobar.com", None, False),
        ("foofoobar.com", None, True),
        ("barbaz.net", None, True),
        ("www.barbaz.net", None, False),
        ("wild.example", None, True),
        ("a.b.wild.example", None, False),
        ("192.168.1.1", None, False),
        ("::ffff:192.168.1.1", None, False),
        ("192.168.1.2", None, True),
        ("192.168.1.2", 81, False),
        ("192.168.1.3", None, False),
        ("192.168.1.4", None, True),
        ("10.0.0.2", None, False),
        ("10.0.0.4", None, True),
        ("2001:db8::52:0:1", None, False),
        ("2001:db8::52:0:2", None, True),
        ("2001:db8::52:0:2", 443, False),
        ("2001:db8::52:0:3", None, False),
        ("2002:db8:a::123", None, False),
        ("2002:db8:b::123", None, True),
        ("with.port", 8080, False),
        ("a.with.port", 8080, False),
        ("with.port", None, True),
    ],
)
def test_hosts_that_need_none(host: str, port: int | None, is_used: bool) -> None:
    environment = {"http_proxy": "http://proxy:3128", "no_proxy": NO}
    assert (proxies.proxy_of("http", host, port, environment) is not None) is is_used


@pytest.mark.parametrize("rules", ["*", "a, *", "other,*, b"])
def test_an_asterisk_is_every_host(rules: str) -> None:
    environment = {"HTTPS_PROXY": "proxy", "NO_PROXY": rules}
    assert proxies.proxy_of("https", "example.com", None, environment) is None


@pytest.mark.parametrize("rules", ["", " , ", "*foo", ":80", "10.0.0.0/99", "[fd00::1]", "/"])
def test_rules_that_match_nothing(rules: str) -> None:
    environment = {"HTTP_PROXY": "proxy", "NO_PROXY": rules}
    for host in ("example.com", "10.0.0.1", "fd00::1", "foo"):
        assert proxies.proxy_of("http", host, None, environment) is not None


def test_spellings_and_schemes() -> None:
    both = {"HTTP_PROXY": "http://a:1", "http_proxy": "http://b:1", "https_proxy": "http://c:1"}
    assert proxies.proxy_of("http", "x", None, both) == proxies.Proxy("http://a:1", "")
    assert proxies.proxy_of("https", "x", None, both) == proxies.Proxy("http://c:1", "")
    assert proxies.proxy_of("https", "x", None, {"HTTP_PROXY": "http://a:1"}) is None


@pytest.mark.parametrize(
    ("text", "url", "user"),
    [
        ("proxy", "http://proxy", ""),
        ("proxy:3128", "http://proxy:3128", ""),
        ("HTTPS://proxy:3128/", "https://proxy:3128", ""),
        ("http://[fd00::1]:80", "http://[fd00::1]:80", ""),
        ("me:p%40ss@proxy:1", "http://proxy:1", "me:p%40ss"),
        ("http://me:p@ss@proxy:1", "http://proxy:1", "me:p@ss"),
    ],
)
def test_urls(text: str, url: str, user: str) -> None:
    assert proxies.parse(text) == proxies.Proxy(url, user)


@pytest.mark.parametrize(
    "text", ["socks5://me:secret@h", "http://", "a b", "http://me:secret@h/path", "h:99999", "://h"]
)
def test_urls_of_no_proxy(text: str) -> None:
    with pytest.raises(ValueError, match="must be an http or https URL") as caught:
        proxies.parse(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@proxy:1", "http://xxxxx:xxxxx@proxy:1"),
        ("me:secret@proxy:1", "xxxxx:xxxxx@proxy:1"),
        ("http://:secret@proxy", "http://xxxxx:xxxxx@proxy"),
        ("http://me:s/ecret@proxy", "http://xxxxx:xxxxx@proxy"),
        ("http://me@proxy/", "http://xxxxx:xxxxx@proxy/"),
        ("http://proxy:1", "http://proxy:1"),
        ("", ""),
    ],
)
def test_passwords_are_hidden(url: str, shown: str) -> None:
    assert proxies.hidden(url) == shown


def test_the_configuration_overrides_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://old")
    monkeypatch.setenv("NO_PROXY", "same")
    assert proxies.export("http://new", "", "same") == ["http_proxy"]
    assert os.environ["HTTP_PROXY"] == os.environ["http_proxy"] == "http://new"
    assert os.environ["no_proxy"] == "same" and "HTTPS_PROXY" not in os.environ

"""Requests that pages of other web sites make through the browser of a user.

A browser lets any page send simple requests and open websockets to any address, a loopback address
too. Client certificates are no protection, because the browser presents them. It does name the
page's site, in Origin (RFC 6454, section 7) and Sec-Fetch-Site (W3C, Fetch Metadata Request
Headers). Programs name none.

Pure. Not here: which connections are checked (`server.py`, `websocket.py`).
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from engine.errors import Forbidden
from engine.http.messages import Headers, Request

_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing. A page of another site cannot read their answers."""

_OWN = ("same-origin", "none")
"""Values of Sec-Fetch-Site: a page of this server, or the user's own navigation."""

_BROWSERS = ("origin", "referer", "accept-language", "sec-fetch-site", "sec-fetch-mode")
"""Header fields of which browsers send at least one with each request."""


def check(request: Request) -> None:
    """Raises Forbidden for a request of another site's page that may change something."""
    if request.method not in _SAFE:
        check_site(request.headers)


def check_plain(request: Request) -> None:
    """The same without TLS. There a page can change the address of its own name to the server's
    (DNS rebinding), and is then no other site. Raises Forbidden for a request of a browser by any
    name but `localhost`; an IP address as name is not looked up.
    """
    headers = request.headers
    host = headers.get("host")
    if host and not _is_local(host) and _is_browser(headers):
        raise Forbidden(
            f"Host {host[:100]!r}: without TLS, a browser must use the name localhost or an IP address of this host"
        )
    check(request)


def check_site(headers: Headers) -> None:
    """Raises Forbidden if a page of another site sends the request, whatever its method."""
    sites = headers.get_all("sec-fetch-site")
    for site in sites:
        if site.lower() not in _OWN:
            raise Forbidden(f"Sec-Fetch-Site {site[:100]!r}: requests of pages of other web sites are refused")
    host = headers.get("host")
    if sites or not host:  # each browser sends Host
        return
    for origin in headers.get_all("origin"):
        if not _is_same(origin, host):
            raise Forbidden(f"Origin {origin[:100]!r}: requests of pages of other web sites are refused")


def _is_same(origin: str, host: str) -> bool:
    """True if the origin's host and port are those of Host. The scheme is not compared, because
    some websocket clients send `http` with TLS.
    """
    of_page = _split(origin)
    of_server = _split(f"{of_page.scheme}://{host}") if of_page is not None else None
    return of_page is not None and of_server is not None and _address(of_page) == _address(of_server)


def _address(url: SplitResult) -> tuple[str | None, int]:
    return url.hostname, url.port or (443 if url.scheme in ("https", "wss") else 80)


def _split(url: str) -> SplitResult | None:
    """None if it is no URL of a web server, such as the origin `null`."""
    if not _URL.fullmatch(url):  # urlsplit() takes `[::1].evil.example` for ::1
        return None
    try:
        found = urlsplit(url)
        return found if found.hostname and found.port != 0 else None
    except ValueError:
        return None


_URL = re.compile(r"(?:http|ws)s?://(?:\[[0-9A-Fa-f:.]+\]|[^][:/?#@\s]+)(?::[0-9]+)?", re.ASCII | re.IGNORECASE)


def _is_browser(headers: Headers) -> bool:
    return headers.get("user-agent").startswith("Mozilla/") or any(name in headers for name in _BROWSERS)


def _is_local(host: str) -> bool:
    found = _split(f"http://{host}")
    if found is None or found.hostname is None:
        return False
    name = found.hostname.removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True

"""The driver splunk: an HTTP Event Collector."""

from __future__ import annotations

import re
from typing import Literal

from engine.logs.deliveries import Splunk, Tls
from engine.logs.options import Missing, Options, address

NAME = "splunk"
OPTIONS = frozenset((
    "splunk-url", "splunk-token", "splunk-source", "splunk-sourcetype", "splunk-index", "splunk-capath",
    "splunk-caname", "splunk-insecureskipverify", "splunk-format", "splunk-verify-connection", "splunk-gzip",
    "splunk-gzip-level", "splunk-index-acknowledgment",
))  # fmt: skip

COLLECTOR = "/services/collector/event/1.0"

_FORMATS: dict[str, Literal["inline", "json", "raw"]] = {"inline": "inline", "json": "json", "raw": "raw"}


def parse(options: Options) -> Splunk:
    url = _url(options)
    token = options.text("splunk-token")
    if not re.fullmatch(r"[!-~]*", token):  # it becomes a header
        raise options.invalid("splunk-token", "must have printable ASCII characters only")
    form = options.text("splunk-format", "inline")
    if form not in _FORMATS:
        raise options.invalid("splunk-format", "Unknown format specified, supported formats are inline, json and raw")
    tls = Tls(
        ca=options.text("splunk-capath"),
        skip_verify=options.boolean("splunk-insecureskipverify", False),
        server_name=options.text("splunk-caname"),
    )
    target = Splunk(
        url=url,
        token=token,
        source=options.text("splunk-source"),
        sourcetype=options.text("splunk-sourcetype"),
        index=options.text("splunk-index"),
        format=_FORMATS[form],
        verify_connection=options.boolean("splunk-verify-connection", True),
        gzip=options.boolean("splunk-gzip", False),
        gzip_level=options.integer("splunk-gzip-level", -1, -1, 9),
        index_acknowledgment=options.boolean("splunk-index-acknowledgment", False),
        tls=tls if url.startswith("https:") else None,
    )
    for name, value in (("splunk-url", url), ("splunk-token", token)):
        if not value:
            raise Missing(f"splunk: {name} is expected")
    return target


def _url(options: Options) -> str:
    text = options.text("splunk-url")
    if not text:
        return ""
    try:
        found = address(text, ("http", "https"))
        if not found.host:
            raise ValueError
    except ValueError as error:
        raise options.invalid(
            "splunk-url", "splunk: expected format scheme://dns_name_or_ip:port for splunk-url"
        ) from error
    host = f"[{found.host}]" if ":" in found.host else found.host
    return f"{found.scheme}://{host}{f':{found.port}' if found.port else ''}{COLLECTOR}"

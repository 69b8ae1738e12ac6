"""Messages of authorization plugins (Docker's documentation, "Access authorization plugin").
Structs name the fields and have no behaviour.
"""

from __future__ import annotations

import msgspec

from engine.wire.plugins import PluginAnswer


class AuthzRequest(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, omit_defaults=True):
    """POST /AuthZPlugin.AuthZReq, without RequestBody (base64), which `plugins/authz.py` adds.

    AuthZRes has these fields, too, and those of `AuthzResponse`.
    """

    user: str = ""
    user_auth_n_method: str = msgspec.field(default="", name="UserAuthNMethod")
    request_method: str
    request_uri: str
    request_headers: dict[str, str]
    request_peer_certificates: list[bytes] | None = None
    """Base64 of certificates in PEM."""


class AuthzResponse(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """What POST /AuthZPlugin.AuthZRes adds, without ResponseBody (base64)."""

    response_status_code: int
    response_headers: dict[str, str]


class AuthzAnswer(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """The answer to both. `err` is set if the plugin could not decide."""

    allow: bool = False
    msg: str | None = None
    """Why not: the client is shown it."""

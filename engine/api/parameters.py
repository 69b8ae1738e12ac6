"""Query parameters and JSON bodies of requests, parsed and checked for handlers. Every error
message names the parameter and the value.

Where clients and the API's documentation differ, `docs/COMPATIBILITY.md` says what is done. Of a
parameter that is given twice the first value counts.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from engine.api.versions.change import Flag
from engine.common import booleans, times
from engine.common.pruning import Selection
from engine.errors import InvalidParameter, decoding_reason
from engine.http.messages import Headers, Query, Request
from engine.images.credentials import NOBODY, Credentials, registry_auth
from engine.wire.containers import FROM_OLDER

T = TypeVar("T")

BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of a JSON body, unless the caller says otherwise."""

FILTERS_LIMIT = 10_000
"""Values in all filters of one request."""

_FALSE = frozenset(("", "0", "no", "false", "none"))
_INT64 = range(-(1 << 63), 1 << 63)

Filters = dict[str, list[str]]
"""Requested values by filter name. An object must match one value of every name."""


def boolean(query: Query, name: str, default: bool = False) -> bool:
    """True for anything but 0, no, false, none (in any case) and the empty text, as in Docker."""
    text = query.get(name)
    return default if text is None else text.strip().lower() not in _FALSE


def strict_boolean(query: Query, name: str) -> bool:
    """A boolean as Go's ParseBool reads it; False when absent or empty. Raises InvalidParameter."""
    text = query.get(name, "")
    if text and text not in booleans.WORDS:
        raise InvalidParameter(f"invalid value for {name}: {text[:100]!r} is not a boolean")
    return booleans.WORDS.get(text, False)


def integer(
    query: Query, name: str, default: int | None = None, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """A decimal 64-bit integer; `default` when it is absent or empty. Without a default it is
    required.
    """
    text = query.get(name, "")
    if not text:
        if default is None:
            raise InvalidParameter(f"missing parameter: {name}")
        return default
    value = _integer(text)
    if value is None:
        raise InvalidParameter(f"invalid value for {name}: {text!r} is not a 64-bit integer")
    if minimum is not None and value < minimum:
        raise InvalidParameter(f"invalid value for {name}: {value} is less than {minimum}")
    if maximum is not None and value > maximum:
        raise InvalidParameter(f"invalid value for {name}: {value} is more than {maximum}")
    return value


def required(query: Query, name: str) -> str:
    """A parameter that must be present and not empty."""
    text = query.get(name, "")
    if not text:
        raise InvalidParameter(f"missing parameter: {name}")
    return text


def timestamp(query: Query, name: str) -> int:
    """Nanoseconds since the epoch; 0 when absent or empty.

    Unix seconds (with fraction), RFC 3339, or a duration ago.
    """
    text = query.get(name, "")
    if not text:
        return 0
    try:
        return times.parse_timestamp(text, time.time_ns())
    except (ValueError, OverflowError):
        raise InvalidParameter(f"invalid value for {name}: {text!r} is not a timestamp") from None


def filters(query: Query, allowed: Collection[str], name: str = "filters") -> Filters:
    """The filters, from `{"label":["a=b"]}` or `{"label":{"a=b":true}}`.

    A value that is false is refused: without it the filter would select more.
    """
    text = query.get(name, "")
    if not text:
        return {}
    try:
        document = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(f"invalid {name}: not JSON: {decoding_reason(error)}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidParameter(f"invalid {name}: a JSON object is expected")
    selected: Filters = {}
    for key, values in document.items():
        if key not in allowed:
            raise InvalidParameter(f"Invalid filter '{key}'")
        if isinstance(values, dict) and all(isinstance(flag, bool) for flag in values.values()):
            if refused := [value for value, flag in values.items() if not flag]:
                raise InvalidParameter(
                    f"invalid {name}: '{key}' has false for {refused[0][:100]!r}: it takes only true"
                )
            chosen = list(values)
        elif isinstance(values, list) and all(isinstance(value, str) for value in values):
            chosen = values
        elif values is None:
            chosen = []
        else:
            raise InvalidParameter(f"invalid {name}: '{key}' takes an array of strings or an object of booleans")
        if chosen:
            selected[key] = chosen
    if sum(map(len, selected.values())) > FILTERS_LIMIT:
        raise InvalidParameter(f"invalid {name}: more than {FILTERS_LIMIT} values")
    return selected


def prune_selection(query: Query, *allowed: str) -> Selection:
    """The filters of a prune. `allowed` are those that it may have besides `label` and `label!`.

    Raises InvalidParameter for another, and for a time that cannot be read.
    """
    found = filters(query, {"label", "label!", *allowed})
    wanted, unwanted = found.pop("label", ()), found.pop("label!", ())
    if len(found.get("until", ())) > 1:
        raise InvalidParameter("Invalid filter 'until': more than one value")
    until_ns = filter_time(found, "until")
    found.pop("until", None)
    return Selection(until_ns=until_ns, labels=tuple(wanted), not_labels=tuple(unwanted), others=found)


def filter_time(found: Filters, name: str) -> int:
    """A filter such as `until`, in nanoseconds since the epoch: the earliest of its values; 0 when
    absent.
    """
    now, values = time.time_ns(), []
    for text in found.get(name, ()):
        try:
            values.append(times.parse_timestamp(text, now))
        except (ValueError, OverflowError):
            reason = "neither a duration nor a timestamp"
            raise InvalidParameter(f"Invalid filter '{name}={text[:100]}': {reason}") from None
    return min(values, default=0)


def filter_boolean(found: Filters, name: str) -> bool | None:
    """A filter such as `dangling` that means true or false; None when absent."""
    values = found.get(name)
    if not values:
        return None
    value = booleans.FILTER_WORDS.get(values[0])
    if value is None or len(set(values)) > 1:
        raise InvalidParameter(f"Invalid filter '{name}={values[-1]}'")
    return value


def filter_integer(found: Filters, name: str) -> int:
    """The largest value of a filter such as `stars`; 0 when absent."""
    largest = 0
    for text in found.get(name, ()):
        value = _integer(text)
        if value is None:
            raise InvalidParameter(f"Invalid filter '{name}={text}'")
        largest = max(largest, value)
    return largest


def accepted(headers: Headers, offers: Sequence[str]) -> str:
    """The media type among `offers` that the Accept header prefers; empty when it names none of
    them. Of equal ones the first offer counts. Wildcards do not name a type.
    """
    best, weight = "", 0.0
    given: dict[str, float] = {}
    for part in ",".join(headers.get_all("accept")).split(","):
        name, *options = part.split(";")
        given[name.strip().lower()] = _quality(options)
    for offer in offers:
        if given.get(offer, 0.0) > weight:
            best, weight = offer, given[offer]
    return best


def _quality(options: Sequence[str]) -> float:
    """The weight of an entry of Accept (RFC 9110, 12.4.2). One that cannot be read is 0."""
    for option in options:
        name, _, value = option.partition("=")
        if name.strip().lower() == "q":
            text = value.strip()
            return float(text) if _QUALITY.fullmatch(text) else 0.0
    return 1.0


_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?", re.ASCII)


async def json_body(
    request: Request,
    of: type[T],
    limit: int = BODY_LIMIT,
    *,
    optional: bool = False,
    typed: bool = True,
    prepare: Callable[[Any], None] | None = None,
) -> T:
    """The body as a struct. Field names match in any case, null means absent, unknown fields are
    ignored, and bodies of older versions are upgraded.

    An empty body means all defaults if `optional`; otherwise it is refused. `typed`: the
    Content-Type of any other body is checked. `prepare` changes the decoded JSON in place first.

    If authorization plugins decide about the request, field names must be spelled as documented,
    because a plugin may not find a field in another spelling.
    """
    body = await request.body.read(limit)
    if not body.strip():
        if not optional:
            raise InvalidParameter("request body is empty: a JSON object is expected")
        body = b"{}"
    elif typed:
        check_json(request)
    upgrade = request.version.upgrade(of) if request.version is not None else None
    return decode_json(body, of, upgrade, prepare, exact=request.authorization is not None)


def credentials(request: Request) -> Credentials:
    """Those of X-Registry-Auth. Raises InvalidParameter where the version has it so."""
    try:
        return registry_auth(request.headers.get("x-registry-auth"))
    except InvalidParameter:
        if request.version.has(Flag.UNREADABLE_AUTH):
            return NOBODY
        raise


def check_json(request: Request) -> None:
    """Raises InvalidParameter, in Docker's words, if the Content-Type is not that of JSON. A page
    of another site can make a browser send none, or that of a form or of text, but not this one.
    """
    given = request.headers.get("content-type")
    if not given:
        raise InvalidParameter("malformed Content-Type header (): mime: no media type: must be 'application/json'")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise InvalidParameter(f"unsupported Content-Type header ({given[:100]}): must be 'application/json'")


def decode_json(
    body: bytes,
    of: type[T],
    upgrade: Callable[[dict[str, Any]], None] | None = None,
    prepare: Callable[[Any], None] | None = None,
    *,
    exact: bool = False,
) -> T:
    """As `json_body`, for JSON in headers or query parameters. `exact`: refuse field names that
    differ from the documented ones in case.
    """
    try:
        raw = msgspec.json.decode(body)
        if prepare is not None:
            prepare(raw)
        kind: Any = of
        raw = _plan(kind, exact)(raw if raw is not None else _zero(inspect.type_info(kind)), "")
        if isinstance(raw, dict):
            raw.pop(FROM_OLDER, None)  # not the client's to say
            if upgrade is not None:
                upgrade(raw)
        return msgspec.convert(raw, of)
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeError) as error:
        raise InvalidParameter(f"invalid JSON body: {decoding_reason(error)}") from None


# --- reading a body as Go's decoder would ---------------------------------------------------------
#
# A plan is made once per type. It is a function of a JSON value and its place in the document, and
# returns the value without nulls and with the field names of structs spelled as in the type. Values
# that do not fit the type are left as they are: msgspec refuses them.

_Step = Callable[[Any, str], Any]


def _integer(text: str) -> int | None:
    if len(text) > 20 or not text.isascii() or not text.removeprefix("-").removeprefix("+").isdigit():
        return None
    try:
        value = int(text)
    except ValueError:
        return None
    return value if value in _INT64 else None


def _as_is(value: Any, _place: str) -> Any:
    return value


def _int64(value: Any, place: str) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not (-(2**63) <= value < 2**63):
        raise InvalidParameter(f"invalid JSON body: {place}: {value} is not a 64-bit integer")
    return value


class _Known(dict[type, list[_Step]]):
    """The steps of structs that a plan has already, for recursive types."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        """See `decode_json`."""


@functools.cache
def _plan(of: Any, exact: bool) -> _Step:
    return _step(inspect.type_info(of), _Known(exact))


def exact_names(names: Collection[str]) -> Callable[[str, str], None]:
    """A check of the key of an object, at a place. Raises InvalidParameter for one that differs
    from one of these names in case only, as Unicode and Go's decoder see it.
    """
    documented = {name.casefold(): name for name in names}

    def check(key: str, place: str) -> None:
        name = documented.get(key.casefold(), key)
        if name != key:
            raise InvalidParameter(
                f"invalid JSON body: {place + '.' if place else ''}{key[:100]}: authorization plugins "
                f"are in use, so the field must be spelled {name}"
            )

    return check


def _step(kind: inspect.Type, known: _Known) -> _Step:
    if isinstance(kind, inspect.StructType):
        return _struct_step(kind, known)
    if isinstance(kind, inspect.DictType):
        return _dict_step(kind.value_type, known)
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        return _list_step(kind.item_type, known)
    if isinstance(kind, inspect.UnionType):
        return _union_step(kind, known)
    return _int64 if isinstance(kind, inspect.IntType) else _as_is


def _struct_step(kind: inspect.StructType, known: _Known) -> _Step:
    if kind.cls in known:  # a recursive type: its step is looked up when it is needed
        later = known[kind.cls]
        return lambda value, place: later[0](value, place)  # noqa: PLW0108 (the list is filled later)
    known[kind.cls] = itself = []
    names: dict[str, str] = {field.encode_name.lower(): field.encode_name for field in kind.fields}
    steps = {field.encode_name: _step(field.type, known) for field in kind.fields}
    check = exact_names(steps) if known.exact else None

    def step(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            return value
        body: dict[str, Any] = value
        shape: dict[str, Any] = {}
        for key, item in body.items():
            if check is not None:
                check(key, place)
            name = key if key in steps else names.get(key.lower(), key)
            if item is None or (name != key and name in body):
                continue
            inner = steps.get(name)
            shape[name] = inner(item, f"{place}.{name}" if place else name) if inner is not None else item
        return shape

    itself.append(step)
    return step


def _zero(kind: inspect.Type) -> Any:
    """The value that Go's decoder stores for a null inside an array or map of this type. None if
    null is a value of the type.
    """
    if isinstance(kind, inspect.StrType):
        return ""
    if isinstance(kind, inspect.BoolType):
        return False
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return 0
    if isinstance(kind, (inspect.StructType, inspect.DictType)):
        return {}
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        return []
    return None


def _dict_step(values: inspect.Type, known: _Known) -> _Step:
    inner, zero = _step(values, known), _zero(values)

    def step(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: zero if item is None else inner(item, f"{place}.{key}") for key, item in value.items()}

    return step


def _list_step(items: inspect.Type, known: _Known) -> _Step:
    inner, zero = _step(items, known), _zero(items)

    def step(value: Any, place: str) -> Any:
        if not isinstance(value, list):
            return value
        return [zero if item is None else inner(item, place) for item in value]

    return step


def _union_step(kind: inspect.UnionType, known: _Known) -> _Step:
    of_dict: _Step = _as_is
    of_list: _Step = _as_is
    of_number: _Step = _as_is
    for choice in kind.types:
        if isinstance(choice, (inspect.StructType, inspect.DictType)):
            of_dict = _step(choice, known)
        elif isinstance(choice, (inspect.ListType, inspect.VarTupleType)):
            of_list = _step(choice, known)
        elif isinstance(choice, inspect.IntType):
            of_number = _int64

    def step(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return of_dict(value, place)
        return of_list(value, place) if isinstance(value, list) else of_number(value, place)

    return step

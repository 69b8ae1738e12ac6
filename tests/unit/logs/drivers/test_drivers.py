"""The table of log drivers: which one a container gets, what a create and the daemon refuse, and
the plan of a start.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import Config
from engine.errors import InvalidParameter, ServerError
from engine.logs import deliveries, drivers
from engine.logs.deliveries import Awslogs, Delivery, Fluentd, Gelf, Journald, Splunk, Syslog, Tls
from engine.logs.drivers import Plan
from engine.logs.facts import Facts
from engine.logs.options import Missing
from engine.logs.targets import JsonFile, Spool, Target
from engine.monitor import messages
from engine.wire.containers import LogConfig

FACTS = Facts(
    id="0123456789abcdef" * 4,
    name="web",
    image_id="sha256:" + "f" * 64,
    image_name="busybox",
    path="sh",
    args=("-c", "x"),
    created=5,
    labels={"tier": "front", "b": "<&>"},
    environment=("X=y", "HOME=/root"),
    hostname="host1",
    pid=42,
    log_path="/c/1-json.log",
    spool="/logs/1",
)
ID = "0123456789ab"
FILES = ("json-file", "local")
REQUIRED = {
    "awslogs": {"awslogs-group": "g"},
    "fluentd": {},
    "gelf": {"gelf-address": "udp://h:1"},
    "journald": {},
    "json-file": {},
    "local": {},
    "splunk": {"splunk-url": "https://h:8088", "splunk-token": "t"},
    "syslog": {},
}
REMOTE = sorted(REQUIRED.keys() - set(FILES))
CACHED = sorted(set(REMOTE) - {"journald"})
WITH_ATTRIBUTES = sorted(REQUIRED.keys() - {"awslogs"})
CACHE = 5 * (20 << 20)


def log(kind: str = "", **options: str) -> LogConfig:
    """Options with underscores for dashes, besides those that the driver requires."""
    given_ = REQUIRED.get(kind, {}) | {name.replace("_", "-"): value for name, value in options.items()}
    return LogConfig(type=kind, config=given_)


def delivery(kind: str, facts: Facts = FACTS, **options: str) -> Delivery:
    found = drivers.plan(log(kind, **options), facts).delivery
    assert found is not None
    return found


def refusal(kind: str, **options: str) -> str:
    with pytest.raises(InvalidParameter) as caught:
        drivers.validate(log(kind, **options))
    with pytest.raises(ServerError) as failed:
        drivers.plan(log(kind, **options), FACTS)
    assert failed.value.message == f"failed to initialize logging driver: {caught.value.message}"
    return caught.value.message


# --- names ----------------------------------------------------------------------------------------


def test_the_table() -> None:
    assert drivers.DRIVERS.keys() == REQUIRED.keys()
    assert drivers.names(journal=True) == (
        "awslogs", "fluentd", "gelf", "journald", "json-file", "local", "none", "splunk", "syslog",
    )  # fmt: skip
    assert set(drivers.names(journal=True)) - set(drivers.names(journal=False)) == {"journald"}
    for kind in REQUIRED:
        assert drivers.remote(log(kind)) == (kind in REMOTE) and drivers.readable(log(kind))
    assert not drivers.remote(log("none")) and not drivers.readable(log("none"))
    assert not drivers.remote(log()) and drivers.readable(log())


@pytest.mark.parametrize("kind", ["etwlogs", "gcplogs", "json-file ", "syslog\n", "-x", "é", "/x"])
def test_drivers_that_are_not_there(kind: str) -> None:
    assert refusal(kind, x="y") == f"logger: no log driver named '{kind}' is registered"
    assert not drivers.readable(log(kind)) and not drivers.remote(log(kind))


@pytest.mark.parametrize("kind", REQUIRED)
def test_options_that_are_unknown(kind: str) -> None:
    drivers.validate(log(kind))
    for name in ("x", "Mode", "syslog-adress", "cache-tag", "max-buffer", "gcp-project", ""):
        message = refusal(kind, **{name: "y"})
        assert message == f"unknown log opt '{name}' for {kind} log driver"
    others = {name for each in drivers.DRIVERS.values() for name in each.options} - drivers.DRIVERS[kind].options
    for name in others:
        assert refusal(kind, **{name: "1"}) == f"unknown log opt '{name}' for {kind} log driver"


def test_none_accepts_anything_and_keeps_nothing() -> None:
    found = log("none", anything="goes", mode="x", tag="{{")
    drivers.validate(found)
    assert drivers.plan(found, FACTS) == Plan(None)


# --- options of all drivers -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", REQUIRED)
def test_common_options(kind: str) -> None:
    for options in (
        {"mode": ""},
        {"mode": "blocking"},
        {"mode": "non-blocking"},
        {"mode": "non-blocking", "max_buffer_size": "4m"},
        {"cache_disabled": ""},
        {"cache_disabled": "true"},
        {"cache_max_size": "1m", "cache_max_file": "3", "cache_compress": "false"},
        {"tag": ""},
        {"tag": "{{.Name}}"},
    ):
        drivers.validate(log(kind, **options))
    named = f"for {kind} log driver)"
    assert refusal(kind, mode="maybe") == f"logger: logging mode not supported: maybe (log opt 'mode' {named}"
    only = "logger: max-buffer-size option is only supported with 'mode=non-blocking'"
    assert refusal(kind, max_buffer_size="1m") == f"{only} (log opt 'max-buffer-size' {named}"
    assert refusal(kind, mode="blocking", max_buffer_size="1m") == f"{only} (log opt 'max-buffer-size' {named}"
    invalid = f"invalid value '{{}}' for log opt 'max-buffer-size' for {kind} log driver: {{}}"
    for value, why in (("much", "invalid size: 'much'"), ("", "invalid size: ''"), ("0", "must be a positive number")):
        assert refusal(kind, mode="non-blocking", max_buffer_size=value) == invalid.format(value, why)
    assert refusal(kind, cache_disabled="x") == "invalid value for option cache-disabled: x"
    assert refusal(kind, tag="{{.Wrong}}") == (
        f"invalid value '{{{{.Wrong}}}}' for log opt 'tag' for {kind} log driver: "
        "template: {{.Wrong}}: can't evaluate field Wrong"
    )


@pytest.mark.parametrize("kind", CACHED)
def test_options_of_the_cache(kind: str) -> None:
    for name, value, why in (
        ("cache-max-size", "x", "invalid size: 'x'"),
        ("cache-max-size", "0", "cache-max-size must be a positive number"),
        ("cache-max-file", "0", "cache-max-file cannot be less than 1"),
        ("cache-max-file", "1001", "cache-max-file cannot be more than 1000"),
        ("cache-max-file", "1", "compression cannot be enabled when max file count is 1"),
        ("cache-compress", "x", "neither true nor false"),
    ):
        message = refusal(kind, **{name: value})
        assert message == f"invalid value '{value}' for log opt '{name}' for {kind} log driver: {why}"
    drivers.validate(log(kind, cache_max_file="1", cache_compress="false"))


@pytest.mark.parametrize("kind", ["journald", *FILES])
def test_a_cache_that_is_not_there(kind: str) -> None:
    """dockerd accepts its options, and reads the log itself."""
    found = log(kind, cache_max_size="x", cache_disabled="true")
    assert drivers.readable(found)
    assert drivers.plan(found, FACTS) == drivers.plan(log(kind), FACTS)


@pytest.mark.parametrize("kind", WITH_ATTRIBUTES)
def test_options_of_attributes(kind: str) -> None:
    drivers.validate(log(kind, labels="a,b", labels_regex="^a", env="A", env_regex="(?i)b"))
    for name in ("labels-regex", "env-regex"):
        assert refusal(kind, **{name: "("}) == (
            f"invalid value '(' for log opt '{name}' for {kind} log driver: error parsing regexp: missing ): ("
        )


def test_awslogs_has_no_attributes() -> None:
    for name in ("labels", "labels-regex", "env", "env-regex"):
        assert refusal("awslogs", **{name: "a"}) == f"unknown log opt '{name}' for awslogs log driver"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("awslogs", "must specify a value for log opt 'awslogs-group'"),
        ("gelf", "gelf-address is a required parameter"),
        ("splunk", "splunk: splunk-url is expected"),
    ],
)
def test_required_options(kind: str, words: str) -> None:
    with pytest.raises(Missing) as caught:
        drivers.validate(LogConfig(type=kind))
    assert caught.value.message == words


def test_a_mistake_is_reported_before_an_option_that_is_missing() -> None:
    for kind in ("awslogs", "gelf", "splunk"):
        for options in ({"x": "y"}, {"tag": "{{"}, {"mode": "x"}, {"cache-disabled": "x"}):
            with pytest.raises(InvalidParameter) as caught:
                drivers.validate(LogConfig(type=kind, config=options))
            assert not isinstance(caught.value, Missing)


# --- which driver ---------------------------------------------------------------------------------


SYSLOG = LogConfig(type="syslog", config={"syslog-address": "udp://h", "tag": "t", "cache-disabled": "true"})


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (LogConfig(), SYSLOG),
        (LogConfig(type="syslog"), SYSLOG),
        (
            LogConfig(config={"tag": "own", "env": "A"}),
            LogConfig(type="syslog", config={**SYSLOG.config, "tag": "own", "env": "A"}),
        ),
        (LogConfig(type="syslog", config={"tag": ""}), LogConfig(type="syslog", config={**SYSLOG.config, "tag": ""})),
        (LogConfig(type="json-file"), LogConfig(type="json-file")),
        (LogConfig(type="json-file", config={"tag": "x"}), LogConfig(type="json-file", config={"tag": "x"})),
        (LogConfig(type="local"), LogConfig(type="local")),
        (LogConfig(type="journald"), LogConfig(type="journald")),
        (LogConfig(type="none"), LogConfig(type="none")),
        (LogConfig(type="etwlogs"), LogConfig(type="etwlogs")),
        (LogConfig(type="plugin"), LogConfig(type="plugin", config={"cache-disabled": "true"})),
        (LogConfig(type="fluentd"), LogConfig(type="fluentd", config={"cache-disabled": "true"})),
        (
            LogConfig(type="fluentd", config={"cache-disabled": "false"}),
            LogConfig(type="fluentd", config={"cache-disabled": "false"}),
        ),
    ],
)
def test_the_defaults_of_the_daemon(given_: LogConfig, expected: LogConfig) -> None:
    assert drivers.resolve(given_, SYSLOG) == expected


def test_the_default_without_options() -> None:
    default = drivers.of_daemon(Config())
    assert default == LogConfig(type="json-file")
    assert drivers.resolve(LogConfig(), default) == LogConfig(type="json-file")
    assert drivers.resolve(LogConfig(config={"max-size": "1m"}), default) == log("json-file", max_size="1m")


def test_the_options_of_the_daemon() -> None:
    config = Config(log_driver="syslog", log_opts=("syslog-address=tcp://h", "tag=a=b", "env="))
    assert drivers.of_daemon(config) == LogConfig(
        type="syslog", config={"syslog-address": "tcp://h", "tag": "a=b", "env": ""}
    )
    drivers.check_daemon(config)


@pytest.mark.parametrize(
    ("driver", "options", "words"),
    [
        (
            "syslog",
            ("syslog-address=corrupted:42",),
            "Failed to set log opts: syslog-address should be in form proto://address, got corrupted:42",
        ),
        (
            "fluentd",
            ("fluentd-address=corrupted:c",),
            'Failed to set log opts: invalid fluentd-address corrupted:c: invalid port "c"',
        ),
        ("gcplogs", (), "Failed to set log opts: logger: no log driver named 'gcplogs' is registered"),
        ("", ("max-size=x",), "Failed to set log opts: invalid value 'x' for log opt 'max-size' for json-file"),
        ("json-file", ("x=y",), "Failed to set log opts: unknown log opt 'x' for json-file log driver"),
        ("local", ("tag={{",), "Failed to set log opts: invalid value '{{' for log opt 'tag' for local log driver: "),
        ("gelf", ("gelf-compression-level=x",), "Failed to set log opts: invalid value 'x' for log opt 'gelf-"),
    ],
)
def test_what_the_daemon_refuses(driver: str, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        drivers.check_daemon(Config(log_driver=driver, log_opts=options))
    assert caught.value.message.startswith(words)


@pytest.mark.parametrize("kind", ["none", *REQUIRED])
def test_the_daemon_may_leave_required_options_to_the_containers(kind: str) -> None:
    drivers.check_daemon(Config(log_driver=kind))
    drivers.check_daemon(Config(log_driver=kind, log_opts=("mode=non-blocking",)))


# --- plans ----------------------------------------------------------------------------------------


def test_json_file_is_the_default() -> None:
    for kind in ("", "json-file"):
        assert drivers.plan(log(kind), FACTS) == Plan(JsonFile("/c/1-json.log", 0, 1, b"", False))
    found = log("json-file", max_size="10m", max_file="3", mode="non-blocking", max_buffer_size="4m")
    assert drivers.plan(found, FACTS) == Plan(JsonFile("/c/1-json.log", 10_000_000, 3))
    found = log("json-file", max_size="10m", max_file="3", compress="true")
    assert drivers.plan(found, FACTS) == Plan(JsonFile("/c/1-json.log", 10_000_000, 3, b"", True))


def test_local_rotates_and_compresses() -> None:
    assert drivers.plan(log("local"), FACTS) == Plan(JsonFile("/c/1-json.log", 20 << 20, 5, b"", True, True))
    found = log("local", max_size="1k", max_file="2", compress="false")
    assert drivers.plan(found, FACTS) == Plan(JsonFile("/c/1-json.log", 1000, 2, exact=True))


@pytest.mark.parametrize("kind", FILES)
def test_entries_carry_the_attributes_that_the_options_name(kind: str) -> None:
    def attrs(**options: str) -> bytes:
        target = drivers.plan(log(kind, **options), FACTS).target
        assert isinstance(target, JsonFile)
        return target.attrs

    assert attrs() == b"" and attrs(tag="") == b""
    assert attrs(labels="b,tier", env="X") == b'{"X":"y","b":"\\u003c\\u0026\\u003e","tier":"front"}'
    assert attrs(labels_regex="^t", env_regex="^H") == b'{"HOME":"/root","tier":"front"}'
    assert attrs(tag="{{.Name}}/{{.ID}}") == f'{{"tag":"web/{ID}"}}'.encode()
    with pytest.raises(ServerError, match=f"failed to initialize logging driver: {kind} has no file to write to"):
        drivers.plan(log(kind), msgspec.structs.replace(FACTS, log_path=""))


@pytest.mark.parametrize("kind", WITH_ATTRIBUTES)
def test_attributes_are_limited(kind: str) -> None:
    large = msgspec.structs.replace(FACTS, labels={"a": "x" * 40_000})
    drivers.plan(log(kind), large)
    with pytest.raises(ServerError, match=r"failed to initialize logging driver: .*per log entry, more than 32768"):
        drivers.plan(log(kind, labels="a"), large)


def test_the_document_of_a_delivery() -> None:
    found = delivery("syslog", syslog_address="tcp://h", labels="tier", env="X", tag="{{.Name}}")
    assert found == Delivery(
        id=FACTS.id,
        name="web",
        tag="web",
        target=Syslog("tcp", "h"),
        attributes={"tier": "front", "X": "y"},
        host="host1",
        image_id=FACTS.image_id,
        image_name="busybox",
        command="sh -c x",
        created=5,
        pid=42,
        blocking=True,
        quota=CACHE,
        keep=True,
    )


@pytest.mark.parametrize(
    ("kind", "options", "target"),
    [
        ("syslog", {}, Syslog()),
        ("syslog", {"address": "unix:///dev/log"}, Syslog("unix", port=0, path="/dev/log")),
        (
            "syslog",
            {"syslog_address": "tcp+tls://h", "syslog_tls_ca_cert": "/ca", "syslog_tls_skip_verify": ""},
            Syslog("tcp+tls", "h", tls=Tls("/ca", skip_verify=True)),
        ),
        ("journald", {}, Journald()),
        ("gelf", {"gelf_address": "tcp://h:1"}, Gelf("tcp", "h", 1)),
        ("fluentd", {"fluentd_address": "h", "fluentd_async": ""}, Fluentd(host="h")),
        ("splunk", {}, Splunk(url="https://h:8088/services/collector/event/1.0", token="t", tls=Tls())),
        ("awslogs", {}, Awslogs(region="", group="g", stream=FACTS.id)),
    ],
)
def test_targets(kind: str, options: dict[str, str], target: Any) -> None:
    found = delivery(kind, **options)
    assert found.target == target
    assert deliveries.decode(deliveries.encode(found)) == found
    assert found.target.destination[:2] == (kind, found.target.address)


def test_a_document_of_a_later_version_is_read() -> None:
    document = deliveries.encode(delivery("gelf")).replace(b'"driver":', b'"later":[1],"driver":')
    assert deliveries.decode(document) == delivery("gelf")
    with pytest.raises(msgspec.MsgspecError):
        deliveries.decode(document.replace(b'"gelf"', b'"papyrus"'))


@pytest.mark.parametrize("kind", REMOTE)
def test_spools(kind: str) -> None:
    def spool(**options: str) -> Target | None:
        found = drivers.plan(log(kind, **options), FACTS)
        assert found.delivery is not None and isinstance(found.target, Spool)
        assert (found.delivery.blocking, found.delivery.quota) == (found.target.blocking, found.target.quota)
        return found.target

    assert spool() == spool(mode="blocking") == Spool("/logs/1", 20 << 20, 5, CACHE, True, True)
    assert spool(mode="non-blocking") == Spool("/logs/1", 20 << 20, 5, CACHE, False, True)
    assert spool(mode="non-blocking", max_buffer_size="4m") == Spool("/logs/1", 20 << 20, 5, 4 << 20, False, True)


@pytest.mark.parametrize("kind", CACHED)
def test_the_cache(kind: str) -> None:
    found = drivers.plan(log(kind, cache_max_size="1m", cache_max_file="3", cache_compress="false"), FACTS)
    assert found.target == Spool("/logs/1", 1_000_000, 3, 3_000_000)
    assert found.delivery is not None and found.delivery.keep
    disabled = log(kind, cache_disabled="true")
    assert not drivers.readable(disabled)
    found = drivers.plan(disabled, FACTS)
    assert found.target == Spool("/logs/1", 1 << 20, 1, CACHE)
    assert found.delivery is not None and not found.delivery.keep


@pytest.mark.parametrize("kind", REQUIRED)
@pytest.mark.parametrize("options", [{}, {"mode": "non-blocking"}, {"cache-disabled": "true"}, {"tag": "x"}])
def test_a_target_survives_its_message(kind: str, options: dict[str, str]) -> None:
    target = drivers.plan(log(kind, **options), FACTS).target
    assert msgspec.msgpack.decode(messages.encode(target), type=Target) == target


def test_a_target_of_an_earlier_version() -> None:
    """A daemon of the last version sends no `compress`."""
    sent = msgspec.msgpack.encode(["json-file", "/a", 1, 2, b""])
    assert msgspec.msgpack.decode(sent, type=Target) == JsonFile("/a", 1, 2)


@pytest.mark.parametrize("kind", REMOTE)
def test_tags(kind: str) -> None:
    default = FACTS.id if kind == "awslogs" else ID
    assert delivery(kind).tag == default
    assert delivery(kind, tag="").tag == ("" if kind == "splunk" else default)
    assert delivery(kind, tag="{{.DaemonName}}/{{.Name}}").tag == "docker/web"
    with pytest.raises(ServerError) as caught:
        drivers.plan(log(kind, tag="{{index .ContainerArgs 9}}"), FACTS)
    assert caught.value.message == (
        f"failed to initialize logging driver: log opt 'tag' for {kind} log driver: template: index out of range: 9"
    )


def test_the_stream_of_awslogs() -> None:
    def stream(**options: str) -> str:
        target = delivery("awslogs", **options).target
        assert isinstance(target, Awslogs)
        return target.stream

    assert stream() == FACTS.id
    assert stream(tag="{{.Name}}") == "web"
    assert stream(tag="{{.Name}}", awslogs_stream="own") == "own"
    for options in ({"tag": "busybox:1"}, {"awslogs-stream": "a*"}, {"tag": "x" * 513}):
        with pytest.raises(ServerError, match=r"initialize.*-stream' and 'tag'.*is not the name of a stream"):
            drivers.plan(log("awslogs", **options), FACTS)


def test_the_region_of_awslogs() -> None:
    elsewhere = msgspec.structs.replace(FACTS, region="eu-west-1")
    for options, region in (({}, "eu-west-1"), ({"awslogs-region": "us-east-1"}, "us-east-1")):
        target = delivery("awslogs", elsewhere, **options).target
        assert isinstance(target, Awslogs) and target.region == region
    with pytest.raises(ServerError, match=r"initialize logging driver: AWS_REGION is not a region: 'a\.b'"):
        drivers.plan(log("awslogs"), msgspec.structs.replace(FACTS, region="a.b"))


def test_a_host_without_a_journal() -> None:
    bare = msgspec.structs.replace(FACTS, journal=False)
    drivers.validate(log("journald"))
    with pytest.raises(ServerError) as caught:
        drivers.plan(log("journald"), bare)
    assert caught.value.message == "failed to initialize logging driver: journald is not enabled on this host"
    assert drivers.plan(log("syslog"), bare) == drivers.plan(log("syslog"), FACTS)


def test_details() -> None:
    facts = Facts(id=FACTS.id, name="web", labels={"b": "x y", "a": "1=2"}, environment=["PATH=/bin:/sbin", "Z=é"])
    assert drivers.details(log(), facts) == " "
    assert drivers.details(log(labels="a,b", env="PATH,Z"), facts) == "PATH=%2Fbin%3A%2Fsbin,Z=%C3%A9,a=1%3D2,b=x+y "
    assert drivers.details(log(env="A"), facts) == " "
    assert drivers.details(log("fluentd", labels="a", tag="{{.Name}}"), facts) == "a=1%3D2,tag=web "
    assert drivers.details(log("fluentd", labels="a", tag="{{index .ContainerArgs 1}}"), facts) == "a=1%3D2 "
    assert drivers.details(log("none"), facts) == " "


_NAMES = [
    *sorted({name for each in drivers.DRIVERS.values() for name in each.options} | drivers.CACHE),
    "mode", "max-buffer-size", "tag", "labels", "labels-regex", "env", "env-regex", "x",
]  # fmt: skip
_VALUES = ["", "1", "true", "10m", "1s", "udp://h:1", "tcp://h:1", "https://h", "/a", "non-blocking", "{{.ID}}", "gzip"]


@given(
    st.sampled_from([*REQUIRED, "none", "x"]),
    st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_VALUES) | st.text(max_size=8), max_size=5),
)
def test_any_configuration_is_planned_or_refused(kind: str, options: dict[str, str]) -> None:
    """What a create accepts, a start accepts too, but for a tag or a stream of this container."""
    found = log(kind, **options)
    try:
        drivers.validate(found)
    except InvalidParameter:
        with pytest.raises(ServerError):
            drivers.plan(found, FACTS)
        return
    try:
        plan = drivers.plan(found, FACTS)
    except ServerError as error:
        assert "tag" in error.message
        return
    assert (plan.delivery is not None) == drivers.remote(found)
    if plan.delivery is not None:
        assert deliveries.decode(deliveries.encode(plan.delivery)) == plan.delivery

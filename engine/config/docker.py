"""The keys of dockerd's configuration file, daemon.json of dockerd 29: which option each one sets,
which has no meaning here, and which values are refused.

A key that an option names (`declaration`) sets that option as it is, unless a function here reads
it. Empty values (null, "", 0, [] and {}) count as not set, as in dockerd; false does not.

Source: Docker's manual page dockerd(8), "Daemon configuration file".
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from engine.config.declaration import DEFAULT_BRIDGE, options

Fields = dict[str, Any]


class NoMeaning(NamedTuple):
    """A key whose every value is accepted and changes nothing."""

    why: str
    as_it_is: Any = None
    """The value that says what the engine does anyway, and is not worth a warning."""


class Refused(NamedTuple):
    """A key of which only these values are accepted, which change nothing."""

    accepted: tuple[Any, ...]
    why: str


def read(key: str, value: Any) -> Fields:
    """The options that a key sets, by their fields in `Config`. None for a key without meaning, and
    for an empty value. Their rules are not checked.

    Raises ValueError, whose text follows the key's name, for an unknown key and a refused value.
    """
    known = KEYS.get(key)
    if known is None:
        raise ValueError("is not known")
    if value is not False and value in (None, "", 0, [], {}):
        return {}
    if isinstance(known, NoMeaning):
        return {}
    _check_text(value)
    if isinstance(known, Refused):
        if value not in known.accepted or isinstance(value, bool) != isinstance(known.accepted[0], bool):
            raise ValueError(f"{_shown(value)}: {known.why}")
        return {}
    return known(value)


def in_order(keys: Iterable[str]) -> list[str]:
    """The order in which keys are read: what a later one sets overrides what an earlier one has
    set. `tlsverify` names files that other keys name as well, `debug` goes before the level.
    """
    return sorted(keys, key=lambda key: (key != "tlsverify", key == "debug"))


def _check_text(value: Any) -> None:
    """Raises ValueError for an escape such as \\ud800, half of a character, which Python's reader
    accepts.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f": {error.object[error.start]!r} is not a character") from error


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else repr(value)
    return json.dumps(value)


_PLAIN = re.compile(r"[\w./-][\w./:=@-]*")


def _want(value: Any, kind: type, name: str = "") -> Any:
    """The value, of this type. Raises ValueError."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name}: expected {_TYPES[kind]}".lstrip())
    return value


_TYPES = {str: "a string", int: "an integer", bool: "true or false", list: "an array", dict: "an object"}


def _texts(value: Any) -> list[str]:
    return [_want(each, str) for each in _want(value, list)]


def _pairs(value: Any, kind: type = str) -> list[tuple[str, Any]]:
    return [(name, _want(each, kind, name)) for name, each in _want(value, dict).items()]


def _hosts(value: Any) -> Fields:
    sockets, tcp = [], []
    for host in _texts(value):
        scheme, found, rest = host.partition("://")
        if not found and ":" in host and not host.startswith("/"):
            scheme, rest = "tcp", host
        if scheme == "unix" and rest.startswith("/"):
            sockets.append(rest)
        elif scheme == "fd":
            sockets.append(host)
        elif scheme == "tcp" and rest:
            tcp.append(rest.rstrip("/"))
        else:
            raise ValueError(f"{host!r}: must be unix:///PATH, tcp://HOST:PORT or fd://")
    # Without TLS, which `rules` allows on loopback only, dockerd needs no key more.
    return {"sockets": sockets, "tcp": tcp} | ({"insecure": True} if tcp else {})


def _tls(value: Any) -> Fields:
    if _want(value, bool):
        raise ValueError("true: is not enough, as it checks no client: set tlsverify")
    return {}


def _tls_verify(value: Any) -> Fields:
    """Files that no key names are where the docker command has them."""
    if not _want(value, bool):
        return {}
    place = os.environ.get("DOCKER_CERT_PATH") or os.path.expanduser("~/.docker")
    files = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem"}
    return {field: f"{place}/{name}" for field, name in files.items()}


def _debug(value: Any) -> Fields:
    return {"log_level": "debug"} if _want(value, bool) else {}


def _log_level(value: Any) -> Fields:
    others = {"trace": "debug", "warn": "warning", "fatal": "error", "panic": "error"}
    return {"log_level": others.get(_want(value, str), value)}


def _bridge(value: Any) -> Fields:
    return {"bridge": DEFAULT_BRIDGE if value == "docker0" else _want(value, str)}


def _default_runtime(value: Any) -> Fields:
    return {"runtime": "runc" if value == "io.containerd.runc.v2" else _want(value, str)}


NO_PIVOT = "--no-pivot"
"""The argument of `run` that NoPivotRoot sets (`runtime/runtimes.py`)."""


def _runtimes(value: Any) -> Fields:
    entries = []
    for name, entry in _pairs(value, dict):
        kind, options_ = entry.get("runtimeType", ""), entry.get("options", {})
        # `args`, which nvidia-ctk writes, is ignored by dockerd as well.
        if set(entry) - {"path", "runtimeArgs", "runtimeType", "options", "args"}:
            raise ValueError(f"{name}: has other keys than path, runtimeArgs, runtimeType and options")
        if kind not in ("", "io.containerd.runc.v2"):
            raise ValueError(f"{name}: runtimeType {kind}: only OCI runtimes can be run, as io.containerd.runc.v2")
        for option, given in _pairs(options_, object) if options_ else ():
            if option == "SystemdCgroup" and given is True:
                raise ValueError(f"{name}: SystemdCgroup: the engine makes cgroups itself")
            if option not in ("BinaryName", "SystemdCgroup", "NoPivotRoot"):
                raise ValueError(f"{name}: the option {option} is not supported")
            _want(given, str if option == "BinaryName" else bool, f"{name}: {option}")
        path = entry.get("path") or options_.get("BinaryName") or ""
        arguments = _texts(entry.get("runtimeArgs") or [])
        if kind and (arguments or "path" in entry):
            raise ValueError(f"{name}: has runtimeType, so path and runtimeArgs must not be given")
        if options_.get("NoPivotRoot"):
            arguments.append(NO_PIVOT)
        if not path:
            raise ValueError(f"{name}: has neither path nor BinaryName")
        entries.append(f"{name}={shlex.join([_want(path, str, name), *arguments])}")
    return {"runtimes": entries}


def _cdi(value: Any) -> Fields:
    """One empty name switches CDI off, as in dockerd."""
    return {"cdi_specs": [] if value == [""] else _texts(value)}


def _pools(value: Any) -> Fields:
    found = []
    for pool in _want(value, list):
        base, size = _want(pool, dict).get("base"), pool.get("size")
        if set(pool) != {"base", "size"}:
            raise ValueError("each must have base and size")
        found.append(f"base={_want(base, str)},size={_want(size, int)}")
    return {"address_pools": found}


def _log_opts(value: Any) -> Fields:
    return {"log_opts": [f"{name}={each}" for name, each in _pairs(value)]}


def _network_opts(value: Any) -> Fields:
    return {
        "network_opts": [
            f"{driver}={name}={each}" for driver, given in _pairs(value, dict) for name, each in _pairs(given)
        ]
    }


def _features(value: Any) -> Fields:
    return {"features": [f"{name}={_shown(each)}" for name, each in _pairs(value, bool)]}


def _ulimits(value: Any) -> Fields:
    found = []
    for name, entry in _pairs(value, dict):
        if not {"Soft", "Hard"} <= set(entry) <= {"Name", "Soft", "Hard"} or entry.get("Name", name) != name:
            raise ValueError(f"{name}: must have Name, Soft and Hard")
        found.append(f"{name}={_want(entry['Soft'], int, name)}:{_want(entry['Hard'], int, name)}")
    return {"ulimits": found}


def _proxies(value: Any) -> Fields:
    found: Fields = {}
    for name, url in _pairs(value):
        if name not in ("http-proxy", "https-proxy", "no-proxy"):
            raise ValueError(f"{name}: is not known")
        found[name.replace("-", "_")] = url
    return found


def _builder(value: Any) -> Fields:
    found: Fields = {}
    for part, entries in _pairs(value, dict):
        if part == "entitlements":
            found |= _entitlements(entries)
        elif part == "gc":
            found |= _collection(entries)
        elif part == "history":
            found |= _history(entries)
        else:
            raise ValueError(f"{part}: is not known")
    return found


def _history(value: dict[str, Any]) -> Fields:
    """An age is a duration of Go, or a number of seconds."""
    found: Fields = {}
    for key, each in value.items():
        if key == "maxEntries":
            found["build_history_entries"] = _want(each, int, f"history {key}")
        elif key == "maxAge":
            seconds = isinstance(each, int) and each is not True
            found["build_history_age"] = f"{each}s" if seconds else _want(each, str, f"history {key}")
        else:
            raise ValueError(f"history {key}: is not known")
    return found


def _entitlements(value: dict[str, Any]) -> Fields:
    """Without an entry, the network of the host is allowed, and nothing else."""
    names = {"network-host": "network.host", "security-insecure": "security.insecure", "device": "device"}
    given = {"network-host": True} | value
    if unknown := given.keys() - names:
        raise ValueError(f"entitlements {min(unknown)}: is not known")
    allowed = [names[name] for name, each in given.items() if _want(each, bool, f"entitlements {name}")]
    return {"build_entitlements": allowed or ["none"]}


_GC_SPACES = {
    "defaultKeepStorage": "build_reserved",  # the older name of the next
    "defaultReservedSpace": "build_reserved",
    "defaultMaxUsedSpace": "build_max_used",
    "defaultMinFreeSpace": "build_min_free",
}


def _collection(value: dict[str, Any]) -> Fields:
    found: Fields = {}
    for key, each in value.items():
        if key == "enabled":
            found["build_gc"] = _want(each, bool, "gc enabled")
        elif key == "policy":
            policies = [_cache_policy(entry) for entry in _want(each, list, "gc policy")]
            # dockerd removes nothing for an empty list
            found |= {"build_policies": policies} if policies else {"build_gc": False}
        elif key in _GC_SPACES:
            found[_GC_SPACES[key]] = _want(each, str, f"gc {key}")
        else:
            raise ValueError(f"gc {key}: is not known")
    return found


_POLICY_SPACES = {
    "keepStorage": "reserved",
    "reservedSpace": "reserved",
    "maxUsedSpace": "max-used",
    "minFreeSpace": "min-free",
}


def _cache_policy(value: Any) -> str:
    """The policy as `config.cache` reads it."""
    words = {"all": "all=false"}
    filters = []
    for key, each in _want(value, dict, "gc policy").items():
        name = f"gc policy {key}"
        if key == "all":
            words["all"] = f"all={_shown(_want(each, bool, name))}"
        elif key == "filter":
            filters = _policy_filters(each, name)
        elif key in _POLICY_SPACES:
            words[_POLICY_SPACES[key]] = f"{_POLICY_SPACES[key]}={_want(each, str, name)}"
        else:
            raise ValueError(f"{name}: is not known")
    return ",".join([*words.values(), *filters])


def _policy_filters(value: Any, name: str) -> list[str]:
    """`["KEY=VALUE"]`, or `{"KEY": {"VALUE": true}}`."""
    if isinstance(value, dict):
        value = [f"{key}={each}" for key, values in value.items() for each in _want(values, dict, name)]
    found = [_want(each, str, name) for each in _want(value, list, name)]
    for each in found:
        if "," in each:
            raise ValueError(f"{name} {each!r}: must not have a comma")
    return found


def _size(value: Any) -> Fields:
    return {"shm_size": str(value) if isinstance(value, int) and value is not True else _want(value, str)}


def _insecure(value: Any) -> Fields:
    """dockerd drops the scheme, too."""
    return {"insecure_registries": [re.sub(r"^https?://", "", each) for each in _texts(value)]}


def _host_gateway(value: Any) -> Fields:
    return {"host_gateways": [_want(value, str)]}


def _firewall(value: Any) -> Fields:
    return {} if _want(value, bool) else {"firewall": "none"}


def _firewall6(value: Any) -> Fields:
    _want(value, bool)
    return {}


def conflict(values: Mapping[str, Any]) -> tuple[str, str]:
    """A key that does not fit the others, and why; empty if there is none."""
    if values.get("ip6tables") is False and values.get("iptables") is not False:
        return "ip6tables", "false: only beside iptables, as the engine has the same rules for both IP versions"
    return "", ""


_READERS: dict[str, Callable[[Any], Fields]] = {
    "hosts": _hosts,
    "tls": _tls,
    "tlsverify": _tls_verify,
    "debug": _debug,
    "cdi-spec-dirs": _cdi,
    "log-level": _log_level,
    "bridge": _bridge,
    "default-runtime": _default_runtime,
    "runtimes": _runtimes,
    "default-address-pools": _pools,
    "default-network-opts": _network_opts,
    "default-shm-size": _size,
    "default-ulimits": _ulimits,
    "features": _features,
    "host-gateway-ip": _host_gateway,
    "ip6tables": _firewall6,
    "insecure-registries": _insecure,
    "iptables": _firewall,
    "log-opts": _log_opts,
    "proxies": _proxies,
    "builder": _builder,
}

_OWN_STORE = "the engine has a store of its own"
_RAFT = "swarms keep their state in etcd"

_OTHERS: dict[str, NoMeaning | Refused] = {
    "allow-nondistributable-artifacts": NoMeaning("such layers are pushed like others"),
    "api-cors-header": NoMeaning("dockerd has removed it"),
    "containerd": NoMeaning("there is no containerd"),
    "containerd-namespace": NoMeaning("there is no containerd"),
    "containerd-plugins-namespace": NoMeaning("there is no containerd"),
    "cri-containerd": NoMeaning("there is no containerd"),
    "cpu-rt-period": Refused((0,), "limits of real-time scheduling are not supported"),
    "cpu-rt-runtime": Refused((0,), "limits of real-time scheduling are not supported"),
    "default-init": NoMeaning("init-path names the program"),
    "firewall-backend": NoMeaning("rules are written for nftables, and for iptables where it is in use"),
    "ip-forward-no-drop": NoMeaning("the engine never sets the policy of FORWARD"),
    "live-restore": NoMeaning("containers always outlive the daemon", as_it_is=True),
    "network-control-plane-mtu": NoMeaning("the control plane of swarms is TCP"),
    "network-diagnostic-port": NoMeaning("there is no such server"),
    "raw-logs": NoMeaning("the engine's log has neither colours nor short times"),
    "rootless": Refused((False,), "the engine must run as root"),
    "selinux-enabled": Refused((False,), "SELinux is not supported"),
    "storage-driver": Refused(("overlay2", "overlayfs"), f"{_OWN_STORE}, overlay2"),
    "storage-opts": Refused(([],), _OWN_STORE),
    "swarm-raft-election-tick": NoMeaning(_RAFT),
    "swarm-raft-heartbeat-tick": NoMeaning(_RAFT),
    "userland-proxy": NoMeaning("ports that rules cannot publish are relayed by the engine"),
    "userland-proxy-path": NoMeaning("ports that rules cannot publish are relayed by the engine"),
}


def _direct(field: str) -> Callable[[Any], Fields]:
    return lambda value: {field: value}


KEYS: dict[str, Callable[[Any], Fields] | NoMeaning | Refused] = {
    **{option.docker: _direct(option.field) for option in options() if option.docker},
    **_READERS,
    **_OTHERS,
}
"""Every key of dockerd's file."""


_SWITCHES = (
    *("cri-containerd", "ip-forward-no-drop", "live-restore", "raw-logs", "rootless"),
    *("selinux-enabled", "userland-proxy"),
)
_NUMBERS = ("cpu-rt-period", "cpu-rt-runtime", "network-control-plane-mtu")
_TEXTS = (
    *("containerd", "containerd-namespace", "containerd-plugins-namespace", "userland-proxy-path"),
    "firewall-backend",
)
LISTS = ("hosts", "storage-opts")
"""Keys whose flag may be given several times."""


class Flag(NamedTuple):
    """A flag of dockerd that sets options of other names."""

    names: tuple[str, ...]
    key: str
    value: str
    """Placeholder; empty for a switch."""


FLAGS = (
    Flag(("-H", "--host"), "hosts", "unix:///PATH|tcp://HOST:PORT|fd://"),
    Flag(("-D", "--debug"), "debug", ""),
    Flag(("--tls",), "tls", ""),
    Flag(("--tlsverify",), "tlsverify", ""),
    Flag(("--iptables",), "iptables", ""),
    Flag(("--ip6tables",), "ip6tables", ""),
    Flag(("-s", "--storage-driver"), "storage-driver", "NAME"),
    Flag(("--storage-opt",), "storage-opts", "KEY=VALUE"),
    *(Flag((f"--{key}",), key, "") for key in _SWITCHES),
    *(Flag((f"--{key}",), key, "NUMBER") for key in _NUMBERS),
    *(Flag((f"--{key}",), key, "TEXT") for key in _TEXTS),
)
"""For command lines that were written for dockerd."""

_SETS = {"debug": "log-level", "tls": "tlsverify", "host-gateway-ip": "host-gateway-ips", "ip6tables": "iptables"}


def flags(key: str) -> list[str]:
    """The options that a key sets, for the documents."""
    if key == "tlsverify":
        return ["--tls-ca", "--tls-cert", "--tls-key"]
    if key == "proxies":
        return ["--http-proxy", "--https-proxy", "--no-proxy"]
    return [option.flag for option in options() if option.docker == key] or flags(_SETS[key])

"""The rules of a create body, and the merge with the image's configuration."""

from typing import Any

import msgspec
import pytest

from engine.containers import body as rules
from engine.containers import security
from engine.errors import InvalidParameter
from engine.wire.containers import Config, CreateBody, Healthcheck, LogConfig, PortBinding


def body(**fields: object) -> CreateBody:
    return msgspec.convert({"Image": "busybox", **fields}, CreateBody)


def host(**fields: object) -> CreateBody:
    return body(HostConfig=fields)


REFUSED = [
    (body(Hostname="a" * 65), "at most 64 bytes"),
    (body(Hostname="\u00e9" * 33), "invalid hostname format"),
    (body(Hostname="a\n6.6.6.6 b"), "no control characters"),
    (body(Hostname="a\tb"), "no control characters"),
    (body(Hostname="a\0"), "no control characters"),
    (body(Domainname="a\x1b"), "domainname"),
    (body(Env=["=x"]), "environment"),
    (body(Env=[""]), "environment"),
    (body(Env=["A=\0"]), "NUL"),
    (body(Cmd=["a\0b"]), "NUL"),
    (body(WorkingDir="relative"), "absolute"),
    (body(ExposedPorts={"0/udp": {}, "0/xyz": {}}), "ExposedPorts"),
    (body(ExposedPorts={"80/xyz": {}}), "ExposedPorts"),
    (body(ExposedPorts={"70000": {}}), "ExposedPorts"),
    (body(ExposedPorts={"90-80/tcp": {}}), "ExposedPorts"),
    (body(Volumes={"relative": {}}), "volume path"),
    (body(Volumes={"/": {}}), "volume path"),
    (body(StopSignal="FOO"), "Invalid signal: FOO"),
    (body(StopSignal=99), "Invalid signal: 99"),
    (body(Healthcheck={"Interval": 999_999}), "interval"),
    (body(Healthcheck={"Timeout": 1}), "timeout"),
    (body(Healthcheck={"StartPeriod": -5}), "start_period"),
    (body(Healthcheck={"Retries": -1}), "retries"),
    (body(Healthcheck={"Test": ["RUN", "x"]}), "NONE, CMD or CMD-SHELL"),
    (host(Binds=["/a:relative"]), "absolute"),
    (host(Binds=["/a:/"]), "destination can't be '/'"),
    (host(Binds=["/a:/b/../.."]), "destination can't be '/'"),
    (host(Binds=[":/a"]), "Invalid bind mount spec"),
    (host(Binds=["/a:/b:xx"]), "invalid mode: xx"),
    (host(Binds=["/a:/b:ro,rw"]), "invalid mode"),
    (host(Binds=["/a:/b:shared,slave"]), "invalid mode"),
    (host(Binds=["vol:/b:shared"]), "invalid mode"),
    (host(Binds=["/a:/b:nocopy"]), "invalid mode"),
    (host(Memory=(6 << 20) - 1), "6MB"),
    (host(Memory=-5), "6MB"),
    (host(MemorySwap=1 << 30), "Memory limit"),
    (host(Memory=1 << 30, MemorySwap=1 << 29), "larger than memory"),
    (host(MemorySwap=-2), "MemorySwap"),
    (host(Memory=1 << 24, MemoryReservation=1 << 25), "MemoryReservation"),
    (host(MemorySwappiness=101), "0-100"),
    (host(MemorySwappiness=-2), "0-100"),
    (host(BlkioWeight=9), "10 to 1000"),
    (host(BlkioWeight=1001), "10 to 1000"),
    (host(BlkioWeightDevice=[{"Path": "/dev/vda", "Weight": 5}]), "10 to 1000"),
    (host(CpuShares=-1), "CpuShares"),
    (host(CpuPeriod=999), "CpuPeriod"),
    (host(CpuPeriod=1_000_001), "CpuPeriod"),
    (host(CpuQuota=999), "CpuQuota"),
    (host(ShmSize=-1), "greater than 0"),
    (host(OomScoreAdj=1001), "OomScoreAdj"),
    (host(Isolation="hyperv"), "Isolation"),
    (host(CpuPercent=5), "Windows"),
    (host(IOMaximumIOps=5), "Windows"),
    (host(UsernsMode="private"), "UsernsMode"),
    (host(PortBindings={"80/tcp": [{"HostPort": "x"}]}), "Invalid port specification: 'x'"),
    (host(PortBindings={"80/tcp": [{"HostPort": "70000"}]}), "70000"),
    (host(PortBindings={"x": []}), "PortBindings"),
    (host(PortBindings={"80/tcp": [{"HostIp": "1.2.3"}]}), "1.2.3"),
    (host(ExtraHosts=["nocolon"]), "nocolon"),
    (host(ExtraHosts=["a:notip"]), "notip"),
    (host(ExtraHosts=["a:fe80::1%x\n6.6.6.6"]), "ExtraHosts: invalid IP address: 'fe80::1%x\\n6.6.6.6'"),
    (host(ExtraHosts=["a:[fe80::1%x y]"]), "ExtraHosts: invalid IP address"),
    (host(ExtraHosts=["a:[[::1]]"]), "ExtraHosts: invalid IP address"),
    (host(ExtraHosts=["a\x01:::1"]), "bad format for add-host"),
    (host(Dns=["x"]), "Dns"),
    (host(Dns=["[::1]"]), "Dns: invalid IP address"),
    (host(Dns=["fe80::1%x\nnameserver 6.6.6.6"]), "Dns: invalid IP address: 'fe80::1%x\\nnameserver"),
    *((host(Dns=[f"fe80::1%{zone}"]), "Dns") for zone in ("", " ", "a b", "\x7f", "\u2028", "a/b", "x" * 16, "a%b")),
    (host(Dns=["1.1.1.1%eth0"]), "Dns"),
    (host(DnsSearch=["a\x0b"]), "DnsSearch"),
    (host(DnsOptions=["a\x1f"]), "DnsOptions"),
    (host(PortBindings={"80/tcp": [{"HostIp": "fe80::1%x\n"}]}), "PortBindings HostIp: invalid IP address"),
    (host(Ulimits=[{"Name": "nofile", "Soft": 5, "Hard": 4}]), "soft limit"),
    (host(RestartPolicy={"Name": "sometimes"}), "sometimes"),
    (host(RestartPolicy={"Name": "always", "MaximumRetryCount": 3}), "maximum retry count"),
    (host(RestartPolicy={"Name": "on-failure", "MaximumRetryCount": -3}), "negative"),
    (host(ConsoleSize=[1]), "ConsoleSize"),
    (body(Domainname="a\nb"), "domainname"),
    (host(MemoryReservation=1), "MemoryReservation"),
    (host(KernelMemory=1), "KernelMemory"),
    (host(CpuQuota=-2), "CpuQuota"),
    (host(BlkioDeviceReadBps=[{"Path": "x", "Rate": 1}]), "BlkioDeviceReadBps"),
    (host(BlkioDeviceWriteIOps=[{"Path": "/x", "Rate": -1}]), "BlkioDeviceWriteIOps"),
    (host(DiskQuota=1), "DiskQuota"),
    (host(CgroupParent="a/../../b"), "CgroupParent"),
    (host(CgroupnsMode="container:x"), "CgroupnsMode: invalid mode"),
    (host(DeviceCgroupRules=["c 1 r"]), "invalid device cgroup rule format: 'c 1 r'"),
    (host(MaskedPaths=["proc"]), "MaskedPaths: 'proc' is not an absolute path"),
    (host(ReadonlyPaths=["/a\0"]), "ReadonlyPaths: "),
    (host(DeviceRequests=[{"Count": -1, "DeviceIDs": ["0"]}]), "cannot set both Count and DeviceIDs"),
    (host(MaskedPaths=["/" + "a" * 256]), "a name of 256 of at most 255"),
    (host(ReadonlyPaths=["/a" * 2048]), "it has 4096 bytes of at most 4095"),
    (host(Annotations={"a": "b\0"}), "Annotations: 'a': must not contain a NUL character"),
    (host(Sysctls={"net.ipv4.ip_forward": "1\0"}), "Sysctls: net.ipv4.ip_forward: its value must not contain"),
    (host(Binds=["/a\0b:/x"]), "must not contain a NUL character"),
    (host(Annotations={"": "b"}), "the empty string is not permitted as an annotation key"),
    (host(CpuRealtimePeriod=1), "CpuRealtimePeriod is not supported"),
    (host(Capabilities=["CAP_CHOWN"]), "Capabilities is not supported"),
    (host(CgroupParent="a\nb"), "must not contain a NUL character or a line break"),
    (host(CgroupParent="/a" * 3000), "6000 bytes of at most 3900"),
    (host(Links=["a:b:c"]), "bad format for links"),
    (host(Links=[""]), "bad format for links"),
    (host(VolumesFrom=[":ro"]), "malformed volumes-from"),
    (host(VolumesFrom=["a:nocopy"]), "invalid mode: nocopy"),
    (host(Tmpfs={"/t": "size=1m,bind"}), 'Invalid tmpfs option "bind"'),
    (host(Tmpfs={"/": ""}), "destination can't be '/'"),
    (host(Sysctls={"net.": "1"}), "Sysctls"),
    (host(Sysctls={"net..x": "1"}), "Sysctls"),
    (host(Sysctls={"net.ipv4.conf.eth0/1.forwarding": "1"}), "'com.docker.network.endpoint.sysctls'"),
    (host(Sysctls={"net/ipv6/neigh/eth0/a": "1"}), "interface specific sysctl setting 'net/ipv6/neigh/eth0/a'"),
    (host(Sysctls={"fs.file-max": "1"}), "not in a separate kernel namespace"),
    (host(Sysctls={"fs.mqueue.msg_max": "1"}, IpcMode="container:x"), "ipc namespace"),
    (host(Sysctls={"net.core.somaxconn": "1"}, NetworkMode="container:x"), "network namespace"),
    (host(Sysctls={"kernel.domainname": "x"}, UTSMode="host"), "UTS namespace"),
    (host(Devices=[{"PathOnHost": "/dev/x", "PathInContainer": "/dev/../x"}]), "PathInContainer"),
    (host(Devices=[{"PathOnHost": "/dev/x", "CgroupPermissions": "rr"}]), "CgroupPermissions"),
    (host(StorageOpt={"size": "1G"}), "pquota"),
    (host(GroupAdd=["a:b"]), "GroupAdd"),
    (host(DnsOptions=["a b"]), "DnsOptions"),
    (host(PidMode="shareable"), "PidMode"),
    (host(IpcMode="container:"), "container:<name|id>"),
    (host(UTSMode="container:x"), "UTSMode"),
    (host(NetworkMode="host", Links=["a"]), "conflicting options"),
    (body(ExposedPorts={"80": {}}, HostConfig={"NetworkMode": "container:x"}), "port exposing"),
]


@pytest.mark.parametrize(("refused", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_broken_rule_is_refused_by_name(refused: CreateBody, words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        rules.checked(refused)
    assert words in raised.value.message


@pytest.mark.parametrize(
    "accepted",
    [
        body(),
        body(
            Hostname="a.b-c.example",
            StopSignal=10,
            ExposedPorts={"80/tcp": {}, "53/udp": {}, "8000-8010/tcp": {}, "9": {}},
        ),
        body(Healthcheck={"Interval": 1_000_000, "Test": []}),
        # Go clients send these for 'not given'
        host(
            ShmSize=0,
            MemorySwappiness=-1,
            BlkioWeight=0,
            RestartPolicy={"Name": "no"},
            LogConfig={"Type": ""},
            NetworkMode="default",
        ),
        host(Memory=1 << 30, MemorySwap=1 << 30),
        host(Memory=1 << 30, MemorySwap=-1),
        host(Binds=["/a:/b", "/a:/c:ro", "vol:/d:rw,nocopy", "/a:/e:ro,z,rshared"]),
        host(PortBindings={"80/tcp": [{"HostPort": ""}, {"HostIp": "::1", "HostPort": "8000-8010"}], "81": None}),
        host(Links=["a", "b:c", "/b:/me/c"], VolumesFrom=["a", "b:ro", "c:rw,z"], UsernsMode="host", StorageOpt={}),
        host(PidMode="container:a", IpcMode="container:b", UTSMode="host", NetworkMode="container:c"),
        host(
            Sysctls={
                "net.ipv4.conf.default.forwarding": "1",
                "net/core/somaxconn": "5",
                "kernel.shmmax": "1",
                "fs.mqueue.msg_max": "5",
            }
        ),
        host(PidsLimit=-1, Ulimits=[{"Name": "nofile", "Soft": 4, "Hard": 4}]),
    ],
)
def test_what_clients_send_is_taken(accepted: CreateBody) -> None:
    rules.checked(accepted)


def test_normal_forms_of_what_is_not_given() -> None:
    config, host_config = rules.checked(body(Cmd="ls", HostConfig={"CapAdd": "SYS_PTRACE"}))
    assert config.cmd == ["ls"] and host_config.cap_add == ["SYS_PTRACE"]
    assert host_config.network_mode == "bridge" and host_config.restart_policy.name == "no"
    assert host_config.log_config == LogConfig()
    assert host_config.memory_swappiness is None and host_config.dns == []
    assert (host_config.pids_limit, host_config.oom_kill_disable) == (None, False)
    # the operator's (`defaults.py`)
    assert (host_config.ipc_mode, host_config.shm_size, host_config.ulimits) == ("", 0, None)
    assert host_config.masked_paths == list(security.MASKED_PATHS)
    assert host_config.readonly_paths == list(security.READONLY_PATHS)


def test_limits_that_clients_send_as_numbers_though_they_set_none() -> None:
    for limit in (0, -1, -5):
        assert rules.checked(host(PidsLimit=limit))[1].pids_limit is None
    assert rules.checked(host(MemorySwappiness=-1))[1].memory_swappiness is None
    assert rules.checked(host(MemorySwappiness=0))[1].memory_swappiness == 0
    assert rules.checked(host(KernelMemory=0))[1].kernel_memory is msgspec.UNSET


def test_system_paths_of_a_container() -> None:
    """An empty list is no path. A privileged container has none by default."""
    for fields, masked in (({"MaskedPaths": []}, []), ({"MaskedPaths": ["/a"], "Privileged": True}, ["/a"])):
        assert rules.checked(host(**fields))[1].masked_paths == masked
    privileged = rules.checked(host(Privileged=True))[1]
    assert (privileged.masked_paths, privileged.readonly_paths) == ([], [])


def test_an_empty_list_of_bindings_is_one_ephemeral_port() -> None:
    given = {"80/tcp": [], "81/tcp": [{"HostPort": "8081"}], "82/tcp": []}
    kept = rules.checked(host(PortBindings=given))[1].port_bindings
    assert kept == {"80/tcp": [PortBinding()], "81/tcp": [PortBinding(host_port="8081")], "82/tcp": [PortBinding()]}
    (warning,) = rules.warnings(host(PortBindings=given).host_config)
    assert warning == (
        "Following container port(s) have an empty list of port-bindings: 80/tcp, 82/tcp. "
        "Such bindings will be discarded in a future version."
    )
    assert rules.warnings(host(PortBindings={"81/tcp": [{"HostPort": "8081"}]}).host_config) == []


@pytest.mark.parametrize("hostname", ["my_app", "a..b", "-x", "x.", "a" * 64, "a b", "\u00e9", "...", "under_score"])
def test_hostnames(hostname: str) -> None:
    assert rules.checked(body(Hostname=hostname))[0].hostname == hostname


def test_zones_of_addresses() -> None:
    given = host(Dns=["fe80::1%eth0", "fe80::1%2", "::1"], ExtraHosts=["a:[fe80::1%eth0.5]", "b:fe80::1%br-0"])
    checked = rules.checked(given)[1]
    assert (checked.dns, checked.extra_hosts) == (given.host_config.dns, given.host_config.extra_hosts)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("CapDrop", ["ALL"], "CapDrop"),
        ("CapDrop", "CHOWN", "CapDrop"),
        ("MaskedPaths", ["/proc/kcore"], "MaskedPaths"),
        ("ReadonlyPaths", ["/proc/sys"], "ReadonlyPaths"),
        ("Devices", [{"PathOnHost": "/dev/a", "CgroupPermissions": "r"}], "CgroupPermissions of Devices"),
    ],
)
def test_warnings_of_what_privileged_overrides(field: str, value: Any, named: str) -> None:
    given = {field: value}
    assert rules.warnings(host(Privileged=True, **given).host_config) == [f"{named} has no effect in privileged mode."]
    assert rules.warnings(host(**given).host_config) == []


def test_privileged_alone_has_no_warning() -> None:
    harmless = {
        "CapAdd": ["ALL"],
        "MaskedPaths": [],
        "ReadonlyPaths": None,
        "Devices": [{"PathOnHost": "/dev/a", "CgroupPermissions": "rwm"}],
        "SecurityOpt": ["apparmor=unconfined", "seccomp=unconfined", "no-new-privileges"],
    }
    assert rules.warnings(host(Privileged=True, **harmless).host_config) == []


def test_stop_signal_as_a_number_is_kept_as_text() -> None:
    assert rules.checked(body(StopSignal=10))[0].stop_signal == "10"
    assert rules.checked(body(StopSignal=""))[0].stop_signal is msgspec.UNSET


IMAGE = Config(
    cmd=["sh"],
    entrypoint=["/entry"],
    env=["PATH=/bin", "A=image"],
    labels={"from": "image", "both": "image"},
    user="app",
    working_dir="/srv",
    exposed_ports={"80/tcp": {}},
    volumes={"/data": {}},
    stop_signal="SIGQUIT",
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("/entry", ("sh",))),
        ({"cmd": ["ls", "-l"]}, ("/entry", ("ls", "-l"))),
        ({"entrypoint": ["/own"]}, ("/own", ())),
        ({"entrypoint": ["/own"], "cmd": ["x"]}, ("/own", ("x",))),
        ({"entrypoint": []}, ("sh", ())),
        ({"entrypoint": [], "cmd": ["x"]}, ("x", ())),
        ({"entrypoint": [""], "cmd": ["x", "y"]}, ("x", ("y",))),
    ],
)
def test_entrypoint_and_command_follow_dockers_rules(
    given: dict[str, list[str]], expected: tuple[str, tuple[str, ...]]
) -> None:
    assert rules.command(rules.merged(Config(**given), IMAGE)) == expected


def test_an_empty_word_is_a_command() -> None:
    """The start fails then, as in Docker."""
    assert rules.command(rules.merged(Config(cmd=[""]), Config())) == ("", ())


def test_no_command_at_all_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="No command specified"):
        rules.command(rules.merged(Config(), Config()))


def test_merge_takes_from_the_image_what_is_left_out() -> None:
    config = rules.merged(
        Config(
            env=["A=own", "B=2"],
            labels={"both": "own"},
            exposed_ports={"81/tcp": {}},
            healthcheck=Healthcheck(retries=2),
        ),
        msgspec.structs.replace(IMAGE, healthcheck=Healthcheck(test=["CMD", "x"], retries=5, interval=10**9)),
    )
    assert config.env == ["PATH=/bin", "A=own", "B=2"]
    assert config.labels == {"from": "image", "both": "own"}
    assert config.exposed_ports == {"80/tcp": {}, "81/tcp": {}}
    assert config.volumes == {"/data": {}}
    assert (config.user, config.working_dir, config.stop_signal) == ("app", "/srv", "SIGQUIT")
    assert config.healthcheck == Healthcheck(test=["CMD", "x"], retries=2, interval=10**9)


def test_links() -> None:
    assert rules.parse_link("web:db") == rules.Link("web", "db")
    assert rules.parse_link("web") == rules.Link("web", "web")
    assert rules.parse_link("/web:/me/db") == rules.Link("web", "db")
    assert rules.parse_link("db:/mysql") == rules.Link("db", "mysql")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"Privileged": True}, "privileged mode is incompatible with user namespaces.  You must run the container in "),
        ({"NetworkMode": "host"}, "cannot share the host's network namespace when user namespaces are enabled"),
        ({"PidMode": "host"}, "cannot share the host PID namespace when user namespaces are enabled"),
    ],
)
def test_what_a_user_namespace_excludes_in_dockers_words(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        rules.check_remapped(host(**fields).host_config)
    assert caught.value.message.startswith(words)
    rules.check_remapped(host(IpcMode="host", UTSMode="host", ReadonlyRootfs=True).host_config)

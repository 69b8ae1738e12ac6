"""Processes of managed plugins: enabled, restarted, kept over ends of daemon and monitor, disabled;
what they mount below their PropagatedMount; what a failure leaves."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.managed_plugins.process import STOP_SECONDS
from engine.networks.remote import links as remote_links
from tests.support.engine.harness import alive, kill_and_wait, until
from tests.support.plugins.daemon import ControlError, PluginEngine
from tests.support.plugins.images import config

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

VOLUMES = "docker.volumedriver/1.0"
SLEEP = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); signal.pause()"
"""Python that waits for SIGTERM."""


@pytest.fixture
def engine() -> Iterator[PluginEngine]:
    with PluginEngine() as started:
        yield started


@pytest.fixture(scope="module")
def shared() -> Iterator[PluginEngine]:
    """For tests that leave the daemon and the monitor alone."""
    with PluginEngine() as started:
        yield started


class Installed:
    """A plugin of an engine."""

    def __init__(self, engine: PluginEngine, of: str = "MountingVolumes", *types: str, **more: Any) -> None:
        self.engine = engine
        self.id = secrets.token_hex(32)
        engine.install(self.id, config(of, *(types or (VOLUMES,)), **more))

    def ask(self, verb: str, **arguments: Any) -> Any:
        return self.engine.ask(verb, self.id, **arguments)

    def enable(self, **arguments: Any) -> Installed:
        self.ask("enable", **arguments)
        return self

    def refused(self, **arguments: Any) -> str:
        """The message of an enable that fails."""
        with pytest.raises(ControlError) as raised:
            self.ask("enable", **arguments)
        return str(raised.value)

    @property
    def pid(self) -> int:
        return int(self.ask("pid"))

    def next_pid(self, before: int) -> int:
        """The pid of the process after another one, which answers."""

        def other() -> int:
            pid = self.pid
            return pid if pid not in (0, before) else 0

        found = until("the plugin runs again", other)
        until("it answers", lambda: self.call("Plugin.Activate"))
        return int(found)

    @property
    def run(self) -> Path:
        return self.engine.run / "plugins" / self.id

    @property
    def directory(self) -> Path:
        return self.engine.root / "plugins" / self.id

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.pid}/root")

    def call(self, method: str, **body: Any) -> Any:
        """The answer of the plugin; None while it does not listen."""
        connection = http.client.HTTPConnection("plugin")
        with socket.socket(socket.AF_UNIX) as connection.sock:
            try:
                connection.sock.connect(str(self.run / "plugin.sock"))
                connection.request("POST", f"/{method}", json.dumps(body))
                return json.loads(connection.getresponse().read())
            except (FileNotFoundError, ConnectionError, http.client.RemoteDisconnected):
                return None

    def mounted(self, name: str, content: str) -> None:
        """Have it mount a new volume, with a file."""
        assert self.call("VolumeDriver.Create", Name=name) == {"Err": ""}
        answer = self.call("VolumeDriver.Mount", Name=name, ID="test")
        assert answer["Mountpoint"] == f"/data/{name}", answer
        (self.root / "data" / name / "file").write_text(content)

    def tree(self, path: str) -> Any:
        return self.ask("tree", path=path)


def mounts(engine: PluginEngine) -> list[str]:
    """The mounts of the engine that the host sees."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(engine.base) in line]


def test_enabled_and_disabled(shared: PluginEngine) -> None:
    plugin = Installed(shared)
    before, host = shared.footprint(), mounts(shared)
    plugin.enable()
    pid = plugin.pid
    assert plugin.call("Plugin.Activate") == {"Implements": ["VolumeDriver"]}
    assert mounts(shared) == host
    assert plugin.run.stat().st_mode & 0o777 == 0o700
    for kind in ("pid", "mnt", "ipc", "uts", "net"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    with pytest.raises(ControlError, match="runs already"):
        plugin.enable()
    plugin.ask("disable")
    assert not alive(pid)
    assert not plugin.run.exists()
    shared.assert_settles(before)
    assert plugin.enable().pid != pid
    plugin.ask("disable")
    plugin.ask("remove")
    assert not plugin.directory.exists()


def test_mounts_below_the_propagated_mount_are_seen_by_the_engine_alone(shared: PluginEngine) -> None:
    plugin = Installed(shared).enable()
    host = mounts(shared)
    plugin.mounted("first", "one")
    assert mounts(shared) == host
    assert plugin.tree("/data/first") == {"file": "one"}
    assert plugin.tree("/data") == {"first": "/"}
    assert plugin.tree("//data/./first/") == {"file": "one"}
    assert not any((plugin.directory / "propagated" / "first").iterdir()), "the file is on the tmpfs"
    assert plugin.call("VolumeDriver.Unmount", Name="first", ID="test") == {"Err": ""}
    assert plugin.tree("/data/first") == {}


def test_mounts_outlive_the_plugin_and_the_daemon(engine: PluginEngine) -> None:
    plugin = Installed(engine)
    host = mounts(engine)
    plugin.enable()
    plugin.mounted("kept", "one")
    pid = plugin.pid

    kill_and_wait(pid)
    assert plugin.tree("/data/kept") == {"file": "one"}
    pid = plugin.next_pid(pid)
    assert plugin.tree("/data/kept") == {"file": "one"}
    # The new process has the mount of the old one, and can unmount it.
    assert (plugin.root / "data/kept/file").read_text() == "one"
    plugin.mounted("second", "two")

    for again in (engine.restart, lambda: (engine.terminate(), engine.start())):
        again()
        assert plugin.pid == pid
        assert plugin.tree("/data/kept") == {"file": "one"}
        assert plugin.tree("/data/second") == {"file": "two"}

    engine.replace_monitor()
    until("the monitor's successor has it", lambda: plugin.pid == pid)
    engine.restart()
    assert plugin.pid == pid
    assert plugin.tree("/data/second") == {"file": "two"}

    assert plugin.call("VolumeDriver.Unmount", Name="kept", ID="test") == {"Err": ""}
    assert plugin.tree("/data/kept") == {}
    assert mounts(engine) == host


def test_killed_while_no_daemon_runs(engine: PluginEngine) -> None:
    plugin = Installed(engine).enable()
    plugin.mounted("kept", "one")
    pid = plugin.pid
    engine.kill9()
    kill_and_wait(pid)
    engine.start()
    assert plugin.pid not in (0, pid)
    assert plugin.call("Plugin.Activate")
    assert plugin.tree("/data/kept") == {"file": "one"}
    assert "exited with status 137" in engine.log()


def test_a_plugin_that_hangs_does_not_keep_the_daemon_from_serving(engine: PluginEngine, tmp_path: Path) -> None:
    hanging, other = Installed(engine, control=tmp_path).enable(), Installed(engine).enable()
    pids = hanging.pid, other.pid
    engine.kill9()
    (tmp_path / "faults").write_text(json.dumps({"Plugin.Activate": "hang"}))
    for pid in pids:
        kill_and_wait(pid)
    engine.start()
    assert other.call("Plugin.Activate")
    hanging.ask("disable")
    assert not hanging.run.exists()


def test_daemon_and_monitor_killed(engine: PluginEngine) -> None:
    """Nothing keeps the mounts then, so the daemon starts the plugin again."""
    plugin = Installed(engine).enable()
    pid, monitor = plugin.pid, engine.monitor_pid()
    os.kill(engine.pid, signal.SIGSTOP)  # it would start another monitor
    kill_and_wait(monitor)
    engine.kill9()
    engine.start()
    new = plugin.pid
    assert new not in (0, pid)
    assert not alive(pid)
    plugin.mounted("new", "one")
    assert plugin.tree("/data/new") == {"file": "one"}


def test_reboot(engine: PluginEngine) -> None:
    plugin = Installed(engine).enable()
    plugin.mounted("lost", "one")
    engine.reboot()
    assert plugin.call("Plugin.Activate")
    assert plugin.tree("/data") == {"lost": "/"}
    assert plugin.tree("/data/lost") == {}, "a tmpfs ends with the host, the directory stays"


def test_engined_stop_ends_it_and_the_next_start_starts_it(engine: PluginEngine) -> None:
    plugin = Installed(engine).enable()
    pid = plugin.pid
    engine.stop()
    assert not alive(pid)
    assert not engine.run.exists()
    engine.assert_gone()
    engine.start()
    assert plugin.call("Plugin.Activate")


def test_not_enabled_in_its_record(engine: PluginEngine) -> None:
    """The daemon was killed before the end of an enable."""
    plugin = Installed(engine)
    before = engine.footprint()
    plugin.ask("run_only")
    pid = plugin.pid
    engine.restart()
    assert plugin.pid == 0
    assert not alive(pid)
    assert not plugin.run.exists()
    engine.assert_settles(before)


def cut(engine: PluginEngine, plugin: Installed, verb: str, point: Callable[[], object]) -> None:
    """Kill the daemon in the verb, as soon as `point` is true, and start it again."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, ControlError):  # the answer never comes
            plugin.ask(verb)

    asking = threading.Thread(target=ask)
    asking.start()
    until("the point is reached", point)
    engine.kill9()
    asking.join()
    engine.start()


def test_killed_at_any_point_of_an_enable_or_disable(engine: PluginEngine) -> None:
    plugin = Installed(engine)
    before, host = engine.footprint(), mounts(engine)
    for point in (
        plugin.run.exists,
        (plugin.directory / "config.json").exists,
        lambda: engine.footprint().processes,
        (plugin.run / "plugin.sock").exists,
    ):
        (plugin.directory / "config.json").unlink(missing_ok=True)
        cut(engine, plugin, "run_only", point)
        assert plugin.pid == 0
        engine.assert_settles(before)
        assert not plugin.run.exists()
    for gone in (lambda: not engine.footprint().processes, lambda: not plugin.run.exists()):
        plugin.enable()
        cut(engine, plugin, "disable", gone)
        assert plugin.pid == 0
        engine.assert_settles(before)
        assert not plugin.run.exists()
    assert mounts(engine) == host
    assert plugin.enable().call("Plugin.Activate")


def test_left_of_a_removed_plugin(engine: PluginEngine) -> None:
    """The daemon was killed between the end of its record and the end of its process."""
    plugin = Installed(engine).enable()
    pid = plugin.pid
    other = Installed(engine).enable()
    engine.kill9()
    record = engine.root / "plugins" / ("f" * 64)
    record.mkdir()
    engine.start()
    assert alive(pid)
    assert other.pid
    assert not record.exists()


def test_crashes_are_followed_by_restarts_with_back_off(shared: PluginEngine, tmp_path: Path) -> None:
    plugin = Installed(shared, control=tmp_path).enable()
    begin = len(shared.log_path.read_bytes())
    pid = plugin.pid
    for count in (1, 2):
        kill_and_wait(pid)
        pid = plugin.next_pid(pid)
        until("it runs again", lambda: shared.log(begin).count("runs again") == count)  # noqa: B023
    assert shared.log(begin).count("exited with status 137") == 2
    # It dies when it is asked for its kinds, which counts as a failed start.
    (tmp_path / "faults").write_text(json.dumps({"Plugin.Activate": "die"}))
    kill_and_wait(pid)
    until("two starts fail", lambda: shared.log(begin).count("it exited with status 3") == 2)
    delays = [float(each) for each in re.findall(r"next attempt in ([0-9.]+) s", shared.log(begin))]
    assert delays == [0.8, 1.6]
    (tmp_path / "faults").unlink()
    plugin.next_pid(pid)
    plugin.ask("disable")
    assert plugin.pid == 0


def test_disabled_while_it_is_to_be_restarted(shared: PluginEngine, tmp_path: Path) -> None:
    plugin = Installed(shared, control=tmp_path)
    before = shared.footprint()
    plugin.enable()
    (tmp_path / "faults").write_text(json.dumps({"Plugin.Activate": "hang"}))
    kill_and_wait(plugin.pid)
    until("the next process is asked", lambda: (tmp_path / "calls").read_text().count("Plugin.Activate") == 2)
    plugin.ask("disable")
    shared.assert_settles(before)
    assert not plugin.run.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Entrypoint": ["/bin/python", "-c", "print('cannot do it'); raise SystemExit(7)"]}, "exited with status 7"),
        ({"Entrypoint": ["/bin/python", "-c", "print('cannot do it'); raise SystemExit(7)"]}, "ends: cannot do it"),
        ({"Entrypoint": ["/bin/none"]}, "/bin/none"),
        ({"Entrypoint": []}, "Entrypoint: it is empty"),
        ({"Entrypoint": ["/bin/python", "-c", SLEEP]}, "did not answer at .* within 1 seconds"),
        ({"Interface": {"Types": [VOLUMES, "docker.networkdriver/1.0"], "Socket": "plugin.sock"}}, "networkdriver"),
        ({"Interface": {"Types": [VOLUMES], "Socket": "../plugin.sock"}}, "Interface.Socket"),
        ({"Network": {"Type": "container:x"}}, "Network.Type"),
        ({"WorkDir": "/nowhere/at/all", "Entrypoint": ["./none"]}, "plugin"),
        (
            {"Mounts": [{"Name": "m", "Source": "/nowhere", "Destination": "/m", "Type": "bind", "Options": []}]},
            "Mounts: m: its source /nowhere does not exist",
        ),
        ({"Linux": {"Devices": [{"Name": "d", "Path": "/dev/nowhere"}]}}, "/dev/nowhere"),
    ],
)
def test_an_enable_that_fails_leaves_nothing(shared: PluginEngine, changes: dict[str, Any], message: str) -> None:
    plugin = Installed(shared, **changes)
    before, host = shared.footprint(), mounts(shared)
    text = plugin.refused(timeout=1 if "within 1" in message else 30)
    assert re.search(message, text), text
    assert text.startswith('plugin "vendor/')
    assert plugin.pid == 0
    assert not plugin.run.exists()
    shared.assert_settles(before)
    assert mounts(shared) == host


def test_tree_of_its_root(shared: PluginEngine) -> None:
    plugin = Installed(shared).enable()
    (plugin.root / "srv").mkdir()
    (plugin.root / "srv/file").write_text("of the root")
    assert plugin.tree("/srv") == {"file": "of the root"}
    with pytest.raises(ControlError, match="no such file or directory"):
        plugin.tree("/nowhere")
    plugin.ask("disable")
    with pytest.raises(ControlError, match="disabled"):
        plugin.tree("/srv")


def test_no_link_leads_out_of_its_root(shared: PluginEngine, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    plugin = Installed(shared).enable()
    up = "../" * 40
    for name, target in (("far", str(tmp_path)), ("up", up + str(tmp_path).lstrip("/"))):
        (plugin.root / name).symlink_to(target)
        (plugin.root / "data" / name).symlink_to(target)
    (plugin.root / "data/proc").symlink_to("/proc/1/root")
    for path in ("/far", "/up", "/data/far", "/data/up", "/data/proc", f"/data/{up}{tmp_path}", f"/{up}{tmp_path}"):
        with pytest.raises(ControlError, match=r"no such file|too many levels of symbolic links"):
            plugin.tree(path)
    (plugin.root / "linked").symlink_to("/app")
    assert "tests" in plugin.tree("/linked")


def test_the_socket_must_not_be_a_link(shared: PluginEngine, tmp_path: Path) -> None:
    program = f"import os; os.symlink('{shared.socket}', '/run/docker/plugins/plugin.sock'); {SLEEP}"
    plugin = Installed(shared, Entrypoint=["/bin/python", "-c", program])
    assert "did not answer" in plugin.refused(timeout=0.5)


def test_it_cannot_change_its_limits(shared: PluginEngine) -> None:
    process = Path(f"/proc/{Installed(shared).enable().pid}")
    hierarchies = [process / "root/sys/fs/cgroup", *process.glob("root/sys/fs/cgroup/*/")]
    assert any("cgroup" in line for line in (process / "mounts").read_text().splitlines())
    for each in hierarchies:
        with pytest.raises(OSError, match="Read-only file system"):
            (each / "made").mkdir()


def test_host_namespaces(shared: PluginEngine) -> None:
    plugin = Installed(shared, Network={"Type": "host"}, PidHost=True, IpcHost=True)
    plugin.enable()
    pid = plugin.pid
    for kind in ("pid", "ipc", "net"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"), kind
    assert (plugin.root / "etc/hosts").read_text() == Path("/etc/hosts").read_text()
    plugin.ask("disable")
    assert not alive(pid)


def test_a_network_driver_sees_sandboxes_of_before_and_after_its_start(engine: PluginEngine) -> None:
    keys = engine.run / "netns"
    before, after = keys / "before", keys / "after"
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        remote_links.show(own, before)
        program = (
            "import threading; from pathlib import Path; from tests.support.plugins import protocol\n"
            "protocol.Plugin('NetworkDriver').listen(Path('/run/docker/plugins/plugin.sock'))\n"
            f"{SLEEP}"
        )
        entrypoint, types = ["/bin/python", "-c", program], ("docker.networkdriver/1.0",)
        plugin = Installed(engine, "", *types, Network={"Type": "host"}, Entrypoint=entrypoint).enable()
        remote_links.show(own, after)
        for key in (before, after):
            assert os.stat(plugin.root / str(key).lstrip("/")).st_ino == os.fstat(own).st_ino
            assert remote_links.is_shown(key)
    finally:
        os.close(own)
    assert len([line for line in mounts(engine) if "net:[" in line]) == 2
    for key in (before, after):
        remote_links.hide(key)
    remote_links.hide_all(keys)
    assert os.listdir(plugin.root / str(keys).lstrip("/")) == []
    plugin.ask("disable")
    assert not keys.exists()
    plugin.enable()
    engine.stop()
    engine.assert_gone()
    assert not engine.run.exists()
    engine.start()
    assert plugin.pid


def test_no_process_is_left_in_the_hosts_pid_namespace(shared: PluginEngine) -> None:
    program = (
        "import os, runpy, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); os.execv('/bin/python', ['python', '-c', 'import time; time.sleep(1000)'])\n"
        "sys.argv = ['x', 'MountingVolumes', '/run/docker/plugins/plugin.sock']\n"
        "runpy.run_module('tests.support.plugins.program', run_name='__main__')"
    )
    plugin = Installed(shared, PidHost=True, Entrypoint=["/bin/python", "-c", program])
    before = shared.footprint()
    plugin.enable()
    assert len(shared.footprint().processes) == len(before.processes) + 2
    plugin.ask("disable")
    shared.assert_settles(before)


def test_own_mounts_and_devices(shared: PluginEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of the host")
    plugin = Installed(
        shared,
        "MountingVolumes",
        VOLUMES,
        Interface={"Types": [VOLUMES], "Socket": "plugin.sock", "ProtocolScheme": "moby.plugins.http/v1"},
        Linux={"Capabilities": ["CAP_SYS_ADMIN"], "Devices": [{"Name": "f", "Path": "/dev/kmsg"}]},
        Mounts=[
            {"Name": "t", "Destination": "/t", "Type": "tmpfs", "Source": "tmpfs", "Options": ["size=1m"]},
            {"Name": "b", "Destination": "/b", "Type": "bind", "Source": str(tmp_path), "Options": ["rbind", "ro"]},
        ],
    ).enable()
    assert (plugin.root / "b/file").read_text() == "of the host"
    assert (plugin.root / "dev/kmsg").is_char_device()
    lines = {line.split()[4]: line for line in Path(f"/proc/{plugin.pid}/mountinfo").read_text().splitlines()}
    assert lines["/b"].split()[5].startswith("ro")
    assert " tmpfs " in lines["/t"]
    assert plugin.tree("/b") == {"file": "of the host"}
    assert "shared:" not in lines["/run/docker/plugins"], "its mounts there are not the host's"
    plugin.ask("disable")


def test_no_descriptor_is_left(shared: PluginEngine) -> None:
    plugin = Installed(shared)

    def cycle(name: str) -> None:
        plugin.enable()
        plugin.mounted(name, "one")
        plugin.tree(f"/data/{name}")
        plugin.tree("/app")
        kill_and_wait(plugin.pid)
        assert plugin.tree(f"/data/{name}") == {"file": "one"}
        plugin.ask("disable")

    cycle("first")
    before = shared.open_files()
    for name in ("second", "third", "fourth"):
        cycle(name)
    until("no descriptor is left", lambda: shared.open_files() <= before)


def test_a_log_plugin_that_replaces_what_it_can(engine: PluginEngine) -> None:
    """Nothing that a plugin can write is the source of its next mounts."""
    args = {"Name": "args", "Settable": ["value"], "Value": ["LogDriver"]}
    plugin = Installed(engine, "Plugin", "docker.logdriver/1.0", Args=args).enable()
    logging = plugin.root / "run/docker/logging"
    (logging / "own").touch()
    (plugin.root / "run/docker/plugins/logging").symlink_to("/")
    (plugin.root / f"run/docker/plugins/{plugin.id}.logging").symlink_to("/")
    pid = plugin.pid
    kill_and_wait(pid)
    plugin.next_pid(pid)
    assert os.listdir(plugin.root / "run/docker/logging") == ["own"]
    plugin.ask("disable")
    assert os.listdir(engine.run / "plugins") == []


def test_a_plugin_that_replaces_its_socket_by_a_link(engine: PluginEngine) -> None:
    plugin = Installed(engine).enable()
    plugin.mounted("v", "kept")
    socket = plugin.root / "run/docker/plugins/plugin.sock"
    socket.unlink()
    socket.symlink_to(engine.socket)
    pid = plugin.pid
    kill_and_wait(pid)
    plugin.next_pid(pid)
    assert plugin.call("VolumeDriver.Path", Name="v") == {"Mountpoint": "/data/v"}


def test_a_failed_enable_ends_soon(engine: PluginEngine) -> None:
    """Its process ignores SIGTERM, as every first process of a namespace that does not handle
    it.
    """
    hangs = Installed(engine, Entrypoint=["/bin/python", "-c", "import signal; signal.pause()"])
    begin = time.monotonic()
    assert "did not answer" in hangs.refused(timeout=1)
    # seconds: a stop in order takes 10 more
    assert time.monotonic() - begin < 1 + STOP_SECONDS


def test_a_daemon_that_ends_does_not_wait_for_a_start(engine: PluginEngine) -> None:
    hangs = Installed(engine, Entrypoint=["/bin/python", "-c", "import signal; signal.pause()"])

    def ask() -> None:
        # the daemon may end before it answers
        with contextlib.suppress(ControlError, OSError, ValueError):
            hangs.ask("enable", timeout=60)

    asking = threading.Thread(target=ask)
    asking.start()
    until("it runs", lambda: hangs.pid)
    begin = time.monotonic()
    engine.terminate()
    assert time.monotonic() - begin < STOP_SECONDS  # seconds: what it would wait
    asking.join()
    engine.start()
    assert hangs.pid == 0


def test_the_words_of_the_runtime(shared: PluginEngine) -> None:
    words = Installed(shared, Entrypoint=["/nope"]).refused()
    assert "/nope" in words and "{" not in words.partition("; its output")[0], words

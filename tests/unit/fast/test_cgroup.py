"""Counters: every parser compared with the simplest model of its format, recorded file trees of
both versions, and a live cgroup."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine._fast.cgroup import FORMS, NO_LIMIT, Counters, Processors, parse, samples
from engine.containers.stats import directories
from engine.runtime.cgroups import Cgroups
from tests.support import PATIENCE

MAX = 2**64 - 1
numbers = st.integers(0, MAX)
devices = st.integers(0, 2**32 - 1)
names = st.from_regex(rb"[a-z_0-9]{1,30}", fullmatch=True)
words = st.from_regex(rb"[A-Za-z]{1,12}", fullmatch=True)
garbage = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b"\n", b" ", b":", b"=", b"max", b"8:0 ", b"cpu", b"18446744073709551616"]),
    )
).map(b"".join)


def plain_lines(text: bytes) -> list[bytes]:
    """The complete lines of a text."""
    return text.split(b"\n")[:-1]


# --- forms ----------------------------------------------------------------------------------------


@given(st.lists(numbers, min_size=1))
def test_numbers(values: list[int]) -> None:
    text = b" ".join(b"%d" % value for value in values) + b" \n"
    assert [value for *_, value in parse("numbers", text)] == values


def test_max_and_overflow() -> None:
    assert parse("numbers", b"max\n") == [(b"", 0, 0, MAX)]
    assert parse(
        "numbers", b"18446744073709551615 18446744073709551616 99999999999999999999 000000000000000000001\n"
    ) == [(b"", 0, 0, MAX)]
    assert parse("numbers", b"-1 1.5 0x7 +1 maximum \n") == []


@given(st.lists(st.tuples(names, numbers)))
def test_flat(pairs: list[tuple[bytes, int]]) -> None:
    text = b"".join(b"%s %d\n" % pair for pair in pairs)
    assert [(name, value) for name, _, _, value in parse("flat", text)] == pairs


@given(st.lists(st.tuples(devices, devices, words, numbers)))
def test_io_v1(entries: list[tuple[int, int, bytes, int]]) -> None:
    text = b"".join(b"%d:%d %s %d\n" % entry for entry in entries) + b"Total 17\n"
    assert [(major, minor, op, value) for op, major, minor, value in parse("io_v1", text)] == entries


@given(st.lists(st.tuples(devices, devices, st.lists(st.tuples(words, numbers), max_size=7)), max_size=9))
def test_io_v2(entries: list[tuple[int, int, list[tuple[bytes, int]]]]) -> None:
    text = b"".join(
        b"%d:%d" % (major, minor) + b"".join(b" %s=%d" % pair for pair in pairs) + b" odd =7 cost.vrate=1.5\n"
        for major, minor, pairs in entries
    )
    assert parse("io_v2", text) == [
        (key, major, minor, value) for major, minor, pairs in entries for key, value in pairs
    ]


HEAD = (
    b"Inter-|   Receive                                                |  Transmit\n"
    b" face |bytes    packets errs drop fifo frame compressed multicast"
    b"|bytes    packets errs drop fifo colls carrier compressed\n"
)


@given(
    st.lists(
        st.tuples(
            st.from_regex(rb"[a-z0-9:@.\xff]{1,15}", fullmatch=True), st.lists(numbers, min_size=16, max_size=16)
        ),
        max_size=5,
    )
)
def test_interfaces(rows: list[tuple[bytes, list[int]]]) -> None:
    text = HEAD + b"".join(
        b"%6s: " % name + b" ".join(b"%7d" % value for value in values) + b"\n" for name, values in rows
    )
    assert parse("interfaces", text) == [
        (name, index, 0, value) for name, values in rows for index, value in enumerate(values[:4] + values[8:12])
    ]


def test_a_short_or_bad_line_of_an_interface_counts_for_nothing() -> None:
    line = b"  eth0: " + b" 1" * 16
    assert len(parse("interfaces", line + b"\n")) == 8
    assert parse("interfaces", line.replace(b" 1 1", b" 1 x", 1) + b"\n") == []
    assert parse("interfaces", b"  eth0: " + b" 1" * 15 + b"\n" + b":" + b" 1" * 16 + b"\n") == []


@given(st.lists(st.integers(0, 10**15), min_size=7, max_size=10), st.lists(st.integers(0, 4095), max_size=20))
def test_processors(times: list[int], online: list[int]) -> None:
    text = b"cpu  " + b" ".join(b"%d" % value for value in times) + b"\n"
    text += b"".join(b"cpu%d 1 2 3\n" % number for number in online) + b"intr 9 9 9\ncpu7 1\n"
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    (name, _, _, total), *rest = parse("processors", text)
    assert (name, total) == (b"cpu", sum(times[:7]) * tick % 2**64)
    assert [number for _, number, _, _ in rest] == online


@given(st.sampled_from(sorted(FORMS)), garbage, st.data())
def test_garbage_gives_only_what_whole_lines_give(form: str, text: bytes, data: st.DataObject) -> None:
    whole = parse(form, text)  # type: ignore[arg-type]
    cut = data.draw(st.integers(0, len(text)))
    begun = parse(form, text[:cut])  # type: ignore[arg-type]
    assert begun == whole[: len(begun)]
    if form != "processors":
        apart = [entry for line in plain_lines(text) for entry in parse(form, line + b"\n")]  # type: ignore[arg-type]
        assert apart == whole


@given(st.lists(st.tuples(names, numbers), min_size=1), st.data())
def test_a_cut_text_gives_no_wrong_number(pairs: list[tuple[bytes, int]], data: st.DataObject) -> None:
    text = b"".join(b"%s %d\n" % pair for pair in pairs)
    found = parse("flat", text[: data.draw(st.integers(0, len(text)))])
    assert [(name, value) for name, _, _, value in found] == pairs[: len(found)]


def test_unknown_form() -> None:
    with pytest.raises(KeyError):
        parse("xml", b"")  # type: ignore[arg-type]


# --- recorded trees -------------------------------------------------------------------------------


def write(directory: Path, files: dict[str, str]) -> bytes:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return os.fsencode(directory)


V1 = {
    "cpuacct": {"cpuacct.usage_percpu": "300 400 0 0 \n", "cpuacct.stat": "user 5\nsystem 7\n"},
    "cpu": {"cpu.stat": "nr_periods 10\nnr_throttled 3\nthrottled_time 12345\nwait_sum 9\n"},
    "memory": {
        "memory.stat": "cache 100\nrss 200\nhierarchical_memory_limit 1000\ntotal_cache 150\n",
        "memory.usage_in_bytes": "300\n",
        "memory.max_usage_in_bytes": "400\n",
        "memory.failcnt": "2\n",
        "memory.limit_in_bytes": "1000\n",
    },
    "io": {
        "blkio.throttle.io_service_bytes_recursive": "254:0 Read 4096\n254:0 Write 0\n254:0 Total 4096\nTotal 4096\n",
        "blkio.throttle.io_serviced_recursive": "254:0 Read 1\nTotal 1\n",
        "blkio.bfq.io_service_bytes_recursive": "Total 0\n",
    },
    "pids": {"pids.current": "4\n"},
}
V2 = {
    "cpu.stat": "usage_usec 12\nuser_usec 5\nsystem_usec 7\nnr_periods 10\nnr_throttled 3\nthrottled_usec 99\n",
    "memory.stat": "anon 200\nfile 100\nfile_mapped 30\ninactive_file 40\npgfault 9\n",
    "memory.current": "300\n",
    "memory.peak": "400\n",
    "memory.events": "low 0\nhigh 1\nmax 2\noom 0\noom_kill 0\n",
    "memory.max": "max\n",
    "memory.swap.current": "50\n",
    "io.stat": "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n",
    "pids.current": "4\n",
}


def test_v1(tmp_path: Path) -> None:
    places = {name: write(tmp_path / name, files) for name, files in V1.items()}
    sample = Counters(**places).sample()
    assert sample is not None
    assert (sample.cpu_total, sample.cpu_each) == (700, (300, 400, 0, 0))
    assert (sample.cpu_user, sample.cpu_kernel) == (50_000_000, 70_000_000)
    assert (sample.periods, sample.throttled_periods, sample.throttled_time) == (10, 3, 12345)
    assert sample.memory == {"cache": 100, "rss": 200, "hierarchical_memory_limit": 1000, "total_cache": 150}
    assert (sample.memory_usage, sample.memory_peak, sample.memory_failures, sample.memory_limit) == (300, 400, 2, 1000)
    assert sample.io == [(254, 0, "Read", 4096), (254, 0, "Write", 0), (254, 0, "Total", 4096)]
    assert sample.io_operations == [(254, 0, "Read", 1)]
    assert (sample.pids, sample.networks) == (4, {})
    assert not sample.memory_unified and not sample.io_unified


def test_v2(tmp_path: Path) -> None:
    place = write(tmp_path / "parent" / "container", V2)
    write(tmp_path / "parent", {"memory.max": "5000\n"})
    sample = Counters(cpu=place, memory=place, io=place, pids=place).sample()
    assert sample is not None
    assert (sample.cpu_total, sample.cpu_user, sample.cpu_kernel, sample.cpu_each) == (12_000, 5_000, 7_000, ())
    assert (sample.periods, sample.throttled_periods, sample.throttled_time) == (10, 3, 99_000)
    assert sample.memory_unified and sample.memory["anon"] == 200
    assert (sample.memory_usage, sample.memory_peak, sample.memory_failures) == (300, 400, 2)
    assert sample.memory_limit == 5000, "the least one above it counts"
    assert sample.memory_swap == 50
    assert sample.io_unified and sample.io[1] == (254, 0, "wbytes", 8192) and sample.io_operations == []
    assert sample.pids == 4


def test_v2_without_limit_and_peak(tmp_path: Path) -> None:
    place = write(tmp_path / "container", {name: text for name, text in V2.items() if name != "memory.peak"})
    counters = Counters(memory=place)
    first = counters.sample()
    (tmp_path / "container" / "memory.current").write_text("200\n")
    second = counters.sample()
    assert first is not None and second is not None
    assert first.memory_limit == NO_LIMIT
    assert (second.memory_usage, second.memory_peak) == (200, 300), "the highest that was seen"


def test_hybrid(tmp_path: Path) -> None:
    v1, v2 = write(tmp_path / "v1", V1["memory"]), write(tmp_path / "v2", V2)
    sample = Counters(cpu=v2, memory=v1, io=v2).sample()
    assert sample is not None
    assert (sample.cpu_total, sample.memory_usage, sample.memory_unified, sample.io_unified) == (
        12_000,
        300,
        False,
        True,
    )


def test_absent_controllers_count_zero(tmp_path: Path) -> None:
    place = write(tmp_path / "pids", V1["pids"])
    sample = Counters(pids=place, memory=os.fsencode(tmp_path / "none")).sample()
    assert sample is not None
    assert (sample.pids, sample.cpu_total, sample.memory, sample.io, sample.memory_limit) == (4, 0, {}, [], 0)


def test_files_cut_or_garbled_count_as_empty(tmp_path: Path) -> None:
    place = write(tmp_path, {"memory.usage_in_bytes": "12", "memory.stat": "cache 1\nrss x\n\0\xff\ntotal_ca"})
    sample = Counters(memory=place).sample()
    assert sample is not None
    assert (sample.memory_usage, sample.memory) == (0, {"cache": 1})


def test_files_longer_than_any_first_buffer(tmp_path: Path) -> None:
    disks = "".join(f"259:{minor} rbytes={minor} wbytes=1 rios=2 wios=3 dbytes=4 dios=5\n" for minor in range(3000))
    place = write(tmp_path, {**V2, "io.stat": disks})
    net = tmp_path / "dev"
    net.write_bytes(HEAD + b"".join(b"veth%d: " % number + b"%d " % number * 16 + b"\n" for number in range(2000)))
    sample = Counters(cpu=place, io=place, pids=place, network=os.fsencode(net)).sample()
    assert sample is not None
    assert len(sample.io) == 18_000 and sample.io[-6] == (259, 2999, "rbytes", 2999)
    assert len(sample.networks) == 2000 and sample.networks["veth1999"] == (1999,) * 8
    assert sample.pids == 4 and sample.cpu_total == 12_000


def test_nothing_there(tmp_path: Path) -> None:
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Counters(memory=os.fsencode(tmp_path / "gone"), network=b"/proc/self/net/dev")
    with pytest.raises(FileNotFoundError):
        Counters()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_live_as_long_as_the_object(tmp_path: Path) -> None:
    places = {name: write(tmp_path / name, files) for name, files in V1.items()}
    gc.collect()  # frees leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    counters = Counters(**places)
    opened = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    assert len(opened) > 8 and not any(map(os.get_inheritable, opened))
    del counters
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    counters = Counters(**places)
    counters.close()
    counters.close()
    assert counters.closed and counters.sample() is None
    assert set(os.listdir("/proc/self/fd")) == before


def test_samples_of_many_in_order(tmp_path: Path) -> None:
    many = [Counters(pids=write(tmp_path / str(number), {"pids.current": f"{number}\n"})) for number in range(40)]
    many[7].close()
    taken = samples(many)
    assert [None if sample is None else sample.pids for sample in taken] == [
        None if number == 7 else number for number in range(40)
    ]
    assert samples([]) == []
    with pytest.raises(TypeError):
        samples([many[0], None])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        samples(["x"])  # type: ignore[list-item]


def test_close_during_readings_in_other_threads(tmp_path: Path) -> None:
    place = write(tmp_path, V2)
    many = [Counters(cpu=place, memory=place, io=place, pids=place) for _ in range(50)]
    wrong: list[object] = []

    def read() -> None:
        while any(not counters.closed for counters in many):
            wrong.extend(sample for sample in samples(many) if sample is not None and sample.pids != 4)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for counters in many:
        counters.close()
    for thread in threads:
        thread.join()
    assert not wrong


def test_processors_of_this_host() -> None:
    processors = Processors()
    first, online = processors.read()
    assert first > 0 and len(online) == os.cpu_count()
    assert processors.read()[0] >= first
    processors.close()
    with pytest.raises(OSError):
        processors.read()
    with pytest.raises(FileNotFoundError):
        Processors(b"/proc/no-such-file")


# --- a live cgroup --------------------------------------------------------------------------------


class LiveCgroup:
    """A cgroup of its own in every hierarchy with counters, with processes in it."""

    def __init__(self, name: str) -> None:
        self.host = Cgroups.detect()
        self.path = f"/engined-test-{os.getpid()}-{name}"
        self.roots = [
            self.host.controllers[name]
            for name in ("cpu", "cpuacct", "memory", "blkio", "pids")
            if name in self.host.controllers
        ] or [self.host.unified]
        self.processes: list[subprocess.Popen[bytes]] = []
        for root in self.roots:
            os.makedirs(root + self.path, exist_ok=True)

    def run(self, *argv: str, below: str = "", session: bool = False) -> int:
        """The pid of a program started in the cgroup, or in one below it."""
        for root in self.roots:
            os.makedirs(root + self.path + below, exist_ok=True)

        groups = " ".join(f"{root}{self.path}{below}/cgroup.procs" for root in self.roots)
        enter = f'for group in {groups}; do echo 0 > $group; done; exec "$@"'
        process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *argv], stdout=subprocess.PIPE, stdin=subprocess.PIPE, start_new_session=session
        )
        self.processes.append(process)
        deadline = time.monotonic() + 10 * PATIENCE
        wanted = b"\0".join(map(os.fsencode, argv)) + b"\0"
        while Path(f"/proc/{process.pid}/cmdline").read_bytes() != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return process.pid

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.processes.clear()
        with contextlib.suppress(OSError):
            self.host.remove(self.path)

    def places(self) -> dict[str, bytes | None]:
        return directories(self.host, self.path)

    def limit_memory(self, size: int) -> None:
        directory = self.host.directory("memory", self.path)
        assert directory is not None
        (directory / ("memory.max" if self.host.mode == "v2" else "memory.limit_in_bytes")).write_text(str(size))


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Iterator[LiveCgroup]:
    host = Cgroups.detect()
    if os.geteuid() != 0 or not {"memory", "pids"} <= host.controllers.keys() | set(host.unified_controllers):
        pytest.skip("needs root and cgroup controllers")
    cgroup = LiveCgroup(request.node.name[:40].replace("[", "-").replace("]", ""))
    try:
        yield cgroup
    finally:
        cgroup.end()
        assert not any(os.path.exists(root + cgroup.path) for root in cgroup.roots)


WORK = """
import sys
block = bytearray(b'x') * (32 << 20)
for n in range(2000000): pass
print('ready', flush=True)
sys.stdin.read()
"""


def test_a_live_container(live: LiveCgroup) -> None:
    live.limit_memory(128 << 20)
    counters = Counters(**live.places())
    before = counters.sample()
    live.run(sys.executable, "-c", WORK)
    live.run("sleep", "1000", below="/inner")
    assert live.processes[0].stdout is not None and live.processes[0].stdout.readline() == b"ready\n"
    after = counters.sample()
    assert before is not None and after is not None
    assert (before.pids, after.pids) == (0, 2)
    assert after.cpu_total > before.cpu_total + 10_000_000
    assert 32 << 20 < after.memory_usage <= after.memory_peak <= 128 << 20 == after.memory_limit
    if live.host.mode == "v2":
        assert after.memory_unified and after.io_unified and after.cpu_each == ()
        assert after.memory["anon"] >= 32 << 20
    else:
        assert sum(after.cpu_each) == after.cpu_total
        assert after.memory["rss"] >= 32 << 20 and after.memory["total_rss"] >= after.memory["rss"]
        assert after.memory["hierarchical_memory_limit"] == 128 << 20


def test_the_interfaces_of_this_host(tmp_path: Path) -> None:
    counters = Counters(pids=write(tmp_path, V2), network=b"/proc/self/net/dev")

    def interfaces() -> set[str]:
        text = Path("/proc/self/net/dev").read_text()
        return {line.split(":")[0].strip() for line in text.splitlines() if ":" in line} - {"lo"}

    while True:  # interfaces of engines may appear and vanish meanwhile
        before, sample, after = interfaces(), counters.sample(), interfaces()
        if before == after:
            break
    assert sample is not None and sample.networks.keys() == after


def test_gone(live: LiveCgroup) -> None:
    counters = Counters(**live.places())
    assert counters.sample() is not None
    live.end()
    assert counters.sample() is None
    with pytest.raises(FileNotFoundError):
        Counters(**live.places())


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a network namespace")
def test_interfaces_are_those_of_the_process(tmp_path: Path) -> None:
    place = write(tmp_path, V2)
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        sample = Counters(pids=place, network=b"/proc/%d/net/dev" % process.pid).sample()
        assert sample is not None
        assert "eth0" not in sample.networks and "lo" not in sample.networks
        process.communicate(b"\n")
    sample = Counters(pids=place, network=b"/proc/%d/net/dev" % process.pid).sample()
    assert sample is not None and sample.networks == {}

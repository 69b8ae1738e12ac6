"""Nothing is lost on the way to a remote target, and the order is kept: targets that go away, cut
connections, stop reading or are killed; a shipper and a monitor that are killed; full spools.

Delivery is at least once. Each test says how often lines may arrive twice.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.logs.deliveries import Fluentd, Gelf, Remote, Syslog, Tls
from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.logs import numbered
from tests.support.logs.shipping import Shipping, Spool
from tests.support.logs.targets.certificates import Authority
from tests.support.logs.targets.forward import ForwardReceiver
from tests.support.logs.targets.gelf import GelfTcp
from tests.support.logs.targets.storing import Storing
from tests.support.logs.targets.streams import DatagramReceiver, StreamReceiver, finish, reset

Receiver = StreamReceiver | DatagramReceiver


@dataclass
class End:
    """A remote end: its receiver, the target of containers, and the texts that have arrived."""

    kind: str
    receiver: Any
    target: Remote
    texts: Callable[[], list[bytes]]


def made(kind: str, base: Path) -> End:
    match kind:
        case "tcp":
            plain = StreamReceiver()
            return End(kind, plain, Syslog("tcp", "127.0.0.1", plain.port), lambda: _ended(plain.lines()))
        case "tls":
            authority = Authority(base / "ca")
            secured = StreamReceiver(pair=authority.sign("server"))
            target = Syslog("tcp+tls", "127.0.0.1", secured.port, format="rfc5424", tls=Tls(ca=authority.cert))
            return End(kind, secured, target, lambda: _ended(secured.frames()))
        case "unix":
            local = StreamReceiver(path=str(base / "stream"))
            return End(kind, local, Syslog("unix", path=local.path), lambda: _ended(local.lines()))
        case "unixgram":
            datagrams = DatagramReceiver(str(base / "datagram"))
            return End(kind, datagrams, Syslog("unixgram", path=datagrams.path), lambda: _ended(datagrams.lines()))
        case "gelf":
            gelf = GelfTcp()
            target = Gelf("tcp", "127.0.0.1", gelf.port)
            return End(kind, gelf, target, lambda: _ended([each["short_message"].encode() for each in gelf.messages()]))
        case "fluentd" | "fluentd with acks":
            forward = ForwardReceiver()
            forwarded = Fluentd(port=forward.port, request_ack=kind == "fluentd with acks", retry_wait=0.1)
            texts = lambda: [each.record["log"].encode() + b"\n" for each in list(forward.events)]  # noqa: E731
            return End(kind, forward, forwarded, texts)
    raise AssertionError(kind)


def _ended(texts: list[bytes]) -> list[bytes]:
    return [text + b"\n" for text in texts]


STREAMS = ["tcp", "tls", "unix", "gelf", "fluentd", "fluentd with acks"]
KINDS = [*STREAMS, "unixgram"]


@pytest.fixture
def end(request: pytest.FixtureRequest, base: Path) -> Iterator[End]:
    found = made(request.param, base)
    with found.receiver:
        yield found


def arrived(texts: Callable[[], list[bytes]], wanted: dict[str, int], seconds: float = 60) -> dict[str, Any]:
    """Waits until every line has arrived, and returns the verdicts."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not numbered.complete(texts(), wanted) and time.monotonic() < deadline:
        time.sleep(0.05)  # to decode them all takes long
    return numbered.assert_right(texts(), wanted)


def waiting(shipping: Shipping) -> int:
    return sum(int(each["waiting"]) for each in shipping.states().values())


class Writers:
    """Containers with numbered lines."""

    def __init__(self, shipping: Shipping, target: Remote, count: int, **more: Any) -> None:
        self.spools: dict[str, Spool] = {f"c{index}": shipping.spool(target, **more) for index in range(count)}
        self.wanted = dict.fromkeys(self.spools, 0)

    def write(self, lines: int, size: int = 92) -> None:
        """So many of each."""
        for name, spool in self.spools.items():
            spool.write(numbered.lines(name, self.wanted[name], lines, size))
            self.wanted[name] += lines


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", KINDS, indirect=True)
def test_a_target_that_is_away_and_returns(shipping: Shipping, end: End) -> None:
    """Lines that are written meanwhile wait, and arrive once."""
    end.receiver.away()
    writers = Writers(shipping, end.target, 3)
    writers.write(1000)
    shipping.start()
    until("it is away", lambda: all(each["error"] for each in shipping.states().values()))
    writers.write(1000)
    end.receiver.start()
    for verdict in arrived(end.texts, writers.wanted).values():
        assert verdict.duplicates == 0
    until("no error", lambda: not any(each["error"] for each in shipping.states().values()))


@pytest.mark.parametrize(
    ("end", "cut"),
    # a receiver with TLS cannot end its side alone
    [(kind, cut) for kind in STREAMS for cut in (reset, finish) if (kind, cut) != ("tls", finish)],
    indirect=["end"],
)
def test_connections_that_are_cut(shipping: Shipping, end: End, cut: Callable[..., None]) -> None:
    """Each new connection sends again what had not arrived for sure."""
    end.receiver.cut, end.receiver.cut_after = cut, 50_000
    writers = Writers(shipping, end.target, 2)
    shipping.start()
    deadline = time.monotonic() + 60 * PATIENCE
    while len(end.receiver.connections) < 4:
        writers.write(50)
        time.sleep(0.01)
        assert time.monotonic() < deadline
    end.receiver.cut_after = 0
    writers.write(100)
    for verdict in arrived(end.texts, writers.wanted).values():
        assert verdict.restarts < len(end.receiver.connections)


@pytest.mark.parametrize("end", KINDS, indirect=True)
@pytest.mark.parametrize("reads", ["nothing", "slowly"])
def test_killed_with_unread_data(shipping: Shipping, end: End, reads: str) -> None:
    """The kernel has acknowledged what the process has not read."""
    if reads == "nothing":
        end.receiver.pause()
    else:
        end.receiver.pace = 200_000 if end.kind != "unixgram" else 2000
    writers = Writers(shipping, end.target, 2)
    writers.write(5000)
    shipping.start()
    if reads == "nothing":
        until("it is connected", lambda: end.kind == "unixgram" or end.receiver.connections)
        time.sleep(0.5)  # no event says when the kernels' buffers are full
    else:
        until("it reads", lambda: len(end.texts()) > 500)
    end.receiver.away()
    end.receiver.resume()
    end.receiver.pace = 0
    end.receiver.start()
    for verdict in arrived(end.texts, writers.wanted).values():
        assert verdict.restarts <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["lines", "nul", "forward"])
def test_receivers_that_are_killed(shipping: Shipping, base: Path, kind: str) -> None:
    """They have stored what they have read. Again and again, while lines come."""
    chance = random.Random(kind)
    with Storing(base / "r", kind) as receiver:
        targets: dict[str, Remote] = {
            "lines": Syslog("tcp", "127.0.0.1", receiver.port),
            "nul": Gelf("tcp", "127.0.0.1", receiver.port),
            "forward": Fluentd(port=receiver.port, request_ack=True, retry_wait=0.1),
        }
        writers = Writers(shipping, targets[kind], 3)
        shipping.start()
        for _ in range(5):
            end = time.monotonic() + chance.uniform(0.1, 0.4)
            while time.monotonic() < end:
                writers.write(50)
                time.sleep(0.01)
            receiver.kill()
            writers.write(200)
            receiver.start()

        def texts() -> list[bytes]:
            messages = receiver.messages()
            if kind == "nul":
                messages = [json.loads(each)["short_message"].encode() for each in messages]
            return _ended(messages)

        for verdict in arrived(texts, writers.wanted).values():
            assert verdict.restarts <= 5


def test_a_name_that_goes_away(base: Path) -> None:
    """The name is resolved at each attempt. /etc/hosts is the test's, in a mount namespace."""
    hosts = base / "hosts"
    hosts.write_text("127.0.0.1 log.example\n")
    script = f"mount --make-rprivate / && mount --bind {hosts} /etc/hosts && echo ready && exec sleep infinity"
    with ExitStack() as stack:
        holder = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE)
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        stack.enter_context(holder.stdout)
        assert holder.stdout.readline() == b"ready\n"
        receiver = stack.enter_context(StreamReceiver())
        shipping = Shipping(base, ("nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"))
        stack.callback(shipping.close)
        writers = Writers(shipping, Syslog("tcp", "log.example", receiver.port), 1)
        writers.write(10)
        shipping.start()
        arrived(lambda: _ended(receiver.lines()), writers.wanted)
        hosts.write_text("")
        receiver.away()
        writers.write(10)
        state = until(
            "it cannot be resolved",
            lambda: (found := next(iter(shipping.states().values())))["error"].startswith("lookup") and found,
        )
        assert state["error"].startswith("lookup log.example: ")
        receiver.start()
        hosts.write_text("127.0.0.1 log.example\n")
        arrived(lambda: _ended(receiver.lines()), writers.wanted)


# --- the engine's processes -----------------------------------------------------------------------


@pytest.mark.parametrize("end", KINDS, indirect=True)
def test_the_shipper_is_killed(shipping: Shipping, end: End) -> None:
    """At random, while lines come."""
    chance = random.Random(end.kind)
    writers = Writers(shipping, end.target, 3)
    shipping.start()
    for _ in range(6):
        until_then = time.monotonic() + chance.uniform(0.05, 0.4)
        while time.monotonic() < until_then:
            writers.write(20)
            time.sleep(0.01)
        shipping.kill()
        writers.write(50)
        shipping.start()
    for verdict in arrived(end.texts, writers.wanted).values():
        assert verdict.restarts <= 6


@pytest.mark.parametrize("end", ["tcp", "unixgram", "fluentd with acks"], indirect=True)
def test_the_shipper_ends_in_order(shipping: Shipping, end: End) -> None:
    """Nothing arrives twice then, if the target reads it in time: unit/shipper/test_streams.py."""
    writers = Writers(shipping, end.target, 3)
    shipping.start()
    for _ in range(4):
        writers.write(500)
        until(
            "something has been sent",
            lambda: any(each["waiting"] < 1000 for each in shipping.states().values()) or end.texts(),
        )
        assert shipping.kill(signal.SIGTERM) == 0
        writers.write(500)
        shipping.start()
    for verdict in arrived(end.texts, writers.wanted).values():
        assert verdict.restarts <= 4


@pytest.mark.parametrize("end", ["tcp", "fluentd with acks"], indirect=True)
def test_the_monitor_is_killed(shipping: Shipping, end: End) -> None:
    """The next one makes the board's slots again; some containers have ended meanwhile, others are
    new."""
    writers = Writers(shipping, end.target, 4)
    shipping.start()
    for turn in range(5):
        writers.write(300)
        if turn == 2:
            writers.spools["c0"].running = False
            del writers.spools["c0"]
            writers.spools["c9"] = shipping.spool(end.target)
            writers.wanted["c9"] = 0
        shipping.replace_monitor()
        writers.write(300)
    for verdict in arrived(end.texts, writers.wanted).values():
        assert verdict.duplicates == 0
    if end.kind == "fluentd with acks":
        running = list(writers.spools.values())
        until("the board has it", lambda: all(spool.writer.unacked == 0 for spool in running))


@pytest.mark.nightly
def test_all_are_killed(shipping: Shipping, base: Path) -> None:
    """Shipper, monitor and receiver, in any order."""
    chance = random.Random(1)
    with Storing(base / "r", "forward") as receiver:
        writers = Writers(shipping, Fluentd(port=receiver.port, request_ack=True, retry_wait=0.1), 3)
        shipping.start()
        kills = 0
        for _ in range(12):
            writers.write(chance.randrange(500))
            time.sleep(chance.uniform(0, 0.1))
            match chance.choice(["shipper", "monitor", "receiver"]):
                case "shipper":
                    shipping.kill()
                    shipping.start()
                    kills += 1
                case "monitor":
                    shipping.replace_monitor()
                case "receiver":
                    receiver.kill()
                    receiver.start()
                    kills += 1
        for verdict in arrived(lambda: _ended(receiver.messages()), writers.wanted).values():
            assert verdict.restarts <= kills


# --- spools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["tcp", "fluentd with acks", "unixgram"], indirect=True)
@pytest.mark.parametrize("keep", [True, False])
def test_rotation_while_the_target_is_away(shipping: Shipping, end: End, keep: bool) -> None:
    """No file is removed before its lines are delivered, with and without a cache for `docker
    logs`."""
    end.receiver.away()
    writers = Writers(shipping, end.target, 2, max_size=20_000, max_file=3 if keep else 1, keep=keep)
    shipping.start()
    for _ in range(40):
        writers.write(50)
    spool = writers.spools["c0"]
    assert len(list(spool.directory.glob("spool.log*"))) > 10
    end.receiver.start()
    for _ in range(10):
        writers.write(50)
    arrived(end.texts, writers.wanted)
    if end.kind != "tcp":
        until("all is delivered", lambda: spool.writer.unacked == 0)
        writers.write(500)
        until("files are removed", lambda: spool.writer.look() or len(_files(spool)) <= 3 + 3)


def _files(spool: Spool) -> list[Path]:
    return list(spool.directory.glob("spool.log*"))


@pytest.mark.parametrize("end", ["tcp", "unix", "tls", "fluentd with acks", "unixgram"], indirect=True)
def test_a_container_waits_for_a_slow_target(shipping: Shipping, end: End) -> None:
    """In blocking mode, with a spool of 300 KB, and goes on as fast as the target reads."""
    end.receiver.pace = 1_000_000 if end.kind != "unixgram" else 5000
    writers = Writers(shipping, end.target, 1, quota=300_000, max_size=100_000, max_file=3)
    shipping.start()
    paused = 0
    for _ in range(15):
        writers.write(400, 300)
        paused += writers.spools["c0"].full
    assert paused
    arrived(end.texts, writers.wanted, 120)


def test_a_small_spool_does_not_wait_for_a_fast_target(shipping: Shipping) -> None:
    """A peer's buffer may be larger than the whole spool. The connection is turned over then."""
    with StreamReceiver() as receiver:
        writers = Writers(shipping, Syslog("tcp", "127.0.0.1", receiver.port), 1, quota=1_000_000)
        shipping.start()
        begin = time.monotonic()
        for _ in range(60):
            writers.write(400, 300)
        (verdict,) = arrived(lambda: _ended(receiver.lines()), writers.wanted).values()
        assert verdict.duplicates == 0
        assert time.monotonic() - begin < 150, "seven times full, COMMIT_AFTER would be 30 s each time"
        assert len(receiver.connections) > 3


@pytest.mark.parametrize("end", ["tcp", "fluentd with acks", "unixgram"], indirect=True)
def test_lines_that_are_lost_are_counted(shipping: Shipping, end: End) -> None:
    """In non-blocking mode, while the target is away. One line says how many."""
    end.receiver.away()
    writers = Writers(shipping, end.target, 1, blocking=False, quota=100_000, max_size=50_000, max_file=2)
    (spool,) = writers.spools.values()
    shipping.start()
    for _ in range(30):
        writers.write(100)
        until("it has been seen", lambda: shipping.states()[spool.id])
    end.receiver.start()
    until("the last line has arrived", lambda: any(b"c0:2999 " in text for text in end.texts()), 60)
    texts = end.texts()
    (notice,) = [text for text in texts if b" lines of this container were lost before this one" in text]
    lost = int(notice.partition(b" lines of")[0].split()[-1])
    numbers = numbered.by_writer(texts)["c0"]
    assert numbers == list(range(lost, 3000)) and texts.index(notice) == 0
    assert 1500 < lost < 2800
    until("it is delivered", lambda: end.kind == "tcp" or shipping.states()[spool.id]["waiting"] == 0)
    until("it is counted", lambda: shipping.states()[spool.id]["dropped"] == lost or end.kind == "tcp")


def test_a_flood_delays_others_by_less_than_a_second(shipping: Shipping) -> None:
    """200 containers share a connection to a target that reads 20 MB/s."""
    with StreamReceiver(pace=20_000_000) as receiver:
        target = Syslog("tcp", "127.0.0.1", receiver.port)
        flood = shipping.spool(target, tag="flood")
        others = [shipping.spool(target, tag=f"c{index}") for index in range(199)]
        flood.write(numbered.lines("flood", 0, 300_000, 92))
        shipping.start()
        until("it floods", lambda: receiver.size > 1_000_000)
        begin = time.monotonic()
        for index, spool in enumerate(others):
            spool.write(numbered.line(f"c{index}", 0))
        until("the others have arrived", lambda: receiver_has(receiver, 199))
        delay = time.monotonic() - begin
        assert receiver.size < 30_000_000, "the flood was over"
        print(f"199 others after {delay:.3f} s")
        assert delay < 1.0 * PATIENCE


def receiver_has(receiver: StreamReceiver, count: int) -> bool:
    return sum(bytes(stream.data).count(b":0\n") for stream in receiver.connections) >= count


def test_removed_containers(shipping: Shipping) -> None:
    """Their lines are delivered when the target returns, and the spool is removed."""
    with StreamReceiver(path=str(shipping.run / "t")) as receiver:
        receiver.away()
        spool = shipping.spool(Syslog("unix", path=receiver.path))
        spool.write(numbered.lines("a", 0, 100))
        shipping.start()
        until("it is away", lambda: shipping.states()[spool.id]["error"])
        spool.end()
        moved = shipping.removed(spool)
        receiver.start()
        arrived(lambda: _ended(receiver.lines()), {"a": 100})
        until("it is removed", lambda: not moved.exists(), 60)
        assert shipping.states() == {}

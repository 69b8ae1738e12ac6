"""The OCI runtime, crun or runc: which one works on this host, its command lines, and the meaning
of its errors.

Rules: crun(1), runc(8). The monitor spawns `run` and `exec` with the argv made here. `state`,
       `delete`, `kill` and the others are spawned here, in threads.

Owns: the runtime's state directory RUN/runtime, while the engine runs. Not here: config.json
      (`containers/spec.py`), the processes' stdio and exits (`monitor/`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError, words
from engine.runtime import cgroups, seccomp
from engine.runtime.cgroups import Cgroups
from engine.system.files import remove_tree
from engine.wire import oci

_log = logging.getLogger(__name__)

CANDIDATES = ("crun", "runc")
"""In order of preference: crun takes a third of runc's time and memory to start a container."""

SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CONSOLE, PID, LOG, PROCESS = "@console@", "@pid@", "@log@", "@process@"
"""Placeholders in an argv for paths that the monitor fills in: the console socket, the pid file,
the runtime's log, the process document.
"""

SECCOMP_PROGRAM = "run.oci.seccomp_bpf_data"
"""crun's annotation for a compiled filter in base64, used instead of `linux.seccomp`."""

PROBE_SECONDS = 10
COMMAND_SECONDS = 60

_KNOWN = ("crun", "runc", "youki")
"""Runtimes with the option --no-new-keyring."""

COMMAND_NOT_FOUND, COMMAND_NOT_INVOKED, NOT_STARTED = 127, 126, 128
"""Exit codes of a container that could not start, as `docker run` documents them."""


class State(msgspec.Struct, frozen=True):
    """The runtime's state of a container; `status` is created, running, paused or stopped."""

    status: str
    pid: int = 0


class Failure(NamedTuple):
    """A failed start: the error for the client and the exit code that the container keeps."""

    error: EngineError
    exit_code: int


class Trial(NamedTuple):
    """The result of one candidate on a trivial bundle. `reason`: its error text if it failed."""

    works: bool
    takes_program: bool
    reason: str


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime that was tested on this host."""

    name: str
    path: str
    version: str
    reason: str
    """The reason for this choice, in a sentence for the log and `engined check`."""
    root: str
    family: str = ""
    """The program's own name, the first word of `--version`; empty: `name`."""
    arguments: tuple[str, ...] = ()
    """Between the program and its command."""
    no_pivot: bool = False
    """It changes the root without pivot_root(2), for hosts whose root is a ramdisk."""
    takes_program: bool = False
    """True if it accepts a compiled seccomp filter (`SECCOMP_PROGRAM`), which saves more than half
    of a start.
    """

    @classmethod
    def probe(cls, choice: str, run: Path, arguments: Sequence[str] = (), *, no_pivot: bool = False) -> Runtime:
        """Find the runtime that works: `choice` (a name or path) alone when given, with its
        arguments, else the first of `CANDIDATES`.

        Each candidate runs a trivial container once, which takes about 20 ms. Raises ServerError
        with the candidates, the reason why each failed, and a package to install.
        """
        hierarchies = Cgroups.detect()
        if hierarchies.mode == "none":
            raise ServerError("no cgroup hierarchy is mounted on this host; mount cgroup2 at /sys/fs/cgroup")
        if hierarchies.missing:
            _log.warning("cgroup controllers missing on this host: %s", ", ".join(hierarchies.missing))
        rejected: list[str] = []
        for candidate in (choice,) if choice else CANDIDATES:
            path = shutil.which(candidate, path=f"{os.environ.get('PATH', '')}:{SEARCH}")
            if path is None:
                rejected.append(f"{candidate}: not installed")
                continue
            with hierarchies.hold():
                trial = attempt((path, *arguments), run, no_pivot=no_pivot)
            if trial.works:
                reason = "chosen by the operator" if choice else "; ".join(rejected) or "preferred"
                family, version = words_of_version(path, *arguments)
                found = cls(
                    name=Path(path).name,
                    path=path,
                    version=version,
                    family=family,
                    reason=reason,
                    root=str(run / "runtime"),
                    arguments=tuple(arguments),
                    no_pivot=no_pivot,
                    takes_program=trial.takes_program,
                )
                _log.info("runtime %s %s (%s)", found.path, found.version, found.reason)
                return found
            rejected.append(f"{candidate}: {trial.reason}{_cure(trial.reason, hierarchies)}")
        raise ServerError(
            f"no OCI runtime works on this host ({'; '.join(rejected)}). "
            "Install crun or runc, for example: apt install crun"
        )

    def run_argv(
        self,
        key: str,
        *,
        bundle: Path,
        pid_file: Path | str = PID,
        log: Path | str = LOG,
        tty: bool = False,
        scope: bool = False,
    ) -> tuple[str, ...]:
        """Create and start a container. `scope`: in a scope of systemd.

        The container gets no session keyring of its own, because keys have a quota per user that a
        dense host exhausts.
        """
        console = ("--console-socket", CONSOLE) if tty else ()
        keyring = ("--no-new-keyring",) if self.implementation in _KNOWN else ()
        return (
            *self._command("run", log=log, scope=scope),
            *("--detach", *keyring, *self._pivot, "--bundle", str(bundle), "--pid-file", str(pid_file)),
            *(*console, key),
        )

    def exec_argv(
        self,
        key: str,
        *,
        process: Path | str = PROCESS,
        pid_file: Path | str = PID,
        log: Path | str = LOG,
        tty: bool = False,
    ) -> tuple[str, ...]:
        """Start another process, described by the OCI process document in `process`."""
        console = ("--tty", "--console-socket", CONSOLE) if tty else ()
        return (
            *self._command("exec", log=log),
            *("--detach", "--process", str(process), "--pid-file", str(pid_file)),
            *(*console, key),
        )

    async def state(self, key: str) -> State:
        """Raises NotFound when the runtime does not know the container."""
        return msgspec.json.decode(await self._call("state", key), type=State)

    async def delete(self, key: str) -> None:
        """Kill the container's remaining processes, remove its cgroup and the runtime's state.

        Does nothing if it is gone already.
        """
        try:
            await self._call("delete", "--force", key)
        except NotFound:
            return

    async def discard(self, key: str, cgroup: str, hierarchies: Cgroups) -> None:
        """Clean up after a container whose processes have all ended: its cgroup, and the runtime's
        state directory.

        Done in process, because spawning the runtime would take a third of the time of a short
        container. If a process has remained, the runtime's own `delete` is executed.
        """
        try:
            await asyncio.to_thread(self._discard, key, cgroup, hierarchies)
        except OSError as error:
            _log.info("cleaning up after container %s: %s; executing the runtime's delete", key, words(error))
            await self.delete(key)

    def _discard(self, key: str, cgroup: str, hierarchies: Cgroups) -> None:
        hierarchies.remove(cgroup)
        remove_tree(Path(self.root) / key)

    async def kill(self, key: str, number: int) -> None:
        await self._call("kill", key, str(number))

    async def pause(self, key: str) -> None:
        await self._call("pause", key)

    async def resume(self, key: str) -> None:
        """Thaw the container. Not an error if it is not frozen, because two clients may do this at
        once.
        """
        try:
            await self._call("resume", key)
        except ServerError as error:
            if "not paused" not in error.message:
                raise

    async def update(self, key: str, resources: oci.Resources) -> None:
        """Change limits of a running container.

        The caller has already removed limits of -1 (`Cgroups.lift`).
        """
        if self.implementation != "runc":
            # crun writes -1 as it is, which the kernel refuses. runc needs it, or its next update
            # would restore the old limit.
            if resources.cpu is not None and resources.cpu.quota == -1:
                resources = msgspec.structs.replace(resources, cpu=msgspec.structs.replace(resources.cpu, quota=None))
            if resources.pids is not None and resources.pids.limit == -1:
                resources = msgspec.structs.replace(resources, pids=None)
        await self._call("update", "--resources", "-", key, stdin=oci.encode(resources))

    def seccomp(self, profile: seccomp.Profile) -> tuple[msgspec.Raw, dict[str, str]]:
        """The seccomp section and the annotations for this profile.

        With a compiled filter the section is included too, as a fallback.
        """
        return profile.section, {SECCOMP_PROGRAM: profile.program} if self.takes_program and profile.program else {}

    @property
    def implementation(self) -> str:
        """`crun`, `runc` or another, also for a runtime to which the operator gave a name."""
        return self.family or self.name

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return self.path, *self.arguments

    @property
    def _pivot(self) -> tuple[str, ...]:
        return ("--no-pivot",) if self.no_pivot else ()

    def _command(self, verb: str, *, log: Path | str = "", scope: bool = False) -> tuple[str, ...]:
        logging_options = ("--log", str(log), "--log-format", "json") if log else ()
        driver = ("--systemd-cgroup",) if scope else ()
        return (*self.command, "--root", self.root, *driver, *logging_options, verb)

    async def _call(self, verb: str, *arguments: str, stdin: bytes = b"") -> bytes:
        key = arguments[-1]
        argv = (*self._command(verb), *arguments)
        try:
            done = await asyncio.to_thread(_spawn, argv, stdin)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"{self.name} {verb} {key}: {words(error)}") from error
        if done.returncode == 0:
            return done.stdout
        reason = failure_reason(done.stderr.decode(errors="replace"))
        if any(words in reason for words in _GONE):
            raise NotFound(f"No such container: {key}")
        raise ServerError(f"{self.name} {verb} {key}: {reason}")


_GONE = (
    "does not exist",
    "No such file or directory",
    "No such device",
    "not found",
    "is not running",
    "No such process",
)
"""Error texts of crun and runc for a missing container, or one whose process has just ended; ENODEV
comes from a file of a removed control group.
"""


def _spawn(argv: tuple[str, ...], stdin: bytes, seconds: int = COMMAND_SECONDS) -> subprocess.CompletedProcess[bytes]:
    # SIGPIPE stays ignored: otherwise it kills crun in `delete` when a poststop hook ends without
    # reading its input, and the container's state is left.
    return subprocess.run(argv, input=stdin, capture_output=True, timeout=seconds, check=False, restore_signals=False)


# --- errors of the runtime ------------------------------------------------------------------------


class _LogEntry(msgspec.Struct):
    msg: str = ""
    level: str = "error"


_log_entry = msgspec.json.Decoder(_LogEntry)


def _log_entries(log: str) -> Iterator[str]:
    """A line each. crun 1.28 has several for an object, the first and the last with a brace
    alone.
    """
    unfinished: list[str] = []
    for line in log.split("\n"):  # U+2028 may be in a path
        if unfinished or line == "{":
            unfinished.append(line.strip())
            if line == "}":
                yield " ".join(unfinished)
                unfinished.clear()
        elif line.strip():
            yield line
    if unfinished:
        yield " ".join(unfinished)


def failure_reason(log: str) -> str:
    """The last error of a runtime's log (JSON, or the plain text of its stderr), without generic
    prefixes.
    """
    last = ""
    for text in _log_entries(log):
        try:
            entry = _log_entry.decode(text)
        except msgspec.MsgspecError:
            last = text.strip()
        else:
            if entry.level in ("error", "fatal", "critical"):
                last = entry.msg
    return re.sub(
        r"^(runc (run|create|exec) failed: |unable to start container process: |error during container init: )+",
        "",
        last,
    )


_HINT = (
    ": Are you trying to mount a directory onto a file (or vice-versa)? "
    "Check if the specified host path exists and is the expected type"
)
"""Docker's."""
_CRUN_NO_PROGRAM = re.compile(
    "(?:executable file|the path) `(?P<file>.*)` "
    "(?P<why>not found|exists but it is not executable|is not a regular file)"
)
"""crun 1.8.1 says "not found in $PATH", also of a path. 1.21 does not, and knows the other two."""
_CRUN_NOT_OPENED = re.compile(
    r"(?:open executable|access executable|exec .*|cannot find `` in \$PATH): (?P<cause>[A-Z].*)$"
)
_STRERRORS = {
    os.strerror(number): os.strerror(number)[:1].lower() + os.strerror(number)[1:] for number in range(1, 134)
}


_FEW_FILES = 64
"""crun 1.8.1 fails with a limit of 40, and starts containers with one of 48."""


def start_failure(log: str, program: str, verb: Literal["create", "exec"] = "create", *, files: int = -1) -> Failure:
    """The error of a failed start or exec of `program`. `log`: the runtime's log. `files`: the
    container's limit of open files, within which the runtime fails in various places; -1: none.

    The texts are those that the docker CLI turns into exit codes 127 ("executable file not found",
    "no such file or directory") and 126 ("permission denied", "is a directory"); crun uses other
    texts.
    """
    reason = failure_reason(log) or "the runtime gave no reason"
    if found := _CRUN_NO_PROGRAM.search(reason):
        file = found["file"]
        if "/" not in file:  # as by runc, also of a file in $PATH that is not executable
            cause = "executable file not found in $PATH"
        elif found["why"] == "not found":
            cause = f"stat {file}: no such file or directory"
        else:
            cause = "permission denied"
        reason = f'exec: "{file}": {cause}'
    elif found := _CRUN_NOT_OPENED.match(reason):
        # crun opens the file, which fails with EPERM for a directory. runc checks the file's mode.
        cause = found["cause"].lower()
        if not program:
            cause = "executable file not found in $PATH"
        reason = f'exec: "{program}": ' + ("permission denied" if cause == "operation not permitted" else cause)
    else:
        head, colon, cause = reason.rpartition(": ")
        reason = f"{head}{colon}{_STRERRORS.get(cause, cause)}"
        if "mount" in head and reason.endswith("not a directory"):
            reason += _HINT
    message = f"OCI runtime {verb} failed: {reason}"
    if 0 <= files < _FEW_FILES:
        message += f" (the runtime itself needs more than the {files} open files that the ulimit nofile allows)"
    code = failure_code(reason)
    # As in Docker, 404 of an exec means its container or the exec itself.
    not_found = NotFound if verb == "create" else InvalidParameter
    kind = {COMMAND_NOT_FOUND: not_found, COMMAND_NOT_INVOKED: InvalidParameter}.get(code, ServerError)
    return Failure(kind(message), code)


def failure_code(message: str) -> int:
    """The exit code of a container whose start failed with this message, by the texts that the
    docker CLI matches too.
    """
    if "executable file not found" in message or "no such file or directory" in message:
        return COMMAND_NOT_FOUND
    if re.search(r"permission denied|is a directory|not a directory|exec format error", message):
        return COMMAND_NOT_INVOKED
    return NOT_STARTED


# --- the probe ------------------------------------------------------------------------------------

_PROGRAMS = {
    # exit(0); if a filter forbids that, exit_group(7)
    "x86_64": (62, 60, bytes.fromhex("31ff b83c000000 0f05 bf07000000 b8e7000000 0f05")),
    "aarch64": (183, 93, bytes.fromhex("000080d2 a80b80d2 010000d4 e00080d2 c80b80d2 010000d4")),
}
"""By machine: ELF machine number, number of exit(2), code. The probe's rootfs then needs no file of
the host.
"""

_FILTER_SEEN = 7


def attempt(program: Sequence[str], run: Path, *, no_pivot: bool = False) -> Trial:
    """Run a trivial container with the default seccomp profile and a cgroup, and see whether a
    compiled filter is honoured. `program`: with its arguments.
    """
    machine = platform.machine()
    if machine not in _PROGRAMS:
        return Trial(False, False, f"no probe for {machine}")
    key = f"probe-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="probe-", dir=run) as temporary:
        bundle = Path(temporary)
        (bundle / "rootfs").mkdir()
        (bundle / "bin").mkdir()
        exit_ = bundle / "bin" / "exit"
        exit_.write_bytes(_elf(machine))
        exit_.chmod(0o755)
        (bundle / "config.json").write_bytes(oci.encode(_probe_spec(machine, key, str(exit_.parent))))
        command = (*program, "--root", f"{temporary}/state", "--log", f"{temporary}/log", "--log-format", "json")
        try:
            pivot = ("--no-pivot",) if no_pivot else ()
            argv = (*command, "run", "--no-new-keyring", *pivot, "--bundle", temporary, key)
            done = _spawn(argv, b"", PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            _spawn((*command, "delete", "--force", key), b"")
            return Trial(False, False, words(error))
        if done.returncode in (0, _FILTER_SEEN):
            return Trial(True, done.returncode == _FILTER_SEEN, "")
        log = bundle / "log"
        text = log.read_text(errors="replace") if log.exists() else done.stderr.decode(errors="replace")
        if done.returncode < 0:
            text = text or f"killed by {signal.Signals(-done.returncode).name}"
        return Trial(False, False, failure_reason(text) or f"exit status {done.returncode}")


def _probe_spec(machine: str, key: str, programs: str) -> oci.Spec:
    _, exit_number, _ = _PROGRAMS[machine]
    forbid_exit = (
        struct.pack("=HBBI", 0x20, 0, 0, 0),  # load the call's number
        struct.pack("=HBBI", 0x15, 0, 1, exit_number),
        struct.pack("=HBBI", 0x06, 0, 0, 0x00050001),  # EPERM
        struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000),  # allowed
    )
    return oci.Spec(
        oci_version=oci.VERSION,
        process=oci.Process(
            user=oci.User(uid=0, gid=0), args=["/bin/exit"], env=["PATH=/"], cwd="/", capabilities=oci.Capabilities()
        ),
        root=oci.Root(path="rootfs"),
        mounts=[
            oci.Mount(destination="/proc", type="proc", source="proc"),
            oci.Mount(destination="/dev", type="tmpfs", source="tmpfs"),
            # Remounted with exec: RUN is in /run, which distributions mount noexec. runc remounts
            # only for a flag that is set, and crun 1.28 keeps noexec if that is "ro".
            oci.Mount(destination="/bin", type="bind", source=programs, options=("bind", "nosuid", "exec")),
        ],
        linux=oci.Linux(
            namespaces=[oci.Namespace(type=name) for name in ("pid", "ipc", "uts", "mount", "network")],
            cgroups_path=cgroups.path(key),
            resources=oci.Resources(devices=(oci.DeviceRule(allow=False, access="rwm"),)),
            seccomp=seccomp.profile((), machine).section,
        ),
        annotations={SECCOMP_PROGRAM: base64.b64encode(b"".join(forbid_exit)).decode()},
    )


def _elf(machine: str) -> bytes:
    """The smallest static executable: one header, one segment, the code."""
    number, _, code = _PROGRAMS[machine]
    base, offset = 0x400000, 64 + 56
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, number, 1, base + offset, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, offset + len(code), offset + len(code), 0x10000)
    return header + segment + code


def output(*command: str) -> bytes:
    """The standard output of a program; empty if it cannot be executed or does not end soon."""
    try:
        return _spawn(command, b"", PROBE_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return b""


def words_of_version(*program: str) -> tuple[str, str]:
    """Name and version from the output of `--version`, such as `crun version 1.8.1`; empty for
    other output. A wrapper such as nvidia-container-runtime names the runtime that it executes.
    Executes the program, which is given with its arguments.
    """
    text = output(*program, "--version").decode(errors="replace")
    found: list[tuple[str, str]] = re.findall(r"(\S+)\s+version:?\s+(\S+)", text)
    known = [each for each in found if each[0] in _KNOWN]
    return (known or found or [("", "")])[0]


def _cure(reason: str, hierarchies: Cgroups) -> str:
    """What the operator can do about a known reason; empty for others."""
    if "hybrid" in reason and hierarchies.split:
        kept = ", ".join(hierarchies.unified_controllers)
        return f" (cgroup v2 at {hierarchies.unified} keeps: {kept}; mount them as v1 or boot with cgroup v2 alone)"
    return ""

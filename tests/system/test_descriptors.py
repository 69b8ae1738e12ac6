"""An engine whose limit of open files is too small for the containers: it refuses starts and keeps
working."""

from __future__ import annotations

import os

import pytest

from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LIMIT = 256


def test_starts_are_refused_and_all_else_goes_on() -> None:
    with TempEngine(within=("prlimit", f"--nofile={LIMIT}:{LIMIT}")) as engine:
        engine.load_busybox()
        started: list[str] = []
        while True:
            assert len(started) < LIMIT, "no start was refused"
            made = engine.create("sleep", "600", network="bridge")
            answer = engine.request("POST", f"/containers/{made}/start")
            if answer.status != 204:
                break
            started.append(made)
        assert answer.status == 500
        message = answer.json()["message"]
        assert f"of {LIMIT} descriptors (RLIMIT_NOFILE) are in use" in message and "LimitNOFILE" in message, message
        assert len(started) >= 10
        # The refused container left nothing, and the API serves several clients at once as before.
        used = len(os.listdir(f"/proc/{engine.pid}/fd"))
        assert used < LIMIT - 40
        for _ in range(20):
            assert engine.request("GET", f"/containers/{made}/json").json()["State"]["Status"] in ("created", "exited")
            assert engine.request("POST", f"/containers/{made}/start").status == 500
        assert len(os.listdir(f"/proc/{engine.pid}/fd")) < used + 16, "twenty refusals leave nothing"
        assert engine.docker("exec", started[0], "echo", "here").out == "here\n"
        assert "Traceback" not in engine.log()
        # A container that ends frees descriptors.
        for each in started[:4]:
            assert engine.request("DELETE", f"/containers/{each}?force=1").status == 204
        assert engine.request("POST", f"/containers/{made}/start").status == 204
        engine.remove_all()


def test_a_closed_standard_input_is_opened() -> None:
    """Nothing else gets its number: libuv aborts the daemon that closes such a file."""
    with TempEngine(within=("sh", "-c", 'exec "$@" <&-', "sh")) as engine:
        assert os.readlink(f"/proc/{engine.pid}/fd/0") == os.devnull
        engine.terminate()

"""Many networks: created, listed, removed."""

from __future__ import annotations

import time
from typing import Any

from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target


def sample_of(count: int) -> Any:
    """Milliseconds to create one (mean), to list all (median of five), and to remove one."""

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        made = []
        with engine.connection() as connection:
            before = len(connection.json("GET", "/networks"))
            try:
                begin = time.perf_counter()
                for at in range(count):
                    subnet = {
                        "Subnet": f"10.{200 + at // 250}.{at % 250}.0/24",
                        "Gateway": f"10.{200 + at // 250}.{at % 250}.1",
                    }
                    body = {"Name": f"bench{at}", "Driver": "bridge", "IPAM": {"Config": [subnet]}}
                    made.append(connection.json("POST", "/networks/create", body)["Id"])
                create = (time.perf_counter() - begin) * 1000 / count
                begin = time.perf_counter()
                for _ in range(5):
                    listed = connection.json("GET", "/networks")
                list_all = (time.perf_counter() - begin) * 1000 / 5
                assert len(listed) == before + count, f"{len(listed)} networks, not {before + count}"
                assert {*made} <= {one["Id"] for one in listed}
            finally:
                begin = time.perf_counter()
                for network in made:
                    status, said = connection.ask("DELETE", f"/networks/{network}")
                    assert status in (200, 204), (status, said)  # podman answers 200
                remove = (time.perf_counter() - begin) * 1000 / max(1, len(made))
        return create, list_all, remove

    return sample


def job(name: str, count: int, default: bool) -> Job:
    floor = Target({"dockerd": 1})
    return Job(
        name,
        [
            Figure(name, f"a network made, one of {count}", "ms", target=floor),
            Figure(f"{name}-list", f"list of {count} networks", "ms", target=floor),
            Figure(f"{name}-remove", f"a network removed, one of {count}", "ms", target=floor),
        ],
        sample_of(count),
        default=default,
    )


def jobs(size: Size) -> list[Job]:
    """The jobs. The one with five hundred networks runs only when named: dockerd takes minutes."""
    return [job("networks", size.of(25, 5), True), job("networks-500", size.of(500, 10), False)]

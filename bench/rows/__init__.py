"""The jobs in the order of a run, a module per subject. To add a row, add a job to its module.

The order matters: memory at rest is measured first, jobs beside 150 idle containers follow each
other, and those with thousands of containers are last.
"""

from __future__ import annotations

from bench.job import Job, Size
from bench.rows import (
    authorization,
    builds,
    contexts,
    daemons,
    delivery,
    dense,
    files,
    growth,
    images,
    lifecycle,
    logs,
    networks,
    reads,
    resources,
    simulated,
    streams,
    swarm,
    swarm_networks,
    volumes,
)
from bench.rows.images import Material


def jobs(size: Size, material: Material) -> list[Job]:
    """All jobs. Those that are not part of a default run have `default=False`."""
    return [
        *resources.rest_jobs(size),
        *daemons.few(size),
        *lifecycle.jobs(size),
        *reads.few(size),
        *authorization.jobs(size),
        *streams.jobs(size),
        *logs.jobs(size),
        *delivery.jobs(size),
        *images.jobs(size, material),
        *builds.jobs(size, material),
        *contexts.jobs(size, material),
        *files.jobs(size, material),
        *volumes.jobs(size),
        *networks.jobs(size),
        *growth.jobs(size),
        *dense.jobs(size),
        *resources.dense(size),
        *reads.dense(size),
        *daemons.dense(size),
        *reads.many(size),
        *swarm.jobs(size),
        *swarm_networks.jobs(size),
        *simulated.jobs(size),
    ]

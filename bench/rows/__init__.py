"""The jobs, in the order of a run: a module per subject. To add a row, add a job to its module.

The order is not that of the table alone: memory at rest is taken first, jobs beside 150 idle containers follow one another, and the thousands
of containers come last.
"""

from __future__ import annotations

from bench.job import Job, Size
from bench.rows import daemons, files, growth, images, lifecycle, logs, networks, reads, resources, streams
from bench.rows.images import Material


def jobs(size: Size, material: Material) -> list[Job]:
    """All of them; those that are not in a default run say so (`Job.default`)."""
    return [
        *resources.rest_jobs(size),
        *daemons.few(size),
        *lifecycle.jobs(size),
        *reads.few(size),
        *streams.jobs(size),
        *logs.jobs(size),
        *images.jobs(size, material),
        *files.jobs(size, material),
        *networks.jobs(size),
        *growth.jobs(size),
        *resources.dense(size),
        *reads.dense(size),
        *daemons.dense(size),
        *reads.many(size),
    ]

"""The images that all engines run and move. They are generated, with the same bytes in every run.

`bench:latest` is busybox and a file of lines. `big:0`, `big:1` and so on are 450 MB in four layers
of 15,000 files: half random bytes, half text, sizes from some hundred bytes to some hundred KB,
like the image of a language's runtime.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import random
import tarfile
from pathlib import Path

from tests.support.images import archives

LINE = b"2023-11-14T22:13:20Z INFO  request id=%08d path=/v1/things status=200 duration=12ms size=512 ~\n" % 12345678
MARK = b"~"
"""Occurs once in each line, and never in frame headers."""
LINES_SIZE = 160_000 * len(LINE)
EPOCH = 1_700_000_000

BIG = "big:0"
BIG_LAYERS = 4
BIG_FILES = 15_000
BIG_SIZE = 450_000_000


@functools.cache
def small() -> bytes:
    """`bench:latest` in the format of `docker save`."""
    lines = archives.tar([archives.Node("lines", LINE * (LINES_SIZE // len(LINE)))])
    image = archives.Image([archives.busybox_layer(), lines], ("bench:latest",), {"Cmd": ["sh"]})
    return archives.docker_archive(image)


class Pool:
    """File contents: alternating pieces of random bytes and text, a few megabytes each."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        words = [
            bytes(self._random.choices(b"abcdefghijklmnopqrstuvwxyz", k=self._random.randrange(2, 10)))
            for _ in range(3000)
        ]
        pieces = []
        for _ in range(64):
            pieces.append(self._random.randbytes(32 << 10))
            pieces.append(b" ".join(self._random.choices(words, k=7000))[: 32 << 10])
        self._bytes = b"".join(pieces)

    def piece(self, size: int) -> bytes:
        at = self._random.randrange(len(self._bytes))
        repeated = self._bytes[at : at + size]
        while len(repeated) < size:
            repeated += self._bytes[: size - len(repeated)]
        return repeated

    def sizes(self, count: int, total: int) -> list[int]:
        """`count` sizes of all magnitudes whose sum is `total`."""
        wanted = [self._random.lognormvariate(0, 1.5) for _ in range(count)]
        scale = total / sum(wanted)
        found = [int(one * scale) for one in wanted]
        found[0] += total - sum(found)
        return found


def tree(path: Path, seed: int, files: int, size: int, root: str = "") -> str:
    """Write an archive of `count` files with `size` bytes in total, a hundred files per directory.

    Returns its digest.
    """
    pool = Pool(seed)
    with tarfile.open(path, "w") as archive:
        for at, length in enumerate(pool.sizes(files, size)):
            if at % 100 == 0:
                info = tarfile.TarInfo(f"{root}d{seed}-{at // 100}")
                info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, EPOCH
                archive.addfile(info)
            info = tarfile.TarInfo(f"{root}d{seed}-{at // 100}/file{at}")
            info.size, info.mode, info.mtime = length, 0o644, EPOCH
            archive.addfile(info, io.BytesIO(pool.piece(length)))
    return digest(path)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


class Big:
    """`big:NUMBER` as files in a directory: its layers, its configuration, and the archive of all.
    Only the first layer is shared with other numbers.
    """

    def __init__(self, directory: Path, scale: int, number: int) -> None:
        """`scale` divides files and bytes, for a quick run.

        The first layer is busybox's, so that it runs.
        """
        self.name = f"big:{number}"
        self.size = BIG_SIZE // scale
        self.layers = []
        base = directory / "layer0"
        base.write_bytes(archives.busybox_layer())
        self.layers.append(base)
        for at in range(1, BIG_LAYERS):
            path = directory / f"layer{at}"
            tree(
                path,
                number * BIG_LAYERS + at,
                BIG_FILES // (BIG_LAYERS - 1) // scale,
                self.size // (BIG_LAYERS - 1),
                "usr/",
            )
            self.layers.append(path)
        diffs = [digest(path) for path in self.layers]
        document = json.loads(archives.Image([], (), {"Cmd": ["sh"]}).configuration())
        document["rootfs"]["diff_ids"] = diffs
        document["history"] = [{"created": archives.CREATED, "created_by": f"layer {at}"} for at in range(BIG_LAYERS)]
        self.configuration = json.dumps(document, sort_keys=True).encode()
        self.id = archives.digest(self.configuration)
        self.archive = directory / "big.tar"
        self._write(diffs)

    def _write(self, diffs: list[str]) -> None:
        names = [f"{one[7:]}/layer.tar" for one in diffs]
        manifest = [{"Config": f"{self.id[7:]}.json", "RepoTags": [self.name], "Layers": names}]
        with tarfile.open(self.archive, "w") as archive:
            for name, data in (
                (f"{self.id[7:]}.json", self.configuration),
                ("manifest.json", json.dumps(manifest).encode()),
            ):
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = len(data), 0o644, EPOCH
                archive.addfile(info, io.BytesIO(data))
            for name, path in zip(names, self.layers, strict=True):
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = os.path.getsize(path), 0o644, EPOCH
                with open(path, "rb") as file:
                    archive.addfile(info, file)

"""`docker build --cache-to type=inline` and `--cache-from` with buildx 0.29, on two engines that
share nothing but a registry.
"""

from __future__ import annotations

from pathlib import Path

from tests.clients.programs import FORKY
from tests.support.engine.harness import TempEngine
from tests.support.images.registry import Registry

DOCKERFILE = """
FROM busybox AS made
RUN echo the same in each run >/word
FROM busybox
COPY --from=made /word /copied
RUN cat /proc/sys/kernel/random/uuid >/other
"""


def test_an_inline_cache_of_another_engine(own_engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    with Registry() as registry, TempEngine() as other:
        other.load_busybox()
        name = f"{registry.host}/shared:1"

        def build(engine: TempEngine, *arguments: str) -> str:
            return FORKY.run(engine, "build", "--progress", "plain", *arguments, ".", cwd=tmp_path).err

        def made(engine: TempEngine, image: str) -> str:
            return FORKY.run(engine, "run", "--rm", "--network", "none", image, "cat", "/other").out

        build(own_engine, "-t", name, "--cache-to", "type=inline")
        FORKY.run(own_engine, "push", name)
        output = build(other, "-t", "again", "--cache-from", name, "--cache-from", f"{registry.host}/none:1")
        assert made(other, "again") == made(own_engine, name)
        assert f"importing cache manifest from {name}" in output
        assert f"importing cache manifest from {registry.host}/none:1" in output and "not found" in output

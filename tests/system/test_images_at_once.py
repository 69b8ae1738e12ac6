"""One image pulled, loaded, committed, tagged, saved and deleted by many clients at once: each
response is consistent, and at the end nothing is damaged."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from tests.support.builds import building
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Image, Node, docker_archive, tar
from tests.support.images.registry import Registry
from tests.system.test_images_killed import whole

SECONDS = 6
LAYERS = [tar([Node(f"l{at}/f{number}", b"%d" % number * 500) for number in range(50)]) for at in range(3)]
IMAGE = Image(LAYERS, ["many:latest"], {"Cmd": ["true"]})
ALL = quote(json.dumps({"dangling": ["false"]}))
OTHER = Image([*LAYERS[:2], tar([Node("own", b"own")])], ["many:other"], {"Cmd": ["true"]})


def test_many_at_once() -> None:
    seed = random.randrange(1 << 30)
    with Registry() as registry, TempEngine() as engine:
        engine.load_busybox()
        registry.put("many", "v1", IMAGE, compress=lambda data: gzip.compress(data, 1))
        name = f"{registry.host}/many"
        container = engine.create("true", Image="busybox")
        before = whole(engine)
        wrong: list[str] = []
        done: dict[str, int] = {}

        def ask(method: str, target: str, allowed: tuple[int, ...], body: bytes | None = None, error: str = "") -> None:
            answer = engine.request(method, f"/v1.24{target}", body, {"Content-Type": "application/x-tar"})
            done[target] = done.get(target, 0) + (answer.status < 300)
            if answer.status not in allowed or (
                b"errorDetail" in answer.body and (not error or error.encode() not in answer.body)
            ):
                wrong.append(f"{method} {target}: {answer.status} {answer.body[-500:]!r}")

        # docker-registry writes its links in place. Of two concurrent pushes one may read an empty
        # link, and its manifest is refused.
        pushing = threading.Lock()

        def push() -> None:
            with pushing:
                ask("POST", f"/images/{name}/push?tag=v2", (200, 404), error="does not exist locally")

        archives = [docker_archive(IMAGE), docker_archive(OTHER), gzip.compress(docker_archive(IMAGE, OTHER), 1)]
        verbs: tuple[Callable[[random.Random], None], ...] = (
            lambda _: ask("POST", f"/images/create?fromImage={name}&tag=v1", (200,)),
            lambda chance: ask("POST", "/images/load", (200,), chance.choice(archives)),
            lambda _: ask("POST", f"/commit?container={container}&repo=many&tag=latest", (201,)),
            lambda _: ask("POST", f"/images/many:latest/tag?repo={name}&tag=v2", (201, 404)),
            lambda _: push(),
            lambda _: ask("GET", f"/images/{IMAGE.id}/get", (200, 404)),
            lambda _: ask("GET", f"/images/{IMAGE.id}/json", (200, 404)),
            lambda chance: ask("DELETE", f"/images/{chance.choice([IMAGE.id, OTHER.id])}?force=1", (200, 404)),
            lambda chance: ask(
                "DELETE", f"/images/{chance.choice(['many', 'many:other', f'{name}:v1'])}", (200, 404, 409)
            ),
            lambda _: ask("GET", "/images/json?digests=1", (200,)),
        )
        end = time.monotonic() + SECONDS

        def work(at: int) -> None:
            chance = random.Random(seed + at)
            while time.monotonic() < end and not wrong:
                chance.choice(verbs)(chance)

        threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, (seed, wrong)
        whole(engine)
        for image in engine.request("GET", "/v1.24/images/json").json():
            if "busybox:latest" not in image["RepoTags"]:
                answer = engine.request("DELETE", f"/v1.24/images/{image['Id']}?force=1")
                assert answer.status in (200, 404), answer
        until("all of it is gone", lambda: whole(engine) == before)


def test_prunes_during_builds(own_engine: TempEngine) -> None:
    """A prune takes the images of steps that nothing else refers to yet. The builds go on."""
    ended = threading.Event()

    def prunes() -> int:
        count = 0
        while not ended.is_set():
            answer = own_engine.request("POST", f"/images/prune?filters={ALL}")
            assert answer.status == 200, answer
            count += 1
        return count

    steps = "".join(f"ENV S{at}=1\nRUN echo {at} > /f{at}\n" for at in range(4))
    held = own_engine.create("true")  # before the first prune: busybox stays for it
    with ThreadPoolExecutor(4) as pool:
        pruning = pool.submit(prunes)
        try:
            for turn in range(3):
                files = [f"FROM busybox\nLABEL n={turn}.{at}\n{steps}" for at in range(3)]
                for built in pool.map(lambda file: building.build(own_engine, file, t="made"), files):
                    assert built.error is None, built
        finally:
            ended.set()
        assert pruning.result() > 0
    own_engine.request("DELETE", f"/containers/{held}")
    own_engine.restart()
    assert own_engine.request("POST", f"/images/prune?filters={ALL}").status == 200
    assert own_engine.request("GET", "/images/json?all=1").json() == []

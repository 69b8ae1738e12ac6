"""`cachefrom`: the steps of images that the client names, as a cache. Pure.

Such an image was made elsewhere, so there are no keys. Its history serves instead: a step matches
if the image has everything that was built so far, in the same order, and its next line of history
is this step's. COPY and ADD show a digest of their content there. The resulting configuration is
the one that the Dockerfile says, not the image's. A last step that has both is the image itself, so
that the result of an unchanged build keeps its id.

The client vouches for these images: their history is only text (Docker's --cache-from).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.builder.state import State, after
from engine.images.record import ImageRecord
from engine.wire.containers import Config


def find(
    before: State,
    images: Iterable[ImageRecord],
    *,
    key: str,
    command: Sequence[str],
    config: Config,
    author: str | None,
    layer: bool,
    epoch: int | None = None,
) -> State | None:
    """The state after a step, made of the first image that has it. `layer`: it may make a layer.
    `epoch`: as in `state.after`.
    """
    text = " ".join(command)
    for image in images:
        history, diff_ids = image.config.history, image.config.rootfs.diff_ids
        steps, below = before.document.history, before.document.rootfs.diff_ids
        if len(history) <= len(steps) or diff_ids[: len(below)] != below:
            continue
        if any(one.created_by != other.created_by for one, other in zip(history, steps, strict=False)):
            continue
        step = history[len(steps)]
        if step.created_by != text or (not step.empty_layer and (not layer or len(diff_ids) <= len(below))):
            continue
        if len(history) == len(steps) + 1 and image.config.config == config:
            chain = image.chain_ids
            return State(key=key, image_id=image.id, document=image.config, chain_ids=chain, parent=before.image_id)
        diff_id = "" if step.empty_layer else diff_ids[len(below)]
        return after(before, key=key, config=config, command=command, diff_id=diff_id, author=author, epoch=epoch)
    return None


__all__ = ["find"]

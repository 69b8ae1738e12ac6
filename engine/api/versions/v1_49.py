"""What API 1.49 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, without
from engine.wire.system import Commit, Info

CHANGES = (
    Change("1.49", "inspect of an image takes platform", flag=Flag.INSPECT_PLATFORM, down_to="1.25"),
    Change("1.49", "info shows FirewallBackend", of=Info, downgrade=without("FirewallBackend")),
    Change(
        "1.49",
        "info shows the versions of its programs without those that were expected",
        of=Commit,
        downgrade={"Expected": lambda commit: commit.id},
    ),
)

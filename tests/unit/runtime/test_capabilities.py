from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.runtime.capabilities import DEFAULT, NAMES, check, from_mask, granted

EVERY = frozenset(NAMES)


def test_table_is_the_kernels() -> None:
    assert len(NAMES) == 41
    assert NAMES.index("CAP_SYS_ADMIN") == 21
    assert NAMES.index("CAP_SYS_RESOURCE") == 24
    assert NAMES[-1] == "CAP_CHECKPOINT_RESTORE"
    assert from_mask(0xA80425FB) == frozenset(DEFAULT), "the mask of a default Docker container"
    assert from_mask(1 << 63) == frozenset()


def test_default_is_dockers_fourteen() -> None:
    assert len(DEFAULT) == 14
    assert set(granted(limit=EVERY)) == set(DEFAULT)


def test_add_and_drop() -> None:
    assert set(granted(["NET_ADMIN"], ["cap_kill"], limit=EVERY)) == {*DEFAULT, "CAP_NET_ADMIN"} - {"CAP_KILL"}
    assert granted([], ["ALL"], limit=EVERY) == ()
    assert granted(["chown"], ["all"], limit=EVERY) == ("CAP_CHOWN",)
    assert set(granted(["ALL"], ["SYS_ADMIN"], limit=EVERY)) == EVERY - {"CAP_SYS_ADMIN"}
    assert granted(["KILL"], ["KILL"], limit=EVERY).count("CAP_KILL") == 1


def test_never_more_than_the_engine_has() -> None:
    limit = EVERY - {"CAP_SYS_RESOURCE", "CAP_CHOWN"}
    assert set(granted(privileged=True, limit=limit)) == limit
    assert "CAP_CHOWN" not in granted(limit=limit)
    assert "CAP_SYS_RESOURCE" not in granted(["SYS_RESOURCE"], limit=limit)


@pytest.mark.parametrize("name", ["", "CAP_", "NOPE", "CAP_CAP_KILL", "kill "])
def test_unknown_names(name: str) -> None:
    with pytest.raises(InvalidParameter, match="CapAdd: unknown capability: "):
        granted([name])
    with pytest.raises(InvalidParameter, match="CapDrop: unknown capability: "):
        granted([], [name])


def test_what_a_create_may_name() -> None:
    check(["ALL", "cap_chown"], ["ALL", "SYS_RESOURCE"], limit=EVERY - {"CAP_SYS_RESOURCE"})
    with pytest.raises(InvalidParameter, match='not available in the current environment: "CAP_SYS_RESOURCE"'):
        check(["sys_resource"], [], limit=EVERY - {"CAP_SYS_RESOURCE"})
    with pytest.raises(InvalidParameter, match='CapDrop: unknown capability: "CAP_X"'):
        check([], ["X"], limit=EVERY)

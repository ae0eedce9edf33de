"""Group sizes from grids and labels, and the order of channels that ``g_idx`` gives."""

from __future__ import annotations

import numpy as np
import pytest
from warptile.formats import groups
from warptile.formats.errors import CorruptError, UnsupportedError


def test_channels_of_a_group_keep_their_order() -> None:
    g_idx = np.array([1, 0, 1, 0, 2, 0, 1, 2] * 40, np.int32)
    g_idx = np.concatenate([g_idx, np.repeat([2], 40)]).astype(np.int32)  # 120 of each
    perm = groups.order(g_idx, 120)
    assert perm is not None
    assert perm.dtype == np.int32
    wanted = [channel for group in range(3) for channel in range(g_idx.size) if g_idx[channel] == group]
    assert perm.tolist() == wanted
    assert groups.indices(perm, g_idx.size, 120).tolist() == g_idx.tolist()


def test_groups_in_order_need_no_permutation() -> None:
    g_idx = np.array([0, 0, 0, 1, 1, 1, 2])
    assert groups.order(g_idx, 3) is None
    assert groups.indices(None, 7, 3).tolist() == g_idx.tolist()


@pytest.mark.parametrize(
    ("k", "count", "measured", "said", "size"),
    [
        (96, 3, None, (32,), 32),
        (100, 4, None, (32,), 32),
        (96, 1, None, (-1,), 96),
        (96, 1, None, (128,), 96),
        (96, 1, None, (), 96),
        (96, 3, None, (), 32),
        (100, 4, None, (25,), 25),
        (60, 3, None, (), 20),
        (96, 3, 32, (), 32),
        (96, 3, None, (64, 32), 32),
    ],
)
def test_sizes(k: int, count: int, measured: int | None, said: tuple[int, ...], size: int) -> None:
    heard: list[str] = []
    assert groups.group_size(k, count, measured, said, heard.append, "f", "t") == size
    assert bool(heard) == (not said)


@pytest.mark.parametrize(
    ("k", "count", "measured", "said", "error", "says"),
    [
        (96, 0, None, (), CorruptError, "found 0 groups; need 1 to 96"),
        (4, 5, None, (), CorruptError, "found 5 groups; need 1 to 4"),
        (96, 3, None, (64,), UnsupportedError, "need group size 64 as the label says; --group-size 32 believes"),
        (96, 3, 32, (40,), UnsupportedError, "need group size 40"),
        (100, 4, None, (), UnsupportedError, "25 or 32 possible; say --group-size"),
        (97, 5, None, (), UnsupportedError, "the shapes do not tell the group size"),
    ],
)
def test_sizes_that_are_refused(
    k: int, count: int, measured: int | None, said: tuple[int, ...], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        groups.group_size(k, count, measured, said, lambda _: None, "f", "t")

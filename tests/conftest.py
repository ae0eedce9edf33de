"""Which tests this machine can run."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
from warptile.formats import bits


@cache
def _no_gpu() -> str | None:
    """Why tests marked ``gpu`` cannot run here, None when they can."""
    from warptile.runtime.device import devices

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cupy warns on import when it finds no toolkit
        count, why = devices()
    if not count:
        return why
    from cupy.cuda import Device

    capability = int(Device(0).compute_capability)
    return None if capability >= 75 else f"the GPU is sm_{capability}; need sm_75 or newer"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled loops for arrays of any size."""
    monkeypatch.setattr(bits, "LARGE", 1)
    assert bits.loops(1) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (why := _no_gpu()):
        pytest.skip(why)

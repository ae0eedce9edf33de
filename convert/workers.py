"""How many threads work, and how many pieces they are ahead of the one that writes."""

from __future__ import annotations

import os

from ..formats.errors import UsageError


def threads(workers: int) -> int:
    """``--workers``: 0 is one for every core this process may use. Raises UsageError for fewer."""
    if workers < 0:
        raise UsageError("no worker, no work", found=f"workers {workers}", need="0 (one a core) or more")
    if not workers and hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return workers or os.cpu_count() or 1


def window(workers: int) -> int:
    """Pieces that are being made or wait to be written."""
    return workers + 2

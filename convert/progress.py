"""A bar by bytes, for people who look at a terminal."""

from __future__ import annotations

import sys
from threading import Lock

from tqdm import tqdm


class Progress:
    """``advance`` may be called from several threads; silent when quiet or when stderr is no terminal."""

    def __init__(self, total: int, what: str, quiet: bool, done: int = 0) -> None:
        """``total`` and ``done``, what was there already and does not count for the rate, in bytes."""
        self._lock = Lock()
        silent = quiet or not sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=what,
            unit="B",
            unit_scale=True,
            disable=silent,
            file=sys.stderr,
            leave=False,
        )

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._bar.update(nbytes)

    def close(self) -> None:
        self._bar.close()

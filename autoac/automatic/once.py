"""Warnings that a loop is given once."""

from __future__ import annotations

import warnings


class Once:
    """Warns of each matter at most once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, key: str, words: str) -> None:
        """Warn, if nothing was said under this key before."""
        if key not in self._told:
            self._told.add(key)
            warnings.warn(words, stacklevel=2)

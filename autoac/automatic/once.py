"""Warnings that a loop gets once."""

from __future__ import annotations

import warnings


class Once:
    """Warns at most once per key."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, key: str, words: str) -> None:
        """Warn, unless there was a warning with this key."""
        if key not in self._told:
            self._told.add(key)
            warnings.warn(words, stacklevel=2)

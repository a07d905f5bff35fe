"""Warnings, at the line outside of autoac and torch that led to them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (*(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)), contextlib.__file__)


def warn(words: str) -> None:
    """Warn, with the innermost line outside of autoac, torch and `contextlib` as the warning's place.

    Where there is none, as on a thread of autograd's, the place is the caller.
    """
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(words, stacklevel=2 if frame is None else level)

"""Errors in the user's code, and their location."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path


class TargetError(Exception):
    """The user's model could not be loaded; chained to the error of the user's code, if there is one.

    Args:
        line: what went wrong.
        hint: what to do.
    """

    def __init__(self, line: str, hint: str = "") -> None:
        super().__init__(line)
        self.line, self.hint = line, hint


def where_in(error: BaseException) -> str:
    """` in f (file.py, line 3)`: the innermost line of the user's own code, "" if none of it was running."""
    solver = importlib.util.find_spec("autoac_solver")
    ours = [
        str(Path(__file__).resolve().parent.parent),
        *((solver and solver.submodule_search_locations) or ()),
    ]
    others = (*ours, sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others) and os.path.exists(frame.filename):
            return f" in {frame.name} ({shown(frame.filename)}, line {frame.lineno})"
    return ""


def shown(path: str | Path) -> str:
    """A path as the user would write it: relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

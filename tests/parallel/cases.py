"""The cases of a worker: each runs by itself, and one that raises tells its error."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run_cases(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run them in order, and write what they return, by name, to where `ranks.run_ranks` looks for it."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        started = time.monotonic()
        try:
            found[name] = case()
        except Exception as error:
            traceback.print_exc()  # into the log
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
        print(name, f"{time.monotonic() - started:.1f} s", found[name], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found))


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

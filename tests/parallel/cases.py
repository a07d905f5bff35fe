"""The cases of a worker: each runs by itself, and one that raises tells its error."""

from __future__ import annotations

import gc
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
        few_objects()
        started = time.monotonic()
        try:
            found[name] = case()
        except Exception as error:
            traceback.print_exc()  # into the log
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
        print(name, f"{time.monotonic() - started:.1f} s", found[name], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found))


def few_objects() -> None:
    """Keep all that is there out of the garbage collector's sight, as the fixture of this name does for tests.

    The ruler collects and looks through all objects; once torch's compiler is there, that takes most of the time.
    """
    gc.collect()
    gc.freeze()


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

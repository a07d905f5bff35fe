"""The results of one run: a file rewritten with each result, so that an interrupted run can continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoac_solver.records.disk.files import write_bytes

SCHEMA, SCHEMA_VERSION = "autoac.benchmarks.cuda", 1


class Store:
    """Results by name.

    Args:
        folder: of the file `results.json`; created if missing.
        conditions: results with other conditions (device, versions, sizes, allocator options) may not be mixed in.

    Raises:
        ValueError: the folder has results of other conditions, or of another version.
    """

    def __init__(self, folder: Path, conditions: dict[str, str]) -> None:
        self.path = folder / "results.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.conditions = conditions
        self.results: dict[str, Any] = {}
        if self.path.exists():
            found = json.loads(self.path.read_text())
            known = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "conditions": conditions}
            differing = [name for name, value in known.items() if found.get(name) != value]
            if differing:
                raise ValueError(
                    f"{self.path} has results of another {differing[0]} ({found.get(differing[0])!r:.200}): give "
                    "another --output, or remove it."
                )
            self.results = found["results"]

    def __contains__(self, name: str) -> bool:
        return name in self.results

    def put(self, name: str, result: Any) -> None:
        """Keep a result, and write the file."""
        self.results[name] = result
        data = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "conditions": self.conditions,
            "results": self.results,
        }
        write_bytes(self.path, json.dumps(data, indent=1).encode())

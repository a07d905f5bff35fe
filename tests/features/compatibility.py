"""Print the compatibility table, made from the tests marked `feature`: `python -m tests.features.compatibility`.

Every cell is what the tests of that name show for that engine: "yes", or the words of the test's mark. A test that is
expected to fail makes it "no". `--write` puts the table into the page of the docs.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- compatibility: python -m tests.features.compatibility --write -->\n"
END = "<!-- end of compatibility -->\n"
ENGINES = ("replay", "sac")
FOLDERS = ("tests/features", "tests/execute/exact")


class _Cells:
    """Pytest plugin: the cells of all collected tests."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, set[str]]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            engine = item.callspec.params.get("engine", "") if hasattr(item, "callspec") else ""
            for mark in item.iter_markers("feature"):
                name, column = mark.args[0], mark.kwargs["engine"] or engine
                assert column in ENGINES, f"{item.nodeid}: a cell of which engine?"
                failing = any(item.iter_markers("xfail"))
                elsewhere = any(
                    item.iter_markers("skipif")
                )  # whatever this machine has, the table is the same
                cell = "no" if failing else "not yet run, needs CUDA" if elsewhere else mark.kwargs["cell"]
                self.cells.setdefault(name, {}).setdefault(column, set()).add(cell)


def table() -> str:
    """The table as Markdown."""
    found = _Cells()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
        code = pytest.main([*options, *FOLDERS], plugins=[found])
    assert code == pytest.ExitCode.OK, said.getvalue()
    rows = ["| feature | replay | sac |", "|---|---|---|"]
    for name in sorted(found.cells, key=lambda name: name.strip("`").casefold()):
        cells = found.cells[name]
        rows.append(
            f"| {name} | " + " | ".join(", ".join(sorted(cells.get(e, {"-"}))) for e in ENGINES) + " |"
        )
    return "\n".join(rows) + "\n"


def in_docs() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    made = table()
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2])
    print(made, end="")


if __name__ == "__main__":
    main()

"""Every notebook runs from top to bottom, and is stored with its outputs."""

import re
from pathlib import Path

import nbformat
import pytest

from notebooks.store import execute

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_as_store_py_does(path: Path) -> None:
    """Run from top to bottom, without log lines, widgets' states, or paths of the machine it ran on."""
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output.get("name") != "stderr" for output in outputs)
    assert "widgets" not in notebook.metadata
    text = path.read_text()
    assert not re.search(r"/(root|home|tmp|work|usr|Users)/|site-packages|widget-view", text)
    assert len(text) < 600_000


def test_notebooks_lead_from_one_to_the_next() -> None:
    """Each is numbered and, but for the last, links to another one; every link is to a notebook that is there."""
    titles = [nbformat.read(path, as_version=4).cells[0].source.splitlines()[0] for path in NOTEBOOKS]
    assert sorted(title[:4] for title in titles) == [f"# {i}." for i in range(1, len(NOTEBOOKS) + 1)]
    for path in NOTEBOOKS:
        links = re.findall(r"\]\((\w+\.ipynb)\)", path.read_text())
        assert links
        assert {path.parent / link for link in links} <= set(NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = _shows_something(notebook)
    assert any(stored), "store the notebook with its outputs"
    execute(notebook)
    assert _shows_something(notebook) == stored


def _shows_something(notebook: nbformat.NotebookNode) -> list[bool]:
    """For each code cell, whether it has an output that is no log line."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [any(output.get("name") != "stderr" for output in cell.outputs) for cell in cells]

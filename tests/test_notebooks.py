"""Every notebook runs from top to bottom, and is stored with its outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = _shows_something(notebook)
    assert any(stored), "store the notebook with its outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert _shows_something(notebook) == stored


def _shows_something(notebook: nbformat.NotebookNode) -> list[bool]:
    """For each code cell, whether it has an output that is no log line."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [any(output.get("name") != "stderr" for output in cell.outputs) for cell in cells]

"""Runs the notebooks from top to bottom and stores them with their outputs: `python notebooks/store.py [name ...]`.

What a machine adds is left out: log lines (stderr), the kernel's version, times of execution, widgets' states.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 300
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, as it is stored."""
    notebook = nbformat.read(path, as_version=4)
    execute(notebook)
    return cleaned(notebook)


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run it in this folder; its cells get their outputs."""
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    # For a widget nbclient sends to the kernel while it waits for it. Then it may miss the reply until its time is out.
    client.widget_registry.clear()
    client.execute()


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from machine to machine, or needs a running kernel."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = nbformat.NotebookNode()
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            # What a widget shows is not stored, but its text.
            widgets = [output for output in cell.outputs if WIDGET in output.get("data", {})]
            for output in widgets:
                del output.data[WIDGET]
            cell.outputs = widgets or cell.outputs
    return notebook


def main(names: list[str]) -> None:
    os.environ["AUTOAC_PROGRESS"] = "0"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's start and stop messages
    checkout = [str(FOLDER.parent), str(FOLDER.parent / "solver")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*checkout, os.environ.get("PYTHONPATH", "")])
    paths = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        nbformat.write(run(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

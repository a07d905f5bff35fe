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


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, as it is stored."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from machine to machine, or needs a running kernel."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = nbformat.NotebookNode()
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
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

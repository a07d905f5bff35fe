"""Imports go one way: autoac -> autoac_solver, and within each of them from a package only to earlier ones.

Names below are packages, and the few files beside them. Inside of a package the order is the package's own. Classes and
folders stay small enough to be read.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ORDER = {
    "autoac_solver": "draw records problem allocator optimise build plan show __init__",
    "autoac": """
        _version progress warned torch_private device measure ops step ranks execute policies price record check plans
        outcomes buckets parallel calibrate api automatic __init__ integrations compare demo cli __main__
    """,
}
FOLDERS = {"autoac_solver": ROOT / "solver" / "autoac_solver", "autoac": ROOT / "autoac"}


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of both packages."""
    for package, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            yield ".".join(parts if len(parts) == 2 or parts[-1] != "__init__" else parts[:-1]), file


MODULES = dict(modules())


def rank(module: str) -> int:
    """The place of a module in its package's order; `autoac` itself is its `__init__`."""
    package, _, rest = module.partition(".")
    name = rest.split(".")[0] or "__init__"
    order = ORDER[package].split()
    assert name in order, f"give {package}/{name} its place in ORDER in {Path(__file__).name}"
    return order.index(name)


def imported_modules(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of our own packages, those inside functions included."""
    package = module.removesuffix(".__init__") if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from autoac import x` may name a module or something in __init__.
            names = [name if (name := f"{base}.{a.name}") in MODULES else base for a in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.partition(".")[0] in ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_module_has_its_place(module: str):
    assert rank(module) >= 0


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_earlier_modules(module: str):
    package = module.partition(".")[0]
    for line, imported in imported_modules(module, MODULES[module]):
        other = imported.partition(".")[0]
        where = f"{MODULES[module].relative_to(ROOT)}:{line}"
        if other != package:
            assert (package, other) == ("autoac", "autoac_solver"), f"{where} imports {imported}"
        elif (
            imported.split(".")[:2] != module.split(".")[:2]
        ):  # inside a folder the order is the folder's own
            assert rank(imported) < rank(module), f"{where} imports {imported}, which comes later"


MOST_LINES = 300
MOST_FILES = 15
LARGER_FOLDERS = {
    "autoac/torch_private": "one file for each of torch's private interfaces, most of them short"
}
BY_FOLDER = {
    str(folder.relative_to(ROOT)): sorted(folder.glob("*.py"))
    for root in FOLDERS.values()
    for folder in (root, *root.rglob("*"))
    if folder.is_dir() and any(folder.glob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_no_class_is_too_long_to_read(module: str):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MOST_LINES, f"{module}.{node.name} has {lines} lines: split it"


@pytest.mark.parametrize("folder", BY_FOLDER)
def test_no_folder_has_too_many_files(folder: str):
    if folder not in LARGER_FOLDERS:
        count = len(BY_FOLDER[folder])
        assert count <= MOST_FILES, f"{folder} has {count} files: make packages of them"


def test_folders_that_may_be_larger_are():
    for folder in LARGER_FOLDERS:
        assert len(BY_FOLDER[folder]) > MOST_FILES, f"{folder} is no longer large: take it off the list"


def test_engine_folder_and_relative_imports_are_understood(tmp_path: Path):
    file = tmp_path / "replay.py"
    file.write_text(
        "from . import x\nfrom ..sac import y\nimport autoac.cli, torch\nfrom autoac import plan, z\n"
    )
    found = list(imported_modules("autoac.execute.replay.replay", file))
    assert [name for _, name in found][:3] == ["autoac.execute.replay", "autoac.execute.sac", "autoac.cli"]
    assert found[-1] == (4, "autoac")


def run_python(code: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_solver_needs_no_torch_and_no_autoac():
    names = [name for name in MODULES if name.startswith("autoac_solver")]
    code = f"""
import importlib, sys
sys.modules["torch"] = sys.modules["autoac"] = None  # importing either is an error now
for name in {names}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    run_python(code)


def test_nothing_in_the_solver_imports_torch_when_it_is_called():
    for file in (ROOT / "solver").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("torch", "autoac")], file


def test_the_simulator_shares_no_code_with_the_integer_program():
    tree = ast.parse((ROOT / "solver" / "autoac_solver" / "problem" / "simulator.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("autoac_solver")} == {
        "autoac_solver.problem.problem",
        "autoac_solver.records.clocks",
    }


def test_package_and_command_line_wait_with_torch():
    loaded = run_python("import sys, autoac, autoac.cli; print('torch' in sys.modules, autoac.__version__)")
    assert loaded == "False 0.1.0\n"

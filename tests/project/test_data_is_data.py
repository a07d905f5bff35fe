"""Files that autoac reads are data: nothing in the packages could run code from one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [*sorted((ROOT / "autoac").rglob("*.py")), *sorted((ROOT / "solver" / "autoac_solver").rglob("*.py"))]

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "code",
    "runpy",
}
MODULES |= {"importlib", "imp", "pkgutil", "xml", "plistlib", "zipfile", "tarfile", "ctypes", "cffi"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch": {"load", "package", "jit_load"},
    "np": {"load", "fromfile", "loadtxt", "genfromtxt", "save"},
    "numpy": {"load", "fromfile"},
    "pd": {"read_pickle", "eval", "read_hdf", "read_csv", "read_json"},
    "os": {"system", "popen", "execv", "execve", "spawnv"},
    "subprocess": {"getoutput", "getstatusoutput", "check_output", "call"},
}
METHODS = {"read_pickle", "to_pickle"}


ALLOWED = {
    "autoac/execute/replay/randoms.py": "import ctypes",  # the bytes of a generator's state, for a checksum
    "autoac/execute/checksums.py": "import ctypes",  # the bytes of a tensor, for a checksum
    "autoac/record/unseen.py": "import ctypes",  # the bytes of a storage, for a checksum
    "autoac/torch_private/distributed.py": "import importlib",  # torch's own modules, when needed
    "autoac/__init__.py": "import importlib",  # its own modules, when needed
    "autoac/cli/target.py": "import importlib",  # the model that the user names on the command line
    "autoac/cli/users_code.py": "import importlib",  # the same
    "autoac/compare/quiet.py": "os.execve",  # the benchmark restarts itself with quiet settings
    "autoac/torch_private/planner.py": "import importlib",  # torch's own tools, when needed
    "solver/autoac_solver/show/page/render.py": "import importlib",  # the package's own resources and version
}


def dangers(source: str) -> Iterator[str]:
    """Whatever in some code might run code that is not its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "").partition(".")[0]]
        else:
            found = []
        yield from (f"import {name}" for name in found if name in MODULES)
        if isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (
                node.attr in ATTRIBUTES.get(owner, ())
                or node.attr in METHODS
                or node.attr in ("eval", "exec")
            ):
                yield f"{owner}.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            yield f"{node.arg}="


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_runs_code_from_data(file: Path):
    allowed = ALLOWED.get(str(file.relative_to(ROOT)), "")
    assert set(dangers(file.read_text())) <= {allowed}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from yaml import safe_load",
        "import a, xml.sax",
        "eval('1')",
        "exec(code)",
        "torch.load(path)",
        "frame.eval(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "__import__(name)",
        "os.system(name)",
    ],
)
def test_such_code_is_found(code: str):
    assert list(dangers(code))


def test_ops_named_in_a_plan_are_looked_up_among_registered_ones_only():
    """A name in a plan is never imported, called or evaluated: it is compared with ops that exist."""
    import torch

    from autoac.execute.program import find_overload

    assert find_overload("aten.mm.default") is torch.ops.aten.mm.default
    for name in (
        "",
        ".",
        "os.system.default",
        "aten",
        "aten..",
        "__class__.__init__.__globals__",
        "aten.mm.no_such",
    ):
        assert find_overload(name) is None, name

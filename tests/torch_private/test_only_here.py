"""Private interfaces of torch are used in `autoac/torch_private` only, by the benchmarks and examples as well."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoac import torch_private

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "autoac" / "torch_private"
ALL_FILES = [
    file for folder in ("autoac", "benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
]
FILES = [file for file in ALL_FILES if HOME not in file.parents]
EXCEPTIONS = {
    "benchmarks/cuda/jobs.py": {
        "torch._functorch.config"
    },  # torch's documented place of `activation_memory_budget`
}
"""The private interfaces that a file may use by itself."""

# Those that may have the name of something of ours as well, and those that are public only by name.
TORCHS = {
    "_base",
    "_buffers",
    "_cdata",
    "_indices",
    "_modules",
    "_orig_mod",
    "_compiled_call_impl",
    "_parameters",
}
TORCHS |= {
    "_schema",
    "_sequence_nr",
    "_should_skip_dynamo",
    "_use_count",
    "_values",
    "_version",
    "OptimizedModule",
}
TORCHS |= set(torch_private.HOOKS)
OVERRIDES = {"_should_skip_dynamo"}  # of torch's classes
OTHERS = {"_getframe", "_repr_html_"}  # Python's and Jupyter's
OPS = ("aten", "_ATEN", "prims")  # ops whose names begin with an underscore are called like all others


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


OURS = {name for file in ALL_FILES for name in own_names(ast.parse(file.read_text()))} - TORCHS


def docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Strings that stand alone: nothing looks a name up by them."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))


def is_op(node: ast.expr) -> bool:
    return (
        isinstance(node, (ast.Name, ast.Attribute)) and getattr(node, "attr", getattr(node, "id", "")) in OPS
    )


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every private interface of torch that some code uses."""
    tree = ast.parse(source)
    texts = set(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if re.match(r"torch\..*\b_(?!_)", a.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and not is_op(node.value):
            if node.attr in TORCHS or (is_private(node.attr) and node.attr not in OURS | OTHERS):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            words = re.findall(r"\w+", node.value)
            yield from ((node.lineno, word) for word in words if word in TORCHS and "_" in word)
        elif isinstance(node, ast.FunctionDef) and node.name in OVERRIDES:
            yield node.lineno, node.name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_private_interface_of_torch(file: Path):
    allowed = EXCEPTIONS.get(str(file.relative_to(ROOT)), ())
    uses = [(line, name) for line, name in private_uses(file.read_text()) if name not in allowed]
    found = [f"{file.relative_to(ROOT)}:{line} uses {name}" for line, name in uses]
    assert not found, f"{', '.join(found)}: put it behind a function in autoac/torch_private, with a test"


def test_exceptions_are_needed():
    for file, names in EXCEPTIONS.items():
        assert names == {name for _, name in private_uses((ROOT / file).read_text())}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch._C", ["torch._C"]),
        ("import torch.utils._pytree as tree", ["torch.utils._pytree"]),
        (
            "from torch._subclasses.fake_tensor import FakeTensor",
            ["torch._subclasses.fake_tensor.FakeTensor"],
        ),
        ("from torch.distributed._tools import sac_ilp", ["torch.distributed._tools.sac_ilp"]),
        ("from torch import _VF", ["torch._VF"]),
        ("x = 1\ny = torch._C._current_graph_task_id()", ["_current_graph_task_id", "_C"]),
        ("tensor.untyped_storage()._cdata", ["_cdata"]),
        ("self.tensor._version", ["_version"]),
        ("getattr(model, '_compiled_call_impl', None)", ["_compiled_call_impl"]),
        ("f'{name}._orig_mod'", ["_orig_mod"]),
        ("k.endswith('_forward_hooks')", ["_forward_hooks"]),
        ("def _should_skip_dynamo(cls): ...", ["_should_skip_dynamo"]),
        ("torch._dynamo.OptimizedModule", ["OptimizedModule", "_dynamo"]),
        ('"""Reads `_cdata`."""', []),
        ("torch.ops.aten._log_softmax.default, _ATEN._to_copy", []),
        ("self._own = 1\nimport torch.utils.checkpoint", []),
        ("torch.__version__", []),
    ],
)
def test_uses_are_found(code: str, names: list[str]):
    found = list(private_uses(code))
    assert [name for _, name in found if name != "_own"] == names
    assert all(line == code.count("\n") + 1 for line, name in found if name in names)


def test_every_interface_says_where_it_is_in_torch():
    for file in HOME.glob("*.py"):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not is_private(node.name):
                said = f"{ast.get_docstring(tree)} {ast.get_docstring(node)}"
                assert "Source:" in said or "torch/" in said or file.stem == "versions", (
                    f"{file.name}: {node.name}"
                )


def test_every_interface_is_listed_and_tested():
    tests = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for name in torch_private.__all__:
        assert hasattr(torch_private, name)
        assert re.search(rf"\btorch_private\.{name}\b", tests), (
            f"{name} has no test in {Path(__file__).parent.name}"
        )

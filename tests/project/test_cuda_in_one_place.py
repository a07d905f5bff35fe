"""Code for CUDA is in `autoac/device.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from autoac.cli.commands import calibrate
from autoac.device import KINDS

ROOT = Path(__file__).resolve().parents[2]
HOME = "autoac/device.py"
ALLOWED = {
    "autoac/record/cuda/autocast.py": "a model's own autocast, where fake CPU tensors stand for CUDA's",
    "autoac/record/cuda/attention.py": "which kernels the user has switched off",
    "autoac/record/cuda/ops.py": "whether a table's device takes other ops than the one here",
    "autoac/cli/commands/calibrate.py": "its option --device: `--help` does not import torch",
    "autoac/torch_private/planner.py": "torch's own planner has a benchmark of ops for CUDA only",
}
FILES = {str(file.relative_to(ROOT)): file for file in sorted((ROOT / "autoac").rglob("*.py"))}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every use of `torch.cuda`, and of "cuda" in comparisons, lists, assignments and defaults."""
    compared: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # a node comes before the nodes in it
        if id(node) in compared:
            continue
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("torch.cuda"))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names if name.startswith("torch.cuda"))
        elif isinstance(node, (ast.Compare, ast.match_case)):
            if any(map(is_cuda, ast.walk(node))):
                line = node.lineno if isinstance(node, ast.Compare) else node.pattern.lineno
                yield line, "a comparison with 'cuda'"
            if isinstance(node, ast.Compare):
                compared |= set(map(id, ast.walk(node)))
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            yield from ((node.lineno, "a list with 'cuda'") for part in node.elts if is_cuda(part))
        elif isinstance(node, ast.arguments):
            defaults = [*node.defaults, *node.kw_defaults]
            yield from ((d.lineno, "a default of 'cuda'") for d in defaults if d is not None and is_cuda(d))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and is_cuda(node.value):
            yield node.lineno, "an assignment of 'cuda'"


def is_cuda(node: ast.AST) -> bool:
    """Whether a node is the text "cuda", with or without a device's number."""
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.split(":")[0] == "cuda"


@pytest.mark.parametrize("name", [name for name in FILES if name not in (HOME, *ALLOWED)])
def test_nothing_else_knows_cuda(name: str):
    found = [f"{name}:{line} has {what}" for line, what in uses(FILES[name].read_text())]
    assert not found, f"{', '.join(found)}: ask `device_for(device)`, see {HOME}"


def test_the_command_line_has_the_same_kinds():
    kinds, _ = get_args(calibrate.Device)
    assert set(get_args(kinds)) == KINDS.keys()


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_needed(name: str):
    assert list(uses(FILES[name].read_text())), f"{name} no longer knows CUDA: take it off the list"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = 1\ntorch.cuda.synchronize()", ["torch.cuda"]),
        ("from torch.cuda import synchronize", ["torch.cuda.synchronize"]),
        ("from torch import cuda", ["torch.cuda"]),
        ("import torch.cuda.memory", ["torch.cuda.memory"]),
        ("device.type != 'cuda'", ["a comparison with 'cuda'"]),
        ("device.type in ('cpu', 'cuda')", ["a comparison with 'cuda'"]),
        ("device == 'cuda:0'", ["a comparison with 'cuda'"]),
        ("match kind:\n    case 'cuda': ...", ["a comparison with 'cuda'"]),
        ("kinds = ('cpu', 'cuda')", ["a list with 'cuda'"]),
        ("for kind in ['cuda', 'cpu']: ...", ["a list with 'cuda'"]),
        ("Device = Literal['cpu', 'cuda']", ["a list with 'cuda'"]),
        ("def f(device='cuda', *, other='cuda:0'): ...", ["a default of 'cuda'"] * 2),
        ("lambda device='cuda': device", ["a default of 'cuda'"]),
        ("class A:\n    device: str = 'cuda'", ["an assignment of 'cuda'"]),
        ("device = 'cuda'", ["an assignment of 'cuda'"]),
        ("device: str", []),
        ("kinds = tuple(KINDS)", []),
        ("as_cuda = device_for(device).counts_memory", []),
        ("device.type == 'cpu'", []),
    ],
)
def test_uses_are_found(code: str, found: list[str]):
    assert [what for _, what in uses(code)] == found

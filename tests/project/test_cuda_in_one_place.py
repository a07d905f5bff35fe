"""What is CUDA's own stands in `autoac/device.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = "autoac/device.py"
ALLOWED = {
    "autoac/record/cuda/cublas.py": "whether a profile is of a step on a GPU",
    "autoac/record/cuda/autocast.py": "a model's own autocast, where fake CPU tensors stand for CUDA's",
    "autoac/record/cuda/attention.py": "which kernels the user has switched off",
    "autoac/record/cuda/ops.py": "whether a table's device takes other ops than the one here",
    "autoac/torch_private/planner.py": "torch's own planner has a benchmark of ops for CUDA only",
}
FILES = {str(file.relative_to(ROOT)): file for file in sorted((ROOT / "autoac").rglob("*.py"))}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every use of `torch.cuda`, and of every comparison with "cuda"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("torch.cuda"))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names if name.startswith("torch.cuda"))
        elif isinstance(node, (ast.Compare, ast.match_case)):
            texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            if any(isinstance(text, str) and text.split(":")[0] == "cuda" for text in texts):
                line = node.lineno if isinstance(node, ast.Compare) else node.pattern.lineno
                yield line, "a comparison with 'cuda'"


@pytest.mark.parametrize("name", [name for name in FILES if name not in (HOME, *ALLOWED)])
def test_nothing_else_knows_cuda(name: str):
    found = [f"{name}:{line} has {what}" for line, what in uses(FILES[name].read_text())]
    assert not found, f"{', '.join(found)}: ask `device_for(device)`, see {HOME}"


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
        ("as_cuda = device_for(device).counts_memory", []),
        ("device.type == 'cpu'", []),
    ],
)
def test_uses_are_found(code: str, found: list[str]):
    assert [what for _, what in uses(code)] == found
